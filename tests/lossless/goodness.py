"""A goodness-of-fit test for sampled tokens, with a stated chance of a false alarm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from scipy.stats import chi2

FALSE_ALARM = 1e-9  # per assertion


def surprise(samples: Iterable[Hashable], expected: Mapping[Hashable, float]) -> float:
    """p-value of a G-test; outcomes expected less than five times are pooled.

    0 for a sample that should be impossible.
    """
    counts = Counter(samples)
    total = sum(counts.values())
    if any(expected.get(outcome, 0) <= 0 for outcome in counts):
        return 0.0
    bins: list[tuple[int, float]] = []
    pooled = (0, 0.0)
    for outcome, p in sorted(expected.items(), key=lambda item: item[1]):
        pooled = (pooled[0] + counts[outcome], pooled[1] + p * total)
        if pooled[1] >= 5:
            bins.append(pooled)
            pooled = (0, 0.0)
    if bins and pooled[1]:
        bins[-1] = (bins[-1][0] + pooled[0], bins[-1][1] + pooled[1])
    g = 2 * sum(seen * math.log(seen / due) for seen, due in bins if seen)
    return float(chi2.sf(g, len(bins) - 1)) if len(bins) > 1 else 1.0


def agrees(samples: Iterable[Hashable], expected: Mapping[Hashable, float]) -> bool:
    """False for a right sampler once in 1e9."""
    return surprise(samples, expected) > FALSE_ALARM
