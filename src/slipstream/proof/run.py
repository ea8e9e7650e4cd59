"""``slipstream verify``: both proofs, one result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.config import SamplingParams
from slipstream.llm import LLM
from slipstream.proof.distribution import FALSE_ALARM, TestResult, sampled_tests
from slipstream.proof.identity import Mismatch, greedy_identity


@dataclass(frozen=True, kw_only=True)
class Proof:
    """prompts, tokens: compared greedily. tests: of sampled text; none if left out."""

    model: str
    method: str
    prompts: int
    tokens: int
    mismatches: list[Mismatch]
    tests: list[TestResult]

    @property
    def faults(self) -> int:
        """Greedy differences that rounding does not explain."""
        return sum(found.kind == "fault" for found in self.mismatches)

    @property
    def false_alarm(self) -> float:
        return FALSE_ALARM

    @property
    def alarm_below(self) -> float:
        """The p-value below which one test alarms."""
        return FALSE_ALARM / max(len(self.tests), 1)

    @property
    def passed(self) -> bool:
        return not self.faults and all(test.p_value >= self.alarm_below for test in self.tests)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "method": self.method,
            "greedy": {
                "prompts": self.prompts,
                "identical": self.prompts - len(self.mismatches),
                "tokens": self.tokens,
                "mismatches": [_finite(asdict(found)) for found in self.mismatches],
            },
            "sampled": {
                "false_alarm": FALSE_ALARM,
                "alarm_below": self.alarm_below,
                "tests": [_finite(asdict(test)) for test in self.tests],
            },
            "passed": self.passed,
        }


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: None stands for it."""
    bad = {k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: None if k in bad else v for k, v in record.items()}


Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


@contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar that shows nothing."""
    yield lambda: None


def prove(
    llm: LLM,
    method: str,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    repeats: int,
    first_seed: int = 0,
    progress: Progress = silent,
) -> Proof:
    """Compare the LLM with its own plain decoding.

    params: of the sampled tests; its max_tokens counts for both. repeats: samples of each counted
    prompt, 0 leaves the sampled tests out. first_seed: of the samples. progress: (what, total) → a
    context that gives the function to call after each answer.
    """
    plain = llm.with_speculation(None)
    assert params.max_tokens is not None
    with progress("greedy identity", len(prompts)) as advance:
        tokens, mismatches = greedy_identity(plain, llm, prompts, params.max_tokens, advance)
    tests: list[TestResult] = []
    if repeats:
        with progress("sampled tests", len(prompts) + repeats * min(2, len(prompts))) as advance:
            tests = sampled_tests(
                plain,
                llm,
                prompts,
                params,
                repeats=repeats,
                first_seed=first_seed,
                advance=advance,
            )
    return Proof(
        model=llm.model.name,
        method=method,
        prompts=len(prompts),
        tokens=tokens,
        mismatches=mismatches,
        tests=tests,
    )
