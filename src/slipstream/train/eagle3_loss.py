"""Batches of an EAGLE-3 head's training, their loss with training-time test, and what is reached.

Li et al. 2025, arXiv 2503.01840. At inference a head goes on from its own hidden states; training
does the same: pass i takes what pass i - 1 gave, one position further.

Shapes: B conversations · T rows · F layers tapped · h hidden · d draft vocabulary · N rows that
count · S passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slipstream.models.eagle3_module import Eagle3Module
from slipstream.train import copying
from slipstream.train.features import Example
from slipstream.train.target import DraftVocabulary, TargetParts
from slipstream.train.unroll import unroll

_DECAY = 0.8  # weight of each further pass


@dataclass(frozen=True, kw_only=True)
class Batch:
    """tokens: [B, T], the token after each row's. features: [B, T, F·h]. inside: bool [B, T], no
    padding. counts: bool [B, T], rows whose guess is compared. probs: [N, d], the target's there.
    best: [N], draft ids of its most probable tokens. missed: answer rows that the draft vocabulary
    can't say."""

    tokens: Tensor
    features: Tensor
    inside: Tensor
    counts: Tensor
    probs: Tensor
    best: Tensor
    missed: int


class Collate:
    """Examples → ``Batch``. ids: of the draft vocabulary, ascending. size: [F·h], what features are
    divided by."""

    def __init__(
        self,
        target: TargetParts,
        ids: Sequence[int],
        size: Tensor,
        passes: int,
        device: torch.device,
    ) -> None:
        self.vocabulary = DraftVocabulary(target, ids, device)
        self.size = size.to(device)
        self._passes = passes

    def __call__(self, examples: Sequence[Example], *, questions: bool = False) -> Batch:
        """Row s holds token s + 1 beside the features of s; it guesses token s + 2.

        Rows count that guess a token of the answer, if the draft vocabulary can say the target's
        most probable one; with questions, those of its tokens too, if it can say them.
        """
        tokens = pad_sequence([e.tokens[1:].long() for e in examples], batch_first=True)
        features = pad_sequence([e.features[:-1] for e in examples], batch_first=True)
        last = pad_sequence([e.last[1:] for e in examples], batch_first=True)
        best = pad_sequence([e.best[1:].long() for e in examples], True, -1)
        best[:, : self._passes - 1] = -1  # the last pass has nothing to go on from there
        answers = best >= 0
        guess = torch.where(answers, self.vocabulary.draft_ids(best), -1)
        missed = int(answers.sum() - (guess >= 0).sum())
        counts, device = guess >= 0, self.vocabulary.device
        lengths = torch.tensor([len(e) - 1 for e in examples])
        steps = torch.arange(tokens.shape[1])
        if questions:
            starts = torch.tensor([e.start - 2 for e in examples])  # the row that guesses it
            following = self.vocabulary.draft_ids(tokens.roll(-1, 1))
            counts = counts | ((steps < starts[:, None]) & (following >= 0))
        return Batch(
            tokens=tokens.to(device),
            features=features.to(device).float() / self.size,
            inside=(steps < lengths[:, None]).to(device),
            counts=counts.to(device),
            probs=self.vocabulary.probs(last[counts]),
            best=guess[counts].to(device),
            missed=missed,
        )


def loss_of(logits: Tensor, probs: Tensor, l1: float) -> Tensor:
    """Of one pass: (1 - l1) · CE + l1 · |p - q|₁, averaged over rows; [N, d] each.

    The second term is twice the chance of a rejection (DSpark's weights are 0.1 and 0.9).
    """
    log_q = logits.float().log_softmax(-1)
    loss = -(1 - l1) * (probs * log_q).sum(-1).mean()
    if l1:
        loss = loss + l1 * (log_q.exp() - probs).abs().sum(-1).mean()
    return loss


def training_loss(
    module: Eagle3Module, batch: Batch, passes: int, l1: float, copying_weight: float
) -> Tensor:
    """All passes together, and how well the copying heads find what they should."""
    if not len(batch.best):  # nothing that the draft vocabulary can say: a loss all the same
        return 0.0 * sum(p.sum() for p in module.parameters())  # type: ignore[return-value]
    with torch.autocast(batch.tokens.device.type, torch.bfloat16):
        hidden = module.fuse(batch.features)
        logits = unroll(module, batch.tokens, hidden, batch.counts, passes)
        found = copying.attention_loss(module, batch.tokens, hidden, batch.inside)
    weights = [_DECAY**i for i in range(passes)]
    losses = [w * loss_of(x, batch.probs, l1) for w, x in zip(weights, logits, strict=True)]
    return torch.stack(losses).sum() / sum(weights) + copying_weight * found


@torch.inference_mode()
def held_out(module: Eagle3Module, batches: Sequence[Batch], passes: int) -> list[float]:
    """The share of draft positions 1 … S that are reached and right: greedy, teacher-forced.

    A position counts where all before it were right; their sum and one is τ of a chain.
    """
    right, total = [0] * passes, 0
    for batch in batches:
        reached = torch.ones_like(batch.counts)
        with torch.autocast(batch.tokens.device.type, torch.bfloat16):
            hidden = module.fuse(batch.features)
            found = unroll(module, batch.tokens, hidden, batch.counts, passes)
        for index, logits in enumerate(found):
            hit = torch.zeros_like(batch.counts)
            hit[batch.counts] = logits.argmax(-1) == batch.best
            reached = hit & (reached if index == 0 else reached.roll(1, dims=1))
            right[index] += int(reached.sum())
        total += len(batch.best) + batch.missed
    return [r / max(total, 1) for r in right]
