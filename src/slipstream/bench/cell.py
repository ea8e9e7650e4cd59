"""One cell of the bench: plain decoding, the methods and the peers, round by round in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.bench.drive import Answer, Clock, Pass, PromptsFailed, drive
from slipstream.bench.figures import identical, run_figures
from slipstream.bench.settings import PLAIN
from slipstream.bench.suite import Prompt
from slipstream.config import SamplingParams
from slipstream.engine import Engine
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.bench.peers import Peer

_WARM_UP = 4  # tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """A method of ours: "plain" or a drafter's."""

    method: str
    engine: Engine
    name: str = "slipstream"


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerSide:
    """Another engine, started. name: which."""

    name: str
    peer: Peer

    @property
    def method(self) -> str:
        return self.peer.method


@dataclass(kw_only=True)
class Cell:
    """Precision, temperature and concurrency are fixed here.

    sides: plain first. params: of a prompt, by its number. A round is one pass of every side, then
    of every peer. rounds: those done, a pass each. dropped: prompts that failed, by their number,
    with the side that failed on them; None for all.
    """

    sides: Sequence[Side]
    peers: Sequence[PeerSide]
    prompts: Sequence[Prompt]
    params: Callable[[int], SamplingParams]
    concurrency: int
    notify: Callable[[str], None]
    advance: Callable[[], None] = lambda: None
    clock: Clock = time.perf_counter
    rounds: list[list[Pass]] = field(default_factory=list)
    dropped: dict[int, Side | None] = field(default_factory=dict)

    def measure(self, rounds: int, on_round: Callable[[], None]) -> None:
        """Fill ``rounds``. A prompt that fails is left out on every side and all begins anew, so
        that no failure is timed and all rounds are of the same prompts."""
        self._drop_unfit()
        while len(self.rounds) < rounds:
            try:
                if not self.rounds:
                    self._warm_up()
                self.rounds.append(self._round())
            except _SideFailed as failed:
                self._drop(failed.numbers, failed.side, failed)
                self.rounds.clear()
            on_round()

    def figures(self) -> list[dict[str, Any]]:
        """A run each of sides and peers, from the rounds so far."""
        series = [list(passes) for passes in zip(*self.rounds, strict=True)]
        both: list[Side | PeerSide] = [*self.sides, *self.peers]
        found = list(zip(both, series, strict=False))  # no rounds, no runs
        plain = {side.name: passes for side, passes in found if side.method == PLAIN}
        return [
            self._run(side, passes, None if side.method == PLAIN else plain.get(side.name), series)
            for side, passes in found
        ]

    def _run(
        self,
        side: Side | PeerSide,
        passes: Sequence[Pass],
        plain: Sequence[Pass] | None,
        series: Sequence[Sequence[Pass]],
    ) -> dict[str, Any]:
        ours = None if isinstance(side, Side) else series[0]
        categories = {number: prompt.category for number, prompt in enumerate(self.prompts)}
        figures = run_figures(passes, plain, categories, ours)
        missing = len(self._left()) - figures["prompts"]  # a peer's failures are its own
        failures = missing + sum(by in (side, None) for by in self.dropped.values())
        head = {"engine": side.name, "method": side.method, "failures": failures}
        same = None
        if plain is not None and self.params(0).greedy:  # sampled texts need not be the same
            same = identical(plain, passes)
        run = head | figures | {"identical_to_plain": same}
        if ours is not None and isinstance(side, PeerSide):
            run["identical_to_slipstream_plain"] = identical(ours, passes)
            run["version"] = side.peer.version
        return run

    def _drop_unfit(self) -> None:
        """What the engine refuses at once (too long for the context, say) never starts."""
        plain = self.sides[0].engine
        for number, prompt in enumerate(self.prompts):
            try:
                plain.abort(plain.add(prompt.token_ids, self.params(number)))
            except SlipstreamError as error:
                self._drop([number], None, error)

    def _drop(self, numbers: Sequence[int], side: Side | None, error: Exception) -> None:
        method = "every method" if side is None else side.method
        for number in numbers:
            self.dropped[number] = side
            category = self.prompts[number].category
            self.notify(f"prompt {number + 1} ({category}) failed with {method}: {error}")
        if len(self.dropped) == len(self.prompts):
            raise SlipstreamError(f"every prompt failed, nothing to measure; the last one: {error}")

    def _left(self) -> dict[int, Sequence[int]]:
        return {n: p.token_ids for n, p in enumerate(self.prompts) if n not in self.dropped}

    def _warm_up(self) -> None:
        """The same shapes, a few tokens: nothing is compiled, paged in or allocated later."""
        few = dict(list(self._left().items())[: self.concurrency])
        params = replace(self.params(0), max_tokens=_WARM_UP)
        for side in self.sides:
            self._pass(side, few, lambda number: params, lambda: None)
        for peer in self.peers:
            self._peer_pass(peer, few, dict.fromkeys(few, _WARM_UP), lambda: None)

    def _round(self) -> list[Pass]:
        left = self._left()
        ours = [self._pass(side, left, self.params, self.advance) for side in self.sides]
        lengths = {number: answer.output_tokens for number, answer in ours[0].answers.items()}
        return ours + [self._peer_pass(peer, left, lengths, self.advance) for peer in self.peers]

    def _pass(
        self,
        side: Side,
        prompts: Mapping[int, Sequence[int]],
        params: Callable[[int], SamplingParams],
        advance: Callable[[], None],
    ) -> Pass:
        try:
            return drive(
                side.engine, prompts, params, self.concurrency, advance=advance, clock=self.clock
            )
        except PromptsFailed as error:
            raise _SideFailed(side, error) from error

    def _peer_pass(
        self,
        side: PeerSide,
        prompts: Mapping[int, Sequence[int]],
        lengths: Mapping[int, int],
        advance: Callable[[], None],
    ) -> Pass:
        """One prompt after the other, each as many tokens long as ours (a peer may not know the
        model's ends). What fails is missing in the pass and takes nothing from the others."""
        answers = {}
        for number, tokens in prompts.items():
            try:
                found = side.peer.generate(list(tokens), lengths[number])
            except SlipstreamError as error:
                self.notify(f"prompt {number + 1} failed with {side.name}: {error}")
            else:
                answers[number] = Answer(
                    token_ids=found.token_ids,
                    output_tokens=found.output_tokens,
                    seconds=found.seconds,
                    ttft=found.ttft_seconds,
                )
            advance()
        everything = Pass(answers=answers, seconds=0.0, decode_seconds=None)
        return everything.only(answers)


class _SideFailed(Exception):
    def __init__(self, side: Side, error: PromptsFailed) -> None:
        super().__init__(str(error))
        self.side = side
        self.numbers = error.numbers
