"""Training of Medusa heads: where they start, and their loss.

Medusa-1 of Cai et al. 2024, arXiv 2401.10774: the target stays as it is; head i at token t learns
token t + 2 + i. Here it learns the target's own distribution of that token, not one sample of it.

Shapes: K heads · N rows, those of all answers one after the other · h hidden · d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.models import medusa as checkpoint
from slipstream.models.head_files import vocabulary_maps
from slipstream.models.head_sources import resolve_head
from slipstream.models.medusa import MedusaHeads, MedusaShape
from slipstream.models.medusa_module import MedusaModule
from slipstream.train.config import DRAFT_VOCAB, LOSSES, TrainConfig
from slipstream.train.eagle3_loss import loss_of
from slipstream.train.features import Entry, Example
from slipstream.train.target import DraftVocabulary, TargetParts

_DECAY = 0.8  # weight of each further head


def shape_of(
    target: TargetParts, *, heads: int, draft_vocab: int, shared: bool = True, layers: int = 1
) -> MedusaShape:
    return MedusaShape(
        heads=heads,
        layers=layers,
        hidden=target.config.hidden_size,
        vocab=target.config.vocab_size,
        draft_vocab=draft_vocab,
        shared=shared,
        verifier=target.public_name,
    )


def initial(target: TargetParts, shape: MedusaShape, ids: Sequence[int]) -> MedusaModule:
    """Heads that begin as the target's LM head: every residual block adds nothing.

    ids: target ids of the draft vocabulary, ascending.
    """
    module = MedusaModule(shape)
    rows = target.lm_head[torch.tensor(ids)]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.split(".")[-2] == "linear":
                nn.init.zeros_(parameter)
            else:
                parameter.copy_(rows)
    return module


def weights_of(module: MedusaModule, ids: Sequence[int], dtype: torch.dtype) -> MedusaHeads:
    """What is written to disk."""
    tensors = {name: p.detach().to("cpu", dtype) for name, p in module.named_parameters()}
    if module.shape.reduced:
        tensors["d2t"], tensors["t2d"] = vocabulary_maps(ids, module.shape.vocab)
    return MedusaHeads(shape=module.shape, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Row j holds a token t of an answer (or the one before it) and what follows at t + 1.

    hidden: [N, h], what the LM head sees at t. probs: [N, d], the target's after t + 1, so of token
    t + 2: what head 0 learns; head i learns those of row j + i. best: [N], draft ids of the most
    probable tokens there, -1 where the draft vocabulary can't say them. left: [N], rows of the same
    answer from j on.
    """

    hidden: Tensor
    probs: Tensor
    best: Tensor
    left: Tensor

    def rows(self, head: int) -> Tensor:
        """Rows at which this head has something to learn."""
        rows = (self.left > head).nonzero()[:, 0]
        return rows[self.best[rows + head] >= 0]


class Collate:
    """Examples → ``Batch``; ids: of the draft vocabulary, ascending."""

    def __init__(self, target: TargetParts, ids: Sequence[int], device: torch.device) -> None:
        self.vocabulary = DraftVocabulary(target, ids, device)

    def __call__(self, examples: Sequence[Example]) -> Batch:
        before = torch.cat([e.last[e.start - 1 : -1].float() for e in examples])
        after = torch.cat([e.last[e.start :].float() for e in examples])
        best = torch.cat([e.best[e.start :] for e in examples]).long()
        left = torch.cat([torch.arange(len(e) - e.start, 0, -1) for e in examples])
        return Batch(
            hidden=self.vocabulary.normed(before),
            probs=self.vocabulary.probs(after),
            best=self.vocabulary.draft_ids(best).to(self.vocabulary.device),
            left=left.to(self.vocabulary.device),
        )


def training_loss(module: MedusaModule, batch: Batch, l1: float) -> Tensor:
    """All heads together. l1: as in ``eagle3.loss_of``."""
    losses, weights = [], []
    for head in range(module.shape.heads):
        rows = batch.rows(head)
        if len(rows):
            logits = _logits(module, head, batch.hidden[rows])
            weights.append(_DECAY**head)
            losses.append(weights[-1] * loss_of(logits, batch.probs[rows + head], l1))
    if not losses:  # nothing that the draft vocabulary can say: a loss all the same
        return 0.0 * sum(p.sum() for p in module.parameters())  # type: ignore[return-value]
    return torch.stack(losses).sum() / sum(weights)


def _logits(module: MedusaModule, head: int, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, torch.bfloat16):
        logits: Tensor = module.output(head)(module.state(head, hidden))
    return logits


@torch.inference_mode()
def held_out(module: MedusaModule, batches: Sequence[Batch]) -> list[float]:
    """The share of draft positions 1 … K that are reached and right: greedy, teacher-forced.

    A position counts where all before it were right; their sum and one is τ of a chain.
    """
    right, total = [0] * module.shape.heads, 0
    for batch in batches:
        reached = torch.ones_like(batch.best, dtype=torch.bool)
        for head in range(module.shape.heads):
            rows = batch.rows(head)
            hit = torch.zeros_like(reached)
            guesses = _logits(module, head, batch.hidden[rows]).argmax(-1)
            hit[rows] = guesses == batch.best[rows + head]
            reached = reached & hit
            right[head] += int(reached.sum())
        total += len(batch.best)
    return [r / max(total, 1) for r in right]


class MedusaTask:
    """``loop.Task`` of Medusa heads. check: held-out examples."""

    def __init__(
        self,
        module: MedusaModule,
        collate: Collate,
        check: Sequence[Sequence[Example]],
        *,
        l1: float = 0.0,
    ) -> None:
        self.module = module
        self._collate = collate
        self._check = check
        self._l1 = l1

    def loss(self, examples: Sequence[Example], done: float) -> Tensor:
        return training_loss(self.module, self._collate(examples), self._l1)

    def held_out(self) -> list[float]:
        return held_out(self.module, [self._collate(examples) for examples in self._check])

    @property
    def outputs(self) -> Sequence[nn.Module]:
        heads = 1 if self.module.shape.shared else self.module.shape.heads
        return [self.module.output(head) for head in range(heads)]

    def write(self, folder: Path) -> None:
        checkpoint.write(
            folder, weights_of(self.module, self._collate.vocabulary.ids, torch.float16)
        )

    def describe(self) -> str:
        shape = self.module.shape
        return (
            f"{shape.heads} Medusa heads, residual blocks in each: {shape.layers}; draft "
            f"vocabulary of {shape.draft_vocab} of {shape.vocab} tokens."
        )


def taps_of(config: TrainConfig, layers: int) -> tuple[int, ...]:
    """None beside the last layer's output."""
    return ()


def task_of(
    target: TargetParts,
    config: TrainConfig,
    learnt: Sequence[Entry],
    check: Sequence[Sequence[Example]],
    common: Callable[[int], Sequence[int]],
    device: torch.device,
) -> MedusaTask:
    """As in ``train.run.Recipe``; new heads begin without looking at what is learnt."""
    if config.init:
        heads = checkpoint.read(resolve_head(config.init), config.init)
        ids: Sequence[int] = heads.target_ids.tolist()
        module = MedusaModule(heads.shape)
        module.load_state_dict({name: heads.tensors[name].float() for name in module.state_dict()})
    else:
        ids = common(config.draft_vocab or DRAFT_VOCAB)
        module = initial(
            target, shape_of(target, heads=config.heads or 4, draft_vocab=len(ids)), ids
        )
    collate = Collate(target, ids, device)
    return MedusaTask(module.to(device), collate, check, l1=LOSSES[config.loss])
