"""The forward pass of an EAGLE-3 head on PyTorch: training, GPUs, and the reference on CPUs.

Shapes: B requests · Q rows · T rows of KV before them · h hidden · F layers tapped · d draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.models.eagle3 import Eagle3Config

KV = tuple[Tensor, Tensor]  # keys and values, [B, kv_heads, T, D]


class Eagle3Module(nn.Module):
    """Parameters have the names of ``Eagle3Config.shapes``; the embedding is the target's own.

    embedding: [V, h], frozen.
    """

    embedding: Tensor

    def __init__(self, config: Eagle3Config, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.features, config.hidden, False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = Norm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, False)
        self.register_buffer("embedding", embedding, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features, [..., F·h] → [..., h]."""
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        seen: Tensor,
        past: KV | None,
        paths: Sequence[KV] | None = None,
    ) -> tuple[Tensor, KV]:
        """One pass of the layer.

        tokens, positions: [B, Q]. hidden: [B, Q, h], of the position before each token: fused
        features, or what this returned for the row's parent. seen: bool, broadcast to
        [B, 1, Q, T + Q]. Returns the hidden states [B, Q, h], not normed, and the KV of all rows.

        paths: KV [B, kv_heads, Q, D] each; if given, a row sees of its own pass itself alone, and
        its row of each of these; seen is [B, 1, Q, T] then, and the KV is of the Q rows.
        """
        embedded = functional.embedding(tokens, self.embedding)
        out: tuple[Tensor, KV] = self.layer(embedded, hidden, positions, seen, past, paths)
        return out

    @property
    def layer(self) -> Layer:
        """The only one."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., h] → [..., d], over the draft vocabulary."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class Norm(nn.RMSNorm):
    """In the dtype of its weight: under autocast what comes in is narrower."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = super().forward(x.to(self.weight.dtype))
        return normed


class Layer(nn.Module):
    """Attention on the token beside the hidden state, and an MLP."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = Norm(config.hidden, config.eps)
        self.input_layernorm = Norm(config.hidden, config.eps)
        self.post_attention_layernorm = Norm(config.hidden, config.eps)
        self.self_attn = Attention(config, 2 * config.hidden)
        self.mlp = MLP(config)
        self._normed_residual = config.norm_before_residual

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        seen: Tensor,
        past: KV | None,
        paths: Sequence[KV] | None,
    ) -> tuple[Tensor, KV]:
        normed = self.hidden_norm(hidden)
        residual = normed if self._normed_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, kv = self.self_attn(both, positions, seen, past, paths)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kv


class LayerSizes(Protocol):
    """What attention and MLP need to know of a head."""

    @property
    def hidden(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...


class Attention(nn.Module):
    """width: of its input."""

    _frequencies: Tensor

    def __init__(self, config: LayerSizes, width: int) -> None:
        super().__init__()
        self._dim, self._theta = config.dim, config.rope_theta
        query, kv = config.heads * config.dim, config.kv_heads * config.dim
        self.q_proj = nn.Linear(width, query, False)
        self.k_proj = nn.Linear(width, kv, False)
        self.v_proj = nn.Linear(width, kv, False)
        self.o_proj = nn.Linear(query, config.hidden, False)
        self.set_frequencies(None)

    def set_frequencies(self, device: torch.device | None) -> None:
        """They are float32 in a head of any dtype."""
        steps = torch.arange(0, self._dim, 2, dtype=torch.float32, device=device) / self._dim
        self.register_buffer("_frequencies", self._theta**-steps, persistent=False)

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair of dimensions: [B, Q] → [B, 1, Q, D/2]."""
        angles = positions[:, None, :, None] * self._frequencies
        return angles.cos(), angles.sin()

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        seen: Tensor,
        past: KV | None,
        paths: Sequence[KV] | None = None,
    ) -> tuple[Tensor, KV]:
        """x: [B, Q, width]."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self._dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        cosine, sine = self.turn(positions)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        if paths is not None:
            assert past is not None
            mixed = _along_paths(query, seen, past, [*paths, (key, value)])
            return self.o_proj(mixed.transpose(1, 2).flatten(2)), (key, value)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), (key, value)


def _along_paths(query: Tensor, seen: Tensor, past: KV, paths: Sequence[KV]) -> Tensor:
    """Attention to what is seen of the past, and of each path to the row's own entry."""
    groups, length = query.shape[1] // past[0].shape[1], past[0].shape[2]
    keys, values = (part.repeat_interleave(groups, 1) for part in past)
    own = [[part.repeat_interleave(groups, 1) for part in kv] for kv in paths]
    scores = (query @ keys.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
    further = [(query * key).sum(-1, keepdim=True).to(scores) for key, _ in own]
    shares = (torch.cat([scores, *further], -1).float() * query.shape[-1] ** -0.5).softmax(-1)
    shares = shares.to(values)
    mixed = shares[..., :length] @ values
    for i, (_, value) in enumerate(own, length):
        mixed = mixed + shares[..., i : i + 1] * value
    return mixed


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Queries or keys [B, heads, Q, D] by what ``Attention.turn`` gave."""
    first, second = x.chunk(2, -1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    return turned.to(x.dtype)  # the angles are float32, or more


class MLP(nn.Module):
    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.inner, False)
        self.up_proj = nn.Linear(config.hidden, config.inner, False)
        self.down_proj = nn.Linear(config.inner, config.hidden, False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
