"""From passes to figures: rates, latencies, acceptance, and the ratio to plain decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np

from slipstream.bench.drive import Answer, Pass
from slipstream.metrics import Metrics

Figures = dict[str, Any]


def run_figures(
    rounds: Sequence[Pass],
    plain: Sequence[Pass] | None,
    categories: Mapping[int, str],
    slipstream: Sequence[Pass] | None = None,
) -> Figures:
    """One side's run, as a whole and by category.

    plain: the plain decoding beside it, round by round; None for plain decoding itself, or where
    there is none. categories: of each prompt. slipstream: our plain decoding, for a peer's run.
    By category the time is what the requests themselves saw (``Pass.only``).
    """
    answered = set.intersection(*(set(found.answers) for found in rounds))
    whole = [p if len(p.answers) == len(answered) else p.only(answered) for p in rounds]
    groups: dict[str, list[int]] = {}
    for number in sorted(answered):
        groups.setdefault(categories[number], []).append(number)

    def of(numbers: Sequence[int], passes: Sequence[Pass] | None) -> list[Pass] | None:
        return None if passes is None else [found.only(numbers) for found in passes]

    by_category = {
        name: _figures(
            [p.only(numbers) for p in whole], of(numbers, plain), of(numbers, slipstream)
        )
        for name, numbers in groups.items()
    }
    return _figures(whole, plain, slipstream) | {"by_category": by_category}


def _figures(
    rounds: Sequence[Pass], plain: Sequence[Pass] | None, slipstream: Sequence[Pass] | None
) -> Figures:
    """rounds: all of the same prompts. Seconds are the median over them; counts are the last's."""
    last = rounds[-1]
    answers = [answer for found in rounds for answer in found.answers.values()]
    seconds = median(found.seconds for found in rounds)
    decode = [p.decode_seconds for p in rounds if p.decode_seconds is not None]
    figures = {
        "prompts": len(last.answers),
        "output_tokens": last.tokens,
        "seconds": _rounded(seconds),
        "round_seconds": [_rounded(found.seconds) for found in rounds],
        "tokens_per_second": _rate(last.tokens, seconds),
        "decode_tokens_per_second": _rate(last.decode_tokens, median(decode) if decode else 0.0),
        "ttft_ms": _percentiles(a.ttft for a in answers if a.ttft is not None),
        "itl_ms": _percentiles(gap for answer in answers for gap in answer.gaps),
        **_speculation(list(last.answers.values())),
        "speedup_vs_plain": None if plain is None else speedup(plain, rounds),
    }
    if slipstream is not None:
        figures["ratio_to_slipstream_plain"] = speedup(slipstream, rounds)
    return figures


def speedup(base: Sequence[Pass], other: Sequence[Pass]) -> dict[str, float] | None:
    """Seconds of ``base`` over seconds of ``other``, round by round, on the prompts of both.

    Per token: greedy answers are of one length, sampled ones need not be.
    """
    ratios = []
    for first, second in zip(base, other, strict=True):
        common = first.answers.keys() & second.answers.keys()
        a, b = (p if len(p.answers) == len(common) else p.only(common) for p in (first, second))
        if common and a.tokens and b.tokens and b.seconds:
            ratios.append((a.seconds / a.tokens) / (b.seconds / b.tokens))
    if not ratios:
        return None
    spread = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
    return {name: round(ratio, 4) for name, ratio in spread.items()}


def identical(plain: Sequence[Pass], other: Sequence[Pass]) -> int | None:
    """Prompts whose token ids are plain's, in the round with the fewest; None if a side tells
    none."""
    counts = []
    for first, second in zip(plain, other, strict=True):
        common = first.answers.keys() & second.answers.keys()
        pairs = [(first.answers[n].token_ids, second.answers[n].token_ids) for n in common]
        if any(a is None or b is None for a, b in pairs):
            return None
        counts.append(sum(list(a or ()) == list(b or ()) for a, b in pairs))
    return min(counts)


def _speculation(answers: Sequence[Answer]) -> Figures:
    """τ and acceptance; a peer doesn't tell."""
    parts = [answer.metrics for answer in answers if answer.metrics is not None]
    if not parts:
        return dict.fromkeys(("mean_tokens_per_step", "acceptance_rate", "acceptance_by_position"))
    return total(parts).as_dict()


def total(parts: Collection[Metrics]) -> Metrics:
    """The counters of several requests together."""

    def by_position(name: str) -> list[int]:
        lists = (getattr(part, name) for part in parts)
        return [sum(column) for column in zip_longest(*lists, fillvalue=0)]

    return Metrics(
        steps=sum(part.steps for part in parts),
        emitted=sum(part.emitted for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        tried_at=by_position("tried_at"),
        accepted_at=by_position("accepted_at"),
    )


def _percentiles(seconds: Any) -> dict[str, float] | None:
    """p50 and p95 over all rounds, in milliseconds."""
    values = list(seconds)
    if not values:
        return None
    middle, high = np.percentile(values, [50, 95])
    return {"p50": round(float(middle) * 1e3, 3), "p95": round(float(high) * 1e3, 3)}


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 4) if tokens and seconds else None


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
