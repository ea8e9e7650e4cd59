"""One pass over the prompts: requests kept in flight, and what the clock saw."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slipstream.config import SamplingParams
from slipstream.engine import Engine
from slipstream.metrics import Metrics
from slipstream.request import Request

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """seconds, ttft: since the request was given to the engine; ttft (None if a peer doesn't tell)
    to its first tokens, of which there are ``first_tokens``.

    gaps: seconds between one emission and the next. As in vLLM an emission is what a step gives
    the request, one token or several: what a reader of the stream waits for.
    """

    token_ids: Sequence[int] | None
    output_tokens: int
    seconds: float
    ttft: float | None
    first_tokens: int = 1
    gaps: Sequence[float] = ()
    metrics: Metrics | None = None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """answers: by the prompt's number. seconds: of the whole pass, by the clock on the wall.

    decode_seconds: of it, steps that went on with answers already begun; None if not known.
    """

    answers: Mapping[int, Answer]
    seconds: float
    decode_seconds: float | None

    @property
    def tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.answers.values())

    @property
    def decode_tokens(self) -> int:
        return self.tokens - sum(answer.first_tokens for answer in self.answers.values())

    def only(self, numbers: Collection[int]) -> Pass:
        """Of some prompts, the time as their own requests saw it: the clock on the wall if they
        came one at a time, else what one stream has of the engine."""
        answers = {n: answer for n, answer in self.answers.items() if n in numbers}
        decode: float | None = 0.0
        for answer in answers.values():
            if answer.ttft is None or decode is None:
                decode = None
            else:
                decode += answer.seconds - answer.ttft
        seconds = sum(answer.seconds for answer in answers.values())
        return Pass(answers=answers, seconds=seconds, decode_seconds=decode)


class PromptsFailed(Exception):
    """A step failed with these prompts in flight; the pass is worth nothing."""

    def __init__(self, numbers: Sequence[int], error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.numbers = numbers


@dataclass(kw_only=True)
class _Flight:
    """A request on its way. emissions: when it was given tokens."""

    number: int
    request: Request
    started: float
    first_tokens: int = 0
    emissions: list[float] = field(default_factory=list)

    def note(self, now: float) -> None:
        self.emissions.append(now)
        if len(self.emissions) == 1:
            self.first_tokens = self.request.output_length

    def answer(self) -> Answer:
        times = self.emissions
        return Answer(
            token_ids=self.request.output,
            output_tokens=self.request.output_length,
            seconds=times[-1] - self.started,
            ttft=times[0] - self.started,
            first_tokens=self.first_tokens,
            gaps=[after - before for before, after in pairwise(times)],
            metrics=self.request.metrics,
        )


def drive(
    engine: Engine,
    prompts: Mapping[int, Sequence[int]],
    params: Callable[[int], SamplingParams],
    concurrency: int,
    *,
    advance: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Pass:
    """Answer the prompts, ``concurrency`` of them in flight: one that ends makes room for the next.

    Tokens only: turning them into text is not timed. advance: called after each answer.
    Raises PromptsFailed if a step fails, with all that were in flight: whose fault it was can't be
    told.
    """
    waiting = deque(prompts.items())
    flights: dict[int, _Flight] = {}
    answers: dict[int, Answer] = {}
    decode_seconds, started = 0.0, clock()
    try:
        while waiting or flights:
            while waiting and len(flights) < concurrency:
                number, tokens = waiting.popleft()
                given = clock()
                request = engine.add(tokens, params(number))
                flights[request.request_id] = _Flight(number=number, request=request, started=given)
            before = clock()
            try:
                changed = engine.step()
            except Exception as error:  # a runtime or a drafter may raise anything
                failed = [flight.number for flight in flights.values()]
                raise PromptsFailed(failed, error) from error
            now = clock()
            if any(flights[request.request_id].emissions for request in changed):
                decode_seconds += now - before
            for request in changed:
                flight = flights[request.request_id]
                flight.note(now)
                if request.finish_reason is not None:
                    del flights[request.request_id]
                    answers[flight.number] = flight.answer()
                    advance()
    finally:
        for flight in flights.values():
            engine.abort(flight.request)
    return Pass(answers=answers, seconds=clock() - started, decode_seconds=decode_seconds)
