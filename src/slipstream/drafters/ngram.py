"""Prompt lookup: what followed the last time this text ended like that?

Saxena 2023, "Prompt Lookup Decoding"; option names as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config import require, require_integer
from slipstream.types import Draft, chain

if TYPE_CHECKING:
    from slipstream.drafters import Target
    from slipstream.request import Request


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """prompt_lookup_min, prompt_lookup_max: length of the text's end that must occur before."""

    num_speculative_tokens: int = 5
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        require_integer("prompt_lookup_min", self.prompt_lookup_min, 1)
        low = self.prompt_lookup_min
        rule = f"an integer of at least prompt_lookup_min ({low})"
        require_integer("prompt_lookup_max", self.prompt_lookup_max, 1)
        require(self.prompt_lookup_max >= low, "prompt_lookup_max", self.prompt_lookup_max, rule)

    def build(self, target: Target) -> NgramDrafter:
        return NgramDrafter(self.prompt_lookup_min, self.prompt_lookup_max)


class NgramDrafter:
    """Drafts the continuation of the longest earlier match, the most recent one on ties."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [
            chain(lookup(request.tokens, self._min_n, self._max_n, budget))
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def release(self, request: Request) -> None:
        pass


def lookup(tokens: Sequence[int], min_n: int, max_n: int, count: int) -> list[int]:
    """The ``count`` tokens after the best earlier occurrence of the text's end, or none.

    Where the continuation reaches the end of the text it goes on in itself, as in LZ77: a text
    that repeats with a short period is drafted to full length.
    """
    text = np.asarray(tokens)
    length = len(text)
    if count < 1 or length <= min_n:
        return []
    # ends[i]: the token before position i equals the last token; then narrowed one token a turn
    starts = np.flatnonzero(text[:-1] == text[-1]) + 1  # where a match of length 1 would continue
    best = None
    for n in range(1, min(max_n, length - 1) + 1):
        starts = starts[starts >= n]
        starts = starts[text[starts - n] == text[length - n]]
        if not len(starts):
            break
        if n >= min_n:
            best = int(starts[-1])
    if best is None:
        return []
    found = list(tokens[best : best + count])
    while len(found) < count:
        found.append(found[len(found) - (length - best)])
    return found
