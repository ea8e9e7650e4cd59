"""The parts of the target that training starts from and compares with.

Shapes: h hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.models.sources import DEFAULT_HUB_ID, DEFAULT_MODEL, resolve
from slipstream.models.weights import Weights
from slipstream.runtimes import native_layout as layout
from slipstream.runtimes.native import read_config
from slipstream.runtimes.outer import read_matrices


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """config: transformers' own. embedding, lm_head: [V, h]. norm: [h], the last one.
    layer: tensors of the last layer by their names in it."""

    name: str
    config: Any
    embedding: Tensor
    lm_head: Tensor
    norm: Tensor
    layer: dict[str, Tensor]

    @property
    def public_name(self) -> str:
        """What others know it by."""
        return DEFAULT_HUB_ID if self.name == DEFAULT_MODEL else self.name

    def normed(self, last: Tensor) -> Tensor:
        """[..., h] of the last layer → [..., h], what the LM head takes."""
        return unit(last.float(), self.config.rms_norm_eps) * self.norm


def unit(x: Tensor, eps: float) -> Tensor:
    """[..., h], each divided by its root mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class DraftVocabulary:
    """What the target says in the tokens that a head can say; ids: the target's, ascending.

    Shapes: d draft vocabulary.
    """

    def __init__(self, target: TargetParts, ids: Sequence[int], device: torch.device) -> None:
        self.ids, self.device = ids, device
        self._target = target
        used = torch.tensor(ids)
        self._rows = target.lm_head[used].to(device)
        self._draft_id = torch.full((target.config.vocab_size,), -1)
        self._draft_id[used] = torch.arange(len(used))

    def normed(self, last: Tensor) -> Tensor:
        """``TargetParts.normed``, on the device."""
        return self._target.normed(last).to(self.device)

    def probs(self, last: Tensor) -> Tensor:
        """[N, h] of the last layer → [N, d], the target's distribution there."""
        return (self.normed(last) @ self._rows.T).softmax(-1)

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Of target ids from 0 up; -1 for what can't be said."""
        return self._draft_id[tokens]


def read_target(name: str) -> TargetParts:
    """Read them from the model's folder, in float32.

    Raises SlipstreamError for an architecture whose logits aren't a plain product.
    """
    embedding, lm_head = read_matrices(name)
    folder = resolve(name)
    config = read_config(folder, name)
    tensors = Weights(folder, name)
    at = f"model.layers.{config.num_hidden_layers - 1}."
    return TargetParts(
        name=name,
        config=config,
        embedding=embedding,
        lm_head=lm_head,
        norm=tensors[layout.outer_names(config, tensors).vectors["norm"][0]].float(),
        layer={k.removeprefix(at): tensors[k].float() for k in tensors if k.startswith(at)},
    )
