"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.config import SamplingParams
from slipstream.metrics import Metrics
from slipstream.noise import Noise
from slipstream.types import Logprob, Origin

FinishReason = Literal["stop", "length", "abort"]


@dataclass(kw_only=True, eq=False)
class Request:
    """The engine alone changes it; everybody else reads.

    tokens: prompt and output. origins, logprobs: one an output token (logprobs if asked for).
    slot: where its committed KV lies, None while it waits and after it has finished.
    """

    request_id: int
    prompt_length: int
    tokens: list[int]
    params: SamplingParams
    noise: Noise
    slot: int | None = None
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length
