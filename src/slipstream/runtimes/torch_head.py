"""An EAGLE head on PyTorch: beside targets on GPUs, and the reference on CPUs.

Shapes: B requests · R rows of all · F layers tapped · h hidden · d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from slipstream import tree
from slipstream.cache import Cache, LayerShape, TensorKV, TorchCache
from slipstream.drafters.expand import Expanded, TreeShape, expand_below
from slipstream.models.eagle1 import Eagle1Weights
from slipstream.models.eagle1_module import Eagle1Module
from slipstream.models.eagle3 import Eagle3Weights
from slipstream.models.eagle3_module import KV, Attention, Eagle3Module, LayerSizes
from slipstream.types import StepOutput, StepRows


class HeadModule(Protocol):
    """The forward pass of a head; shapes as in ``models/eagle3_module.py``."""

    def fuse(self, features: Tensor) -> Tensor: ...

    def __call__(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, seen: Tensor, past: KV | None
    ) -> tuple[Tensor, KV]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def eagle3_head(weights: Eagle3Weights, embedding: Tensor) -> TorchHead:
    """embedding: [V, h] of the target; its device and dtype are the head's."""
    config = weights.config
    with torch.device("meta"):
        module = Eagle3Module(config, torch.empty(0))
    own = weights.tensors.get("embed_tokens.weight")
    module.embedding = embedding.detach() if own is None else own.to(embedding)
    fill(module, weights.tensors, embedding)
    return TorchHead(module, config, weights.target_ids, embedding)


def eagle1_head(
    weights: Eagle1Weights,
    embedding: Tensor,
    lm_head: Tensor,
    normed: Callable[[Tensor], Tensor],
) -> TorchHead:
    """embedding, lm_head: [V, h] of the target, their device and dtype are the head's. normed: its
    final norm."""
    own = {key: value.to(embedding) for key, value in weights.tensors.items()}
    with torch.device("meta"):
        module = Eagle1Module(
            weights.shape,
            own.get("embed_tokens.weight", embedding),
            own.get("lm_head.weight", lm_head)[: len(lm_head)],
            normed,
        )
    fill(module, weights.tensors, embedding)
    return TorchHead(module, weights.shape, torch.arange(len(lm_head)), embedding)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], like: Tensor) -> None:
    """Weights into a module that was made on meta."""
    names = dict(module.named_parameters())
    state = {key: value.to(like) for key, value in tensors.items() if key in names}
    module.load_state_dict(state, assign=True)
    for part in module.modules():
        if isinstance(part, Attention):
            part.set_frequencies(like.device)
    module.requires_grad_(False)


class TorchHead:
    """target_ids: [d], the target's id of each draft token. like: of the head's device and
    dtype."""

    def __init__(
        self, module: HeadModule, sizes: LayerSizes, target_ids: Tensor, like: Tensor
    ) -> None:
        self._module = module
        self._device, self._dtype = like.device, like.dtype
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self.target_ids = target_ids.to(like.device)
        self._layer = LayerShape(kv_heads=sizes.kv_heads, key_dim=sizes.dim, value_dim=sizes.dim)

    def new_cache(self, slots: int, max_length: int) -> TorchCache:
        return TorchCache(
            [self._layer],
            slots=slots,
            max_length=max_length,
            dtype=self._dtype,
            device=self._device,
        )

    def fuse(self, features: Tensor) -> Tensor:
        """[R, F·h] of the target → [R, h]."""
        return self._module.fuse(features.to(self._device, self._dtype)).to(self._dtype)

    def step(self, batch: Sequence[StepRows], cache: Cache, hidden: Tensor) -> StepOutput:
        """hidden: [R, h], of the position before each row's token. Gives logits [N, d], float32 at
        least, and as features the rows' own hidden states [R, 1, h]."""
        assert isinstance(cache, TorchCache)
        slots = [rows.slot for rows in batch]
        lengths = [cache.lengths[slot] for slot in slots]
        counts = [len(rows.tokens) for rows in batch]
        width, past = max(counts), max(lengths)
        tokens = np.zeros((len(batch), width), dtype=np.int64)
        positions = np.zeros((len(batch), width), dtype=np.int64)
        seen = np.zeros((len(batch), width, past + width), dtype=bool)
        seen[:, :, past:] = np.eye(width, dtype=bool)  # a padded row sees itself
        for b, rows in enumerate(batch):
            tokens[b, : counts[b]] = rows.tokens
            positions[b, : counts[b]] = lengths[b] + tree.depths(rows.parents)
            seen[b, : counts[b], : lengths[b]] = True
            seen[b, : counts[b], past : past + counts[b]] = tree.ancestors(rows.parents)
        padded = torch.nn.utils.rnn.pad_sequence(list(hidden.split(counts)), batch_first=True)
        keys, values = cache.view(slots)
        out, (key, value) = self._module(
            self._tensor(tokens),
            padded,
            self._tensor(positions),
            self._tensor(seen)[:, None],
            (keys[0], values[0]),
        )
        flat = torch.cat([out[b, :count] for b, count in enumerate(counts)])
        starts = np.cumsum([0, *counts])
        wanted = [int(starts[b]) + row for b, rows in enumerate(batch) for row in rows.logit_rows]
        return StepOutput(
            logits=self._module.logits(flat[wanted]).to(self._wide),
            new_kv=TensorKV(keys=[key[:, :, past:]], values=[value[:, :, past:]]),
            features=flat[:, None],
        )

    def expand(
        self,
        batch: Sequence[StepRows],
        cache: Cache,
        features: Tensor,
        shapes: Sequence[TreeShape],
    ) -> tuple[StepOutput, list[Expanded]]:
        """``expand_below`` with this head."""
        return expand_below(self, batch, cache, features, shapes)

    def _tensor(self, data: np.ndarray) -> Tensor:
        return torch.from_numpy(data).to(self._device)
