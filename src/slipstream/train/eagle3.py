"""Training of an EAGLE-3 head: where it starts, and its loss with training-time test.

Li et al. 2025, arXiv 2503.01840. At inference a head goes on from its own hidden states; training
does the same: pass i takes what pass i - 1 gave, one position further.

Shapes: B conversations · T rows · F layers tapped · h hidden · d draft vocabulary · N rows that
count · S passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from slipstream.models import eagle3 as checkpoint
from slipstream.models.eagle3 import Eagle3Config, Eagle3Weights, vocabulary_maps
from slipstream.models.eagle3_module import Eagle3Module
from slipstream.train import copying
from slipstream.train.config import LOSSES, TrainConfig
from slipstream.train.copying import Sample
from slipstream.train.features import Entry, Example
from slipstream.train.target import DraftVocabulary, TargetParts
from slipstream.train.unroll import unroll

_DECAY = 0.8  # weight of each further pass
_FIRST_ALONE = 0.4  # of the training
_NEW_SCALE = 0.02  # of weights that the target has nothing for
_RESIDUAL = 0.5  # of the target's: norms undo it, and the optimizer moves the layers sooner
_SAMPLE = 128  # conversations
_COPYING = 0.2  # weight of the second loss at the start; it fades


def default_taps(layers: int) -> tuple[int, ...]:
    """The paper's, but the embedding instead of layer 2: copying heads read the token off it."""
    return (0, *checkpoint.default_taps(layers)[1:])


def config_of(target: TargetParts, taps: Sequence[int], draft_vocab: int) -> Eagle3Config:
    """A head as wide as its target's layers, with some more attention heads, which copy. There are
    as many key and value heads as query heads: all that the next token says goes through them."""
    shape = target.config
    heads = shape.num_attention_heads
    heads += copying.heads_for(shape.hidden_size, shape.head_dim, draft_vocab)
    return Eagle3Config(
        hidden=shape.hidden_size,
        target_hidden=shape.hidden_size,
        heads=heads,
        kv_heads=heads,
        dim=shape.head_dim,
        inner=shape.intermediate_size,
        vocab=shape.vocab_size,
        draft_vocab=draft_vocab,
        taps=tuple(taps),
        eps=shape.rms_norm_eps,
        rope_theta=shape.rope_parameters["rope_theta"],
        max_length=shape.max_position_embeddings,
        verifier=target.public_name,
    )


def initial(
    target: TargetParts, config: Eagle3Config, ids: Sequence[int], known: Sample
) -> Eagle3Module:
    """A head that begins as the target's last layer on the topmost feature, and copies.

    Its rows of the LM head are the target's; only what looks at the next token's embedding is new.
    It takes features as ``known`` has them, each column divided by its size.
    """
    module = Eagle3Module(config, target.embedding)
    h, layer = config.hidden, target.layer
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for name in state.keys() & {f"layers.0.{n}" for n in layer}:
        if state[name].shape == layer[name.removeprefix("layers.0.")].shape:
            state[name] = layer[name.removeprefix("layers.0.")].clone()
    own = target.config.num_attention_heads
    shared = own // target.config.num_key_value_heads  # query heads of a key
    for part, copies in (("q", 1), ("k", shared), ("v", shared)):
        name = f"self_attn.{part}_proj.weight"
        old = layer[name].unflatten(0, (-1, config.dim)).repeat_interleave(copies, 0).flatten(0, 1)
        new = _NEW_SCALE * torch.randn_like(old)
        state["layers.0." + name][: own * config.dim] = torch.cat([new, old], 1)
    out = _RESIDUAL * layer["self_attn.o_proj.weight"]
    state["layers.0.self_attn.o_proj.weight"][:, : out.shape[1]] = out
    state["layers.0.mlp.down_proj.weight"] = _RESIDUAL * layer["mlp.down_proj.weight"]
    state["layers.0.hidden_norm.weight"] = layer["input_layernorm.weight"]
    state["layers.0.input_layernorm.weight"] = torch.ones(h)
    fc = _NEW_SCALE * torch.randn(h, config.features) / config.features**0.5
    fc[:, -h:] += _RESIDUAL * torch.diag(known.size[-h:])
    state |= {"fc.weight": fc, "norm.weight": target.norm}
    state["lm_head.weight"] = target.lm_head[torch.tensor(ids)]
    copying.put(state, config, target, ids, known)
    module.load_state_dict(state)
    return module


def weights_of(
    module: Eagle3Module, ids: Sequence[int], size: Tensor, dtype: torch.dtype
) -> Eagle3Weights:
    """What is written to disk. size: [F·h], what each feature was divided by."""
    tensors = {name: p.detach().cpu() for name, p in module.named_parameters()}
    tensors["fc.weight"] = tensors["fc.weight"] / size.cpu()
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["d2t"], tensors["t2d"] = vocabulary_maps(ids, module.config.vocab)
    return Eagle3Weights(config=module.config, tensors=tensors)


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


class Eagle3Task:
    """``loop.Task`` of an EAGLE-3 head. check: held-out examples."""

    def __init__(
        self,
        module: Eagle3Module,
        collate: Collate,
        check: Sequence[Sequence[Example]],
        *,
        passes: int,
        l1: float,
    ) -> None:
        self.module = module
        self._collate = collate
        self._check = check
        self._passes, self._l1 = passes, l1

    def loss(self, examples: Sequence[Example], done: float) -> Tensor:
        """The further passes cost about what the first does, and build on it: they come later.
        Alone, the first learns from what the questions say too."""
        first = done < _FIRST_ALONE
        batch = self._collate(examples, questions=first)
        passes, weight = 1 if first else self._passes, (1 - done) * _COPYING
        return training_loss(self.module, batch, passes, self._l1, weight)

    def held_out(self) -> list[float]:
        batches = [self._collate(examples) for examples in self._check]
        return held_out(self.module, batches, self._passes)

    @property
    def outputs(self) -> Sequence[nn.Module]:
        return [self.module.lm_head]

    def write(self, folder: Path) -> None:
        head = weights_of(
            self.module, self._collate.vocabulary.ids, self._collate.size, torch.float16
        )
        checkpoint.write(folder, head, speculative_tokens=self._passes)

    def describe(self) -> str:
        taps = ", ".join(map(str, self.module.config.taps))
        return f"EAGLE-3 head. Looks at the input of layers {taps}"


def task_of(
    target: TargetParts,
    config: TrainConfig,
    ids: Sequence[int],
    learnt: Sequence[Entry],
    check: Sequence[Sequence[Example]],
    device: torch.device,
) -> Eagle3Task:
    """A new head and all that trains it; ids: of its draft vocabulary."""
    head = config_of(target, config.taps, len(ids))
    some = learnt[:: max(1, len(learnt) // _SAMPLE)]
    known = copying.sample([entry.load() for entry in some], head.hidden)
    return Eagle3Task(
        initial(target, head, ids, known).to(device),
        Collate(target, ids, known.size, config.passes, device),
        check,
        passes=config.passes,
        l1=LOSSES[config.loss],
    )
