"""An answer on its way: tokens become text, and in the end an output."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.engine import Engine
from slipstream.metrics import Metrics
from slipstream.request import FinishReason, Request
from slipstream.text import Piece, TextStream
from slipstream.types import Logprob, Origin


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer. logprobs: a dictionary (token id → Logprob) for each token, if asked for.

    origins: for each token "plain", "accepted", "recovered" or "bonus".
    """

    index: int
    text: str
    token_ids: list[int]
    origins: list[Origin]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its answer. seed: reproduces a sampled text. seconds: since it was given
    to the engine."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Metrics
    seconds: float
    seed: int


@dataclass(kw_only=True)
class Stream:
    """One request and its text; iterate for the pieces of text as they become certain.

    ``close`` ends the request early; ``output`` is what there is so far, at any time.
    """

    engine: Engine
    request: Request
    tokenizer: Any
    prompt: str | None = None
    _started: float = field(default_factory=time.perf_counter)
    _finished: float | None = None

    def __post_init__(self) -> None:
        request = self.request
        stop = request.params.stop
        assert not isinstance(stop, str)
        self._text = TextStream(self.tokenizer, request.tokens, stop)
        weakref.finalize(self, _give_up, self.engine, request)  # dropped unread: free its slot

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    def __iter__(self) -> Iterator[Piece]:
        try:
            # steps that others ask for serve this request too: it may be ahead of its text
            while not self.finished or self._text.length < self.request.output_length:
                if not self.finished:
                    self.engine.step()
                yield from self.advance()
        finally:
            self.close()

    def read(
        self, on_piece: Callable[[Piece], None], stop: Callable[[], bool] = lambda: False
    ) -> RequestOutput:
        """Hand every piece on, to the end of the text or until ``stop`` says so; what its last
        step gave is handed on in any case."""
        shown = 0
        for piece in self:
            on_piece(piece)
            shown += len(piece.text)
            if stop():
                break
        self.close()
        rest = self._text.text[shown:]
        if rest:
            on_piece(Piece(rest, self.request.origins[-1]))
        return self.output()

    def close(self) -> None:
        """End the request if it still runs; harmless otherwise."""
        if not self.finished:
            self.engine.abort(self.request)
        if self._text.length < self.request.output_length:  # left in the middle of a step
            deque(self.advance(), maxlen=0)
        self._text.finish()
        self._finished = self._finished or time.perf_counter()

    def advance(self) -> Iterator[Piece]:
        """Turn the request's new tokens into text; a stop string in it ends the request."""
        request, text = self.request, self._text
        for at in range(text.length, request.output_length):
            token = request.tokens[request.prompt_length + at]
            may_stop = at >= request.params.min_tokens
            yield from text.push(token, request.origins[at], may_stop=may_stop)
            if text.stopped_by is not None:
                self.engine.stop(request, at + 1, text.stopped_by)
                break
        if self.finished:
            self._finished = time.perf_counter()
            yield from text.finish()

    def output(self) -> RequestOutput:
        request = self.request
        logprobs, total = None, None
        if request.params.logprobs is not None:
            logprobs = [self._decoded(row) for row in request.logprobs]
            chosen = zip(logprobs, request.output, strict=True)
            total = sum(row[token].logprob for row, token in chosen)
        output = CompletionOutput(
            index=0,
            text=self._text.text,
            token_ids=request.output,
            origins=list(request.origins),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            cumulative_logprob=total,
            logprobs=logprobs,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.tokens[: request.prompt_length],
            outputs=[output],
            finished=self.finished,
            metrics=request.metrics,
            seconds=(self._finished or time.perf_counter()) - self._started,
            seed=request.noise.seed,
        )

    def _decoded(self, row: dict[int, Logprob]) -> dict[int, Logprob]:
        """The same logprobs with each token's text."""
        decode = self.tokenizer.decode
        return {
            token: replace(found, decoded_token=decode([token])) for token, found in row.items()
        }


def _give_up(engine: Engine, request: Request) -> None:
    if request.finish_reason is None:
        engine.abort(request)


def tokens_per_second(run: RequestOutput) -> float:
    return len(run.outputs[0].token_ids) / run.seconds if run.seconds else 0.0
