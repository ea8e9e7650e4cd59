"""Attention heads that copy, put into a new head before it is trained.

Much of what a model says stands in its context already: what followed the newest token there is a
good guess. Attention finds it in one layer where a row holds a token beside what the target knew
at the one before, as in an EAGLE head: queries of the newest token, keys of the token before,
values of the row's own (the induction of Olsson et al. 2022, arXiv 2209.11895, which takes a
transformer two layers). Training finds this late. So it starts there, and a second loss keeps it
there.

Shapes: n rows · h hidden · F·h features · D of an attention head · C copying heads · B, T as in
``train.eagle3``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.models.eagle3 import Eagle3Config
from slipstream.models.eagle3_module import Eagle3Module, rotate
from slipstream.train.features import Example
from slipstream.train.target import TargetParts, unit

_HEADS = 7
_SINK = 5  # times the median: rows that attention rests on are no measure of the others
_SHARPNESS = 12.0  # of attention to a match, in logits
_CODE = 0.25  # of the hidden state's size
_COPY = 0.35
_RIDGE = 1e-4
_LARGEST = 12.0  # loss of a row; further off it has nothing to say on where to go


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Some rows of the training text. tokens: [n]. features: [n, F·h] of them, each column divided
    by its ``size``, [F·h]."""

    tokens: Tensor
    features: Tensor
    size: Tensor


def sample(examples: Sequence[Example], hidden: int) -> Sample:
    tokens = torch.cat([e.tokens.long() for e in examples])
    features = torch.cat([e.features for e in examples]).float()
    top = features[:, -hidden:].pow(2).mean(1).sqrt()
    usual = top < _SINK * top.median()
    features = features[usual]
    size = features.pow(2).mean(0).sqrt().clamp_min(1e-3)
    return Sample(tokens=tokens[usual], features=features / size, size=size)


def heads_for(hidden: int, dim: int, draft_vocab: int) -> int:
    """How many a head of these sizes has room for."""
    return min(_HEADS, min(hidden, draft_vocab) // dim)


def put(
    state: dict[str, Tensor],
    config: Eagle3Config,
    target: TargetParts,
    ids: Sequence[int],
    known: Sample,
) -> None:
    """Make the last heads of a new EAGLE-3 head copy.

    state: its tensors, changed in place; its other heads and ``fc`` are there. ids: of the draft
    vocabulary.

    A token's code is its embedding in the directions that words differ in. Of the token before, the
    lowest feature tells it, by least squares; it travels in the directions of the hidden state that
    vary least. Codes are compared where the rotation by position is slow.
    """
    h, dim = config.hidden, config.dim
    count, half = heads_for(h, dim, len(ids)), dim // 2
    if not count:
        return
    words = unit(target.embedding[torch.tensor(ids)], config.eps)
    rows = unit(target.embedding[known.tokens], config.eps)
    mean = words.mean(0)
    _, spread, directions = torch.linalg.svd(words - mean, full_matrices=False)
    coder = directions[: count * half] / spread[: count * half, None] * len(words) ** 0.5
    codes = (rows - mean) @ coder.T
    lowest = known.features[:, :h]
    square = lowest.T @ lowest
    square += _RIDGE * square.diagonal().mean() * torch.eye(h)
    decoder = torch.linalg.solve(square, lowest.T @ codes)  # [h, codes]

    fc = state["fc.weight"]
    hidden = known.features @ fc.T
    size = hidden.pow(2).mean(1).sqrt().median()
    free = torch.linalg.eigh(hidden.T @ hidden).eigenvectors[:, : count * half]
    fc = fc - free @ (free.T @ fc)
    fc[:, :h] += _CODE * size * free @ decoder.T
    state["fc.weight"] = fc

    slow = [d for i in range(half // 2, half) for d in (i, i + half)]
    query, key, value = (torch.zeros(count, dim, 2 * h) for _ in range(3))
    out = torch.zeros(h, count, dim)
    keys = free.T / state["layers.0.hidden_norm.weight"] / _CODE
    for head in range(count):  # the directions are dealt out, so that all heads get large ones
        query[head, slow, :h] = _SHARPNESS * dim**0.5 / half * coder[head::count]
        key[head, slow, h:] = keys[head::count]
        value[head, :, :h] = directions[head : count * dim : count]
        out[:, head] = _COPY * size * value[head, :, :h].T
    for part, tensor in (("q", query), ("k", key), ("v", value)):
        state[f"layers.0.self_attn.{part}_proj.weight"][-count * dim :] = tensor.flatten(0, 1)
    state["layers.0.self_attn.o_proj.weight"][:, -count * dim :] = out.flatten(1)


def attention_loss(module: Eagle3Module, tokens: Tensor, hidden: Tensor, inside: Tensor) -> Tensor:
    """-log of the copying heads' attention to what they should bring, averaged over the rows that
    have it: rows of the right token, where the one before them is the newest token too.

    tokens: [B, T]. hidden: [B, T, h], fused features. inside: bool [B, T], no padding.
    """
    scores = _scores(module, tokens, hidden)
    if not scores.numel():  # the head is too small to have any
        return scores.sum()
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    causal = steps[:, None] >= steps
    none = torch.full_like(tokens[:, :1], -1)
    before, after = torch.cat([none, tokens[:, :-1]], 1), torch.cat([tokens[:, 1:], none], 1)
    wanted = (before[:, None] == tokens[..., None]) & (tokens[:, None] == after[..., None])
    wanted &= causal & inside[:, None] & inside[..., None]
    lowest = torch.finfo(scores.dtype).min
    whole = scores.masked_fill(~causal, lowest).logsumexp(-1)
    right = scores.masked_fill(~wanted[:, None], lowest).logsumexp(-1)
    rows = wanted.any(-1)
    losses = (whole - right).transpose(1, 2)[rows].clamp_max(_LARGEST)
    return losses.sum() / max(1, losses.numel())


def _scores(module: Eagle3Module, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Of the copying heads alone: [B, C, T, T]."""
    config, layer = module.config, module.layer
    count = heads_for(config.hidden, config.dim, config.draft_vocab)
    embedded = layer.input_layernorm(functional.embedding(tokens, module.embedding))
    both = torch.cat([embedded, layer.hidden_norm(hidden)], -1)
    turn = layer.self_attn.turn(torch.arange(tokens.shape[1], device=tokens.device)[None])
    query, key = (
        functional.linear(both, part.weight[len(part.weight) - count * config.dim :])
        .unflatten(-1, (count, config.dim))
        .transpose(1, 2)
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    )
    scores = rotate(query, *turn) @ rotate(key, *turn).transpose(-1, -2)
    return scores.float() * config.dim**-0.5
