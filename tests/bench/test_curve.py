"""The cost curve: which steps are timed, behind what, and that the numbers are medians."""

import pytest
import tiny_llm
import torch

from slipstream.bench import curve
from slipstream.bench.curve import cost_curve, reached_gb_s, stream_gb_s


class SlowRuntime:
    """The tiny model; by its clock a step takes 10 s, 1 s a row and 0.01 s a token of context.

    The first step of each kind is slower, and one in five is much slower.
    """

    def __init__(self) -> None:
        self._runtime = tiny_llm.llm().model.runtime
        self.vocab_size, self.max_length = self._runtime.vocab_size, self._runtime.max_length
        self.dtype = self._runtime.dtype
        self.now = 0.0
        self.steps: list[tuple[list[int], list[int], int]] = []
        self.weight_bytes = 5_000_000_000

    def new_cache(self, slots, max_length):  # type: ignore[no-untyped-def]
        return self._runtime.new_cache(slots, max_length)

    def step(self, batch, cache):  # type: ignore[no-untyped-def]
        rows, logits = [len(r.tokens) for r in batch], sum(len(r.logit_rows) for r in batch)
        lengths = [cache.lengths[r.slot] for r in batch]
        if logits:
            self.steps.append((rows, lengths, logits))
            times = sum(seen == (rows, lengths, logits) for seen in self.steps)
            self.now += 10 + sum(rows) + 0.01 * sum(lengths) + 1000 * (times == 1 or times % 5 == 0)
        return self._runtime.step(batch, cache)

    def clock(self) -> float:
        return self.now


def test_the_median_of_what_is_asked_for() -> None:
    runtime = SlowRuntime()
    found = cost_curve(runtime, 600, [1, 4, 2], clock=runtime.clock)
    assert found == {1: 17_000, 4: 20_000, 2: 18_000}
    assert {rows[0] for rows, _, _ in runtime.steps} == {1, 2, 4}
    assert all(lengths == [600] and logits == rows[0] for rows, lengths, logits in runtime.steps)


def test_row_counts_take_turns() -> None:
    runtime = SlowRuntime()
    cost_curve(runtime, 8, [1, 2], repeats=3, clock=runtime.clock)
    assert [rows for rows, _, _ in runtime.steps] == [[1], [2]] * 4


def test_a_batch_has_its_context_in_every_slot() -> None:
    runtime = SlowRuntime()
    found = cost_curve(runtime, 20, [3], batch=4, clock=runtime.clock)
    assert found == {3: pytest.approx(1000 * (10 + 12 + 0.8))}
    assert all(step == ([3] * 4, [20] * 4, 12) for step in runtime.steps)


def test_bandwidth_reached_is_weights_over_a_step() -> None:
    runtime = SlowRuntime()
    assert reached_gb_s(runtime, clock=runtime.clock) == pytest.approx(5 / 11.16, abs=0.01)
    del runtime.weight_bytes
    assert reached_gb_s(runtime) is None


def test_the_stream_counts_the_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_STREAM_BYTES", 4_000_000)
    times = iter(t for n in range(10) for t in (100.0 * n, 100.0 * n + (0.001 if n == 6 else 9)))
    threads = torch.get_num_threads()
    assert stream_gb_s(torch.device("cpu"), 2, clock=lambda: next(times)) == pytest.approx(4)
    assert torch.get_num_threads() == threads
