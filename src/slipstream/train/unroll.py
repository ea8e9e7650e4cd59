"""The passes of training-time test (Li et al. 2025, arXiv 2503.01840, section 3.2).

Pass 0 runs every row on the target's features, as at inference when their tokens are committed. Row
s of pass i goes on from what row s - 1 of pass i - 1 gave, so it guesses with i tokens drafted: it
attends to rows of pass 0 up to s - i, and to its own path, one row of each later pass.

Shapes: B conversations · T rows · A rows of the later passes · h hidden · d draft vocabulary · N
rows that count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.eagle3_module import KV, Eagle3Module


def unroll(
    module: Eagle3Module, tokens: Tensor, hidden: Tensor, counts: Tensor, passes: int
) -> list[Tensor]:
    """Logits of each pass at the rows that count, [N, d].

    tokens: [B, T], after each row. hidden: [B, T, h], fused features. counts: bool [B, T]. Later
    passes run the rows that count and those that they go on from, no others.
    """
    length = tokens.shape[1]
    steps = torch.arange(length, device=tokens.device)
    causal = steps[:, None] >= steps
    out, first = module(tokens, hidden, steps.expand_as(tokens), causal, None)
    logits = [module.logits(out[counts])]
    if passes == 1:
        return logits
    rows = _later_rows(counts, passes)
    inside = (rows >= 0) & (rows < length)
    rows = rows.clamp(0, length - 1)
    tokens, counts = tokens.gather(1, rows), counts.gather(1, rows) & inside
    hidden = out.roll(1, dims=1).gather(1, rows[..., None].expand(-1, -1, out.shape[-1]))
    paths: list[KV] = []
    for index in range(1, passes):
        seen = (steps <= rows[..., None] - index)[:, None]
        out, new = module(tokens, hidden, rows, seen, first, paths)
        logits.append(module.logits(out[counts]))
        paths = [(k.roll(1, dims=2), v.roll(1, dims=2)) for k, v in [*paths, new]]
        hidden = out.roll(1, dims=1)
    return logits


def _later_rows(counts: Tensor, passes: int) -> Tensor:
    """[B, A]: neighbouring rows of each conversation that hold all that count and the passes - 1
    before; some may lie outside of it."""
    steps = torch.arange(counts.shape[1], device=counts.device)
    begin = torch.where(counts, steps, counts.shape[1]).amin(1)
    end = torch.where(counts, steps, -1).amax(1)
    width = int((end - begin).amax().clamp_min(0)) + passes
    return begin[:, None] - (passes - 1) + torch.arange(width, device=counts.device)
