"""The forward pass of Medusa heads on PyTorch.

Shapes: K heads · N rows · h hidden · d draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.models.medusa import MedusaHeads, MedusaShape


class MedusaModule(nn.Module):
    """Parameters have the names of ``MedusaShape.shapes``."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        h, d = shape.hidden, shape.draft_vocab
        for head in range(shape.heads):
            parts: list[nn.Module] = [_Block(h) for _ in range(shape.layers)]
            if not shape.shared:
                parts.append(nn.Linear(h, d, False))
            self.add_module(str(head), nn.ModuleList(parts))
        if shape.shared:
            self.lm_head = nn.Linear(h, d, False)

    def state(self, head: int, hidden: Tensor) -> Tensor:
        """[..., h] that the target's LM head sees → [..., h] that this head's output layer does."""
        for block in self._parts(head)[: self.shape.layers]:
            hidden = block(hidden)
        return hidden

    def output(self, head: int) -> nn.Linear:
        layer = self.lm_head if self.shape.shared else self._parts(head)[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] of token t → [K, ..., d]: logits of tokens t + 2, t + 3, …"""
        heads = range(self.shape.heads)
        return torch.stack([self.output(i)(self.state(i, hidden)) for i in heads])

    def _parts(self, head: int) -> nn.ModuleList:
        parts = self.get_submodule(str(head))
        assert isinstance(parts, nn.ModuleList)
        return parts


class _Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


def module_of(heads: MedusaHeads) -> MedusaModule:
    """Heads from disk, frozen, in float32."""
    with torch.device("meta"):
        module = MedusaModule(heads.shape)
    state = {k: v.float() for k, v in heads.tensors.items() if k not in ("d2t", "t2d")}
    module.load_state_dict(state, assign=True)
    return module.requires_grad_(False).eval()
