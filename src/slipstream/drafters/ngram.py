"""Prompt lookup: what followed when this text ended like that before?

After Saxena 2023, "Prompt Lookup Decoding"; option names as in vLLM. Ours trusts a match as far as
it is long, and asks all the longest matches, not one (docs/decisions.md has what each brought).
"""

from __future__ import annotations

from collections import Counter
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
    """prompt_lookup_min, prompt_lookup_max: length n of the text's end that must occur before.

    num_speculative_tokens: the most that is drafted; a match of n tokens drafts up to 2 n.
    """

    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 1
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
    """Drafts the usual continuation of the longest earlier matches."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._texts: dict[int, tuple[np.ndarray, int]] = {}  # with room to grow; tokens known

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [
            chain(lookup(self._text(request), self._min_n, self._max_n, budget))
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def release(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)

    def _text(self, request: Request) -> np.ndarray:
        """The request's tokens; a long prompt is not converted again at every step."""
        total = len(request.tokens)
        text, known = self._texts.get(request.request_id, (np.empty(0, np.int64), 0))
        if total > len(text):
            text = np.resize(np.asarray(request.tokens), 2 * total)
        else:
            text[known:total] = request.tokens[known:]
        self._texts[request.request_id] = text, total
        return text[:total]


def lookup(tokens: Sequence[int] | np.ndarray, min_n: int, max_n: int, count: int) -> list[int]:
    """What followed the longest earlier occurrences of the text's end, or nothing.

    Of the longest, n tokens each, the most recent one among those that go on as most of them do
    is copied: at most ``count`` and at most 2 n tokens. Where the copy reaches the end of the text
    it goes on in itself, as in LZ77: a text that repeats with a short period is drafted on.
    """
    text = np.asarray(tokens)
    length = len(text)
    if count < 1 or length <= min_n:
        return []
    longest = 0
    starts = np.flatnonzero(text[:-1] == text[-1]) + 1  # where a match of length 1 would continue
    for n in range(1, min(max_n, length - 1) + 1):
        longer = starts[starts >= n]
        longer = longer[text[longer - n] == text[length - n]]
        if not len(longer):
            break
        longest, starts = n, longer
    if longest < min_n:
        return []
    start, count = _usual(starts, text), min(count, 2 * longest)
    found = text[start : start + count].tolist()
    while len(found) < count:
        found.append(found[len(found) - (length - start)])
    return found


def _usual(starts: np.ndarray, text: np.ndarray) -> int:
    """The last of the starts that go on with the commonest token; of tokens as common as each
    other, with the one seen last."""
    following = text[starts]
    ((token, _),) = Counter(following[::-1].tolist()).most_common(1)  # the first seen on ties
    return int(starts[following == token][-1])
