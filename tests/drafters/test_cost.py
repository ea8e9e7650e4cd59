"""What a row is worth, from measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny_llm
from toys import ToyRuntime

from slipstream.drafters import cost
from slipstream.types import StepOutput


class Priced(ToyRuntime):
    """A step of n rows takes as long as its clock says."""

    def __init__(self, row: float) -> None:
        super().__init__(4)
        self.now, self._price = 0.0, row

    def step(self, batch: Sequence[Any], *args: Any) -> StepOutput:
        self.now += 1 + self._price * (len(batch[0].tokens) - 1)
        return super().step(batch, *args)


@pytest.mark.parametrize(("row", "least"), [(0.05, 0.1), (0.2, 0.4), (0.0, 0.01), (1.0, 0.5)])
def test_a_path_must_bring_what_its_row_costs(
    monkeypatch: pytest.MonkeyPatch, row: float, least: float
) -> None:
    """At two tokens a step, a row of a twentieth of a step pays from a tenth of a chance on."""
    runtime = Priced(row)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: runtime.now)
    assert cost.least_worth(runtime) == pytest.approx(least)


def test_a_real_step_is_measured() -> None:
    assert 0.01 <= cost.floor_of(None, tiny_llm.llm().model.runtime) <= 0.5
    assert cost.floor_of(0.3, tiny_llm.llm().model.runtime) == 0.3
