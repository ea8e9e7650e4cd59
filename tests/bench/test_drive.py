"""A pass by a clock that ticks once a step: every time is known beforehand."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny_llm

from slipstream import LLM, SamplingParams
from slipstream.bench.drive import Pass, PromptsFailed, drive
from slipstream.engine import Engine

PROMPTS = {3: [5, 6, 7], 8: [9, 10, 11, 12], 9: [13, 14], 12: [20, 21, 22]}


class StepClock:
    """Seconds are the steps that engines have made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        step = Engine.step

        def counted(engine: Engine) -> Any:
            self.steps += 1
            return step(engine)

        monkeypatch.setattr(Engine, "step", counted)

    def __call__(self) -> float:
        return float(self.steps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    return StepClock(monkeypatch)


def params(tokens: int = 5) -> Callable[[int], SamplingParams]:
    return lambda number: SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def plain_text(llm: LLM, prompt: Sequence[int], tokens: int = 5) -> list[int]:
    given = {"prompt_token_ids": list(prompt)}
    return llm.generate(given, params(tokens)(0))[0].outputs[0].token_ids


def test_one_at_a_time(clock: StepClock) -> None:
    """A prompt of one chunk gives its first token in its first step, then a token a step."""
    llm, done = tiny_llm.llm(), []
    found = drive(llm.engine, PROMPTS, params(), 1, advance=lambda: done.append(1), clock=clock)
    assert list(found.answers) == list(PROMPTS)
    assert len(done) == len(PROMPTS)
    for number, answer in found.answers.items():
        assert answer.token_ids == plain_text(llm, PROMPTS[number])
        assert (answer.output_tokens, answer.first_tokens) == (5, 1)
        assert (answer.ttft, answer.seconds, answer.gaps) == (1, 5, [1, 1, 1, 1])
        assert answer.metrics is not None
        assert answer.metrics.mean_tokens_per_step == 1
    assert (found.seconds, found.tokens) == (20, 20)
    assert (found.decode_seconds, found.decode_tokens) == (16, 16)


def test_a_long_prompt_is_read_before_its_first_token(clock: StepClock) -> None:
    prompt = [5 + i % 90 for i in range(1100)]  # three chunks of 512
    found = drive(tiny_llm.llm().engine, {0: prompt}, params(), 1, clock=clock)
    assert (found.answers[0].ttft, found.answers[0].seconds) == (3, 7)
    assert (found.seconds, found.decode_seconds, found.decode_tokens) == (7, 4, 4)


def test_so_many_are_in_flight_and_the_next_takes_the_room(
    clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, flying = tiny_llm.llm().engine, []
    step = Engine.step

    def watched(engine: Engine) -> Any:
        flying.append(len(engine.scheduler))
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    found = drive(engine, PROMPTS, params(), 3, clock=clock)
    assert max(flying) == 3
    assert set(found.answers) == set(PROMPTS)
    # three prompts are read one after the other, then four steps of all three; then the fourth
    assert found.seconds == 3 + 4 + 1 + 4
    assert (found.decode_seconds, found.decode_tokens) == (8, 16)
    assert [found.answers[n].ttft for n in PROMPTS] == [1, 2, 3, 1]


def test_a_draft_gives_several_tokens_a_gap(clock: StepClock) -> None:
    llm = tiny_llm.llm({"method": "ngram", "num_speculative_tokens": 3})
    prompt = plain_text(tiny_llm.llm(), [5, 6, 7], 60)  # goes round in circles
    found = drive(llm.engine, {0: prompt}, params(20), 1, clock=clock)
    answer = found.answers[0]
    assert answer.token_ids == plain_text(tiny_llm.llm(), prompt, 20)
    assert answer.metrics is not None
    assert answer.metrics.emitted == 20
    assert answer.seconds == answer.metrics.steps < 20
    assert len(answer.gaps) == answer.metrics.steps - 1
    assert found.decode_tokens == 20 - answer.first_tokens


def test_a_part_of_a_pass_is_what_its_requests_saw(clock: StepClock) -> None:
    found = drive(tiny_llm.llm().engine, PROMPTS, params(), 1, clock=clock)
    part = found.only([8, 12])
    assert (list(part.answers), part.seconds, part.decode_seconds) == ([8, 12], 10, 8)
    assert (part.tokens, part.decode_tokens) == (10, 8)
    together = drive(tiny_llm.llm().engine, PROMPTS, params(), 4, clock=clock)
    waited = sum(answer.seconds for answer in together.answers.values())
    assert together.only(PROMPTS).seconds == waited > together.seconds


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the runtime fail after so many steps."""
    count, step = itertools.count(1), engine.runtime.step

    def broken(*arguments: Any) -> Any:
        if next(count) > after:
            raise RuntimeError("out of memory")
        return step(*arguments)

    monkeypatch.setattr(engine.runtime, "step", broken)


@pytest.mark.parametrize(("concurrency", "named"), [(1, [8]), (2, [8, 9])])
def test_a_failure_names_those_in_flight_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, concurrency: int, named: list[int]
) -> None:
    engine = tiny_llm.llm().engine
    with monkeypatch.context() as patch:
        failing(engine, patch, after=6)
        with pytest.raises(PromptsFailed, match="RuntimeError: out of memory") as caught:
            drive(engine, PROMPTS, params(), concurrency)
    assert set(caught.value.numbers) <= set(PROMPTS)
    assert len(caught.value.numbers) == concurrency
    if concurrency == 1:
        assert caught.value.numbers == named
    assert len(engine.scheduler) == 0
    assert engine.cache.free_slots == engine.config.max_num_seqs
    assert set(drive(engine, PROMPTS, params(), 2).answers) == set(PROMPTS)


def test_an_unknown_first_token_leaves_decoding_unknown() -> None:
    from slipstream.bench.drive import Answer

    answer = Answer(token_ids=None, output_tokens=4, seconds=2.0, ttft=None)
    found = Pass(answers={0: answer}, seconds=2.0, decode_seconds=None).only([0])
    assert (found.seconds, found.decode_seconds) == (2.0, None)
