"""What a drafted row costs the target, measured: it decides how improbable a path may be."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from slipstream.config import require
from slipstream.types import StepRows, chain_rows

if TYPE_CHECKING:
    from slipstream.runtimes import Runtime

_ROWS = 17
_ROUNDS = 5
_TOKENS_A_STEP = 2.0  # what heads reach, about


def floor_of(path_floor: float | None, runtime: Runtime) -> float:
    """The user's, or what is worth it here."""
    return least_worth(runtime) if path_floor is None else path_floor


def require_floor(path_floor: Any) -> None:
    number = isinstance(path_floor, (int, float)) and not isinstance(path_floor, bool)
    fits = path_floor is None or (number and 0 <= path_floor < 1)
    require(fits, "path_floor", path_floor, "in [0, 1), or null")


def least_worth(runtime: Runtime) -> float:
    """The probability from which on a path of one more row is worth that row.

    A row costs c of a plain step's time t and brings its probability in tokens, and a token is
    worth t/τ: so c·τ/t. Takes a few hundredths of a second.
    """
    cache = runtime.new_cache(1, _ROWS)
    slot = cache.allocate()
    batches = [[_rows(slot, count)] for count in (1, _ROWS)]
    times: list[list[float]] = [[], []]
    for _ in range(1 + _ROUNDS):  # the first one warms up
        for batch, found in zip(batches, times, strict=True):
            begun = time.perf_counter()
            output = runtime.step(batch, cache, ())
            output.logits[-1, 0].item()  # waits for a GPU
            found.append(time.perf_counter() - begun)
    one, many = (statistics.median(found[1:]) for found in times)
    share = (many - one) / ((_ROWS - 1) * one)
    return min(max(share * _TOKENS_A_STEP, 0.01), 0.5)


def _rows(slot: int, count: int) -> StepRows:
    return chain_rows(slot, [0] * count, logit_rows=range(count))
