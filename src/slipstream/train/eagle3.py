"""Training of an EAGLE-3 head: where it starts, and in which order it learns.

Shapes: F layers tapped · h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.models import eagle3 as checkpoint
from slipstream.models.eagle3 import Eagle3Config, Eagle3Weights, vocabulary_maps
from slipstream.models.eagle3_module import Eagle3Module
from slipstream.models.head_sources import resolve_head
from slipstream.train import copying
from slipstream.train.config import DRAFT_VOCAB, LOSSES, TrainConfig
from slipstream.train.copying import Sample
from slipstream.train.eagle3_loss import Collate, held_out, training_loss
from slipstream.train.features import Entry, Example
from slipstream.train.target import TargetParts

_FIRST_ALONE = 0.4  # of the training
_NEW_SCALE = 0.02  # of weights that the target has nothing for
_RESIDUAL = 0.5  # of the target's: norms undo it, and the optimizer moves the layers sooner
_SAMPLE = 128  # conversations
_PASSES = 3
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


def loaded(
    head: Eagle3Weights, taps: Sequence[int], target: TargetParts, size: Tensor
) -> Eagle3Module:
    """A head of any training, to train it on; it takes features divided by ``size``, [F·h]."""
    module = Eagle3Module(replace(head.config, taps=tuple(taps)), target.embedding)
    state = {name: head.tensors[name].float() for name in module.state_dict()}
    state["fc.weight"] = state["fc.weight"] * size
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
        new: bool = True,
    ) -> None:
        self.module = module
        self._collate = collate
        self._check = check
        self._passes, self._l1, self._new = passes, l1, new

    def loss(self, examples: Sequence[Example], done: float) -> Tensor:
        """The further passes cost about what the first does, and build on it: they come later.
        Alone, the first learns from what the questions say too. All this is for a new head."""
        first = self._new and done < _FIRST_ALONE
        batch = self._collate(examples, questions=first)
        passes, weight = 1 if first else self._passes, self._new * (1 - done) * _COPYING
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
        config = self.module.config
        return (
            f"EAGLE-3 head. Looks at the input of layers {', '.join(map(str, config.taps))}; draft "
            f"vocabulary of {config.draft_vocab} of {config.vocab} tokens."
        )


def taps_of(config: TrainConfig, layers: int) -> tuple[int, ...]:
    if config.init:
        return tuple(_start(config).config.taps) or checkpoint.default_taps(layers)
    return tuple(config.taps or default_taps(layers))


def task_of(
    target: TargetParts,
    config: TrainConfig,
    learnt: Sequence[Entry],
    check: Sequence[Sequence[Example]],
    common: Callable[[int], Sequence[int]],
    device: torch.device,
) -> Eagle3Task:
    """As in ``train.run.Recipe``."""
    taps = taps_of(config, target.config.num_hidden_layers)
    some = learnt[:: max(1, len(learnt) // _SAMPLE)]
    known = copying.sample([entry.load() for entry in some], target.config.hidden_size)
    if config.init:
        start = _start(config)
        ids: Sequence[int] = start.target_ids.tolist()
        module = loaded(start, taps, target, known.size)
    else:
        ids = common(config.draft_vocab or DRAFT_VOCAB)
        module = initial(target, config_of(target, taps, len(ids)), ids, known)
    passes = config.passes or _PASSES
    return Eagle3Task(
        module.to(device),
        Collate(target, ids, known.size, passes, device),
        check,
        passes=passes,
        l1=LOSSES[config.loss],
        new=not config.init,
    )


def _start(config: TrainConfig) -> Eagle3Weights:
    head = checkpoint.read(resolve_head(config.init), config.init)
    if "embed_tokens.weight" in head.tensors:
        raise SlipstreamError(
            f"--init {config.init}: it has an embedding of its own; only heads that share their "
            "target's can be trained on"
        )
    return head
