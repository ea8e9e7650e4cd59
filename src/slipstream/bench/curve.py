"""What a step costs: the cost curve t(B, n), and the memory bandwidth that one row reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from slipstream.bench.drive import Clock
from slipstream.runtimes import Runtime
from slipstream.types import StepOutput, StepRows, chain_rows

_CHUNK = 512  # tokens of a prefill step
_REPEATS = 9
_STREAM_BYTES = 256 * 2**20  # far beyond any cache


def cost_curve(
    runtime: Runtime,
    context: int,
    rows: Sequence[int],
    *,
    batch: int = 1,
    repeats: int = _REPEATS,
    clock: Clock = time.perf_counter,
) -> dict[int, float]:
    """n → milliseconds of a step of n rows a request, the median of ``repeats``.

    The rows are a chain behind ``context`` committed tokens, all their logits asked for, as
    verification does. batch: B, requests in the step.
    """
    times = _step_times(runtime, context, rows, batch, repeats, clock)
    return {count: round(median(found) * 1e3, 4) for count, found in times.items()}


@torch.inference_mode()
def _step_times(
    runtime: Runtime, context: int, rows: Sequence[int], batch: int, repeats: int, clock: Clock
) -> dict[int, list[float]]:
    """n → seconds of each step of n rows. All n take turns, so that a slow moment hits them all; a
    step changes nothing, so nothing has to be put back in between."""
    cache = runtime.new_cache(batch, context + max(rows))
    slots = [cache.allocate() for _ in range(batch)]
    tokens = [1 + i * 7919 % (runtime.vocab_size - 1) for i in range(context + max(rows))]
    for start in range(0, context, _CHUNK):
        chunk = tokens[start : min(start + _CHUNK, context)]
        output = runtime.step([chain_rows(slot, chunk) for slot in slots], cache)
        cache.commit(output, slots, [range(len(chunk))] * batch)

    def step_of(count: int) -> list[StepRows]:
        drafted = tokens[context : context + count]
        return [chain_rows(slot, drafted, range(count)) for slot in slots]

    steps = {count: step_of(count) for count in dict.fromkeys(rows)}
    times: dict[int, list[float]] = {count: [] for count in steps}
    for repeat in range(repeats + 1):
        for count, step in steps.items():
            started = clock()
            _wait(runtime.step(step, cache))
            if repeat:  # the first time is the warm-up
                times[count].append(clock() - started)
    return times


def _wait(output: StepOutput) -> None:
    """For a GPU, by reading a number."""
    float(output.logits[-1, -1])


def stream_gb_s(device: torch.device, threads: int, clock: Clock = time.perf_counter) -> float:
    """What reading memory can reach, in GB/s: the sum of 256 MiB of float32 on ``threads`` threads,
    the best of ten, as STREAM counts."""
    data = torch.ones(_STREAM_BYTES // 4, device=device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best = min(_seconds(lambda: float(data.sum()), clock) for _ in range(10))
    finally:
        torch.set_num_threads(before)
    return round(_STREAM_BYTES / best / 1e9, 2)


def reached_gb_s(runtime: Runtime, clock: Clock = time.perf_counter) -> float | None:
    """Bytes of the weights over the time of a step of one row behind little context, in GB/s; the
    best of some, as of the stream.

    None if the runtime doesn't tell its ``weight_bytes``. An embedding beside a head of its own is
    among them, though a step reads one row of it only.
    """
    size = getattr(runtime, "weight_bytes", None)
    if size is None:
        return None
    seconds = min(_step_times(runtime, 16, [1], 1, _REPEATS, clock)[1])
    return round(size / seconds / 1e9, 2)


def _seconds(work: Callable[[], object], clock: Clock) -> float:
    started = clock()
    work()
    return clock() - started
