"""The forward pass of an EAGLE-1 head on PyTorch.

Shapes: B requests · Q rows · T rows of KV before them · h hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.models.eagle1 import Eagle1Shape
from slipstream.models.eagle3_module import KV, MLP, Attention, Norm


class Eagle1Module(nn.Module):
    """Parameters have the names of ``Eagle1Shape.shapes``.

    embedding, lm_head: [V, h], the target's. normed: its final norm, [..., h] → [..., h].
    """

    embedding: Tensor
    head: Tensor

    def __init__(
        self,
        shape: Eagle1Shape,
        embedding: Tensor,
        lm_head: Tensor,
        normed: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, shape.bias)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", lm_head, persistent=False)
        self._normed = normed

    def fuse(self, features: Tensor) -> Tensor:
        """[..., h] of the target's last layer → [..., h] that its LM head sees: what a head of this
        kind goes on from, and what it guesses."""
        return self._normed(features)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, seen: Tensor, past: KV | None
    ) -> tuple[Tensor, KV]:
        """As ``Eagle3Module.forward``."""
        embedded = functional.embedding(tokens, self.embedding)
        joined = self.fc(torch.cat([embedded, hidden], -1))
        out: tuple[Tensor, KV] = self.layers[0](joined, positions, seen, past)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., h] → [..., V]."""
        return functional.linear(hidden, self.head)


class _Layer(nn.Module):
    """Without a norm before attention, as published."""

    def __init__(self, shape: Eagle1Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(
        self, hidden: Tensor, positions: Tensor, seen: Tensor, past: KV | None
    ) -> tuple[Tensor, KV]:
        attended, kv = self.self_attn(hidden, positions, seen, past)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kv
