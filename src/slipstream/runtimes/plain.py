"""The logits of a known text, chunk by chunk: no draft, nothing sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.runtimes import Runtime
from slipstream.types import chain_rows


def plain_logits(runtime: Runtime, tokens: Sequence[int], start: int, chunk: int) -> Tensor:
    """[n, V]: for each position from ``start`` (at least 1) to one past the end.

    chunk: rows of a forward pass.
    """
    cache = runtime.new_cache(1, len(tokens))
    slot, parts = cache.allocate(), []
    for begin in range(0, len(tokens), chunk):
        part = tokens[begin : begin + chunk]
        wanted = [row for row in range(len(part)) if begin + row >= start - 1]
        output = runtime.step([chain_rows(slot, part, wanted)], cache)
        cache.commit(output, [slot], [range(len(part))])
        parts.append(output.logits)
    return torch.cat(parts)
