"""What a user may set. Frozen, keyword-only, checked at once; an unknown key is an error."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar

from slipstream.errors import SlipstreamError

T = TypeVar("T")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
RUNTIMES = ("auto", "native", "torch")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4", "fp8")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16")


def from_dict(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a config dataclass from a user's dictionary; ``what`` names it in errors."""
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise unknown(what, key, tuple(fields))
    for name, f in fields.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise SlipstreamError(f"{what} {name!r} is missing: give one")
    return cls(**values)


def unknown(what: str, given: object, known: Sequence[str]) -> SlipstreamError:
    """The error for a name that isn't known, with the nearest one that is."""
    near = difflib.get_close_matches(str(given), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return SlipstreamError(f"unknown {what} {given!r}: {hint}known are {', '.join(known)}")


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise the standard error for a value outside its range."""
    if not condition:
        raise SlipstreamError(f"{name} must be {rule}, got {value!r}")


def require_integer(name: str, value: object, least: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(ok, name, value, f"an integer of at least {least}")


def is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _require_number(name: str, value: object, low: float, high: float, rule: str) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(ok and math.isfinite(value) and low <= value <= high, name, value, rule)  # type: ignore[arg-type,operator]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Names, defaults and order follow vLLM.

    temperature: 0 is greedy. top_k: 0 or -1 turns it off. min_p: relative to the most probable.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and
        output. presence_penalty, frequency_penalty: subtracted for tokens in the output.
    logit_bias: token id → added to its logit. seed: same seed, same text; None draws a fresh one.
    stop: strings that end the text (not included in it). stop_token_ids: ids that end it.
    max_tokens: None for as many as the context holds.
    min_tokens: before that many, no end-of-sequence or stop token, and no stop string counts.
    logprobs: that many most probable tokens with each chosen one; None for no logprobs.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        inf = math.inf
        _require_number("temperature", self.temperature, 0, inf, "0 (greedy) or more")
        require_integer("top_k", self.top_k, -1)
        _require_number("top_p", self.top_p, 1e-12, 1, "in (0, 1]")
        _require_number("min_p", self.min_p, 0, 1, "in [0, 1]")
        _require_number("repetition_penalty", self.repetition_penalty, 1e-12, inf, "above 0")
        _require_number("presence_penalty", self.presence_penalty, -2, 2, "in [-2, 2]")
        _require_number("frequency_penalty", self.frequency_penalty, -2, 2, "in [-2, 2]")
        require_integer("min_tokens", self.min_tokens, 0)
        for name, least in (("max_tokens", 1), ("logprobs", 0)):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), least)
        if self.seed is not None:
            require_integer("seed", self.seed, 0)
        if self.max_tokens is not None:
            rule = f"at most max_tokens ({self.max_tokens})"
            require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, rule)
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
            require(listed, name, value, "a list")
            object.__setattr__(self, name, tuple(value))
        for string in self.stop:
            require(isinstance(string, str) and bool(string), "stop", string, "a string of text")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        bias = self.logit_bias
        require(isinstance(bias, Mapping), "logit_bias", bias, "a mapping from token id to number")
        for token in (*self.stop_token_ids, *bias):
            require_integer("a token id", token, 0)
        for value in bias.values():
            _require_number("logit_bias", value, -inf, inf, "a finite number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise if a token id named here does not exist."""
        for token in (*self.stop_token_ids, *self.logit_bias):
            rule = f"below the vocabulary size {vocab_size} (0 … {vocab_size - 1})"
            require(is_token(token, vocab_size), "a token id", token, rule)
        if self.logprobs is not None:
            rule = f"at most the vocabulary size {vocab_size}"
            require(self.logprobs <= vocab_size, "logprobs", self.logprobs, rule)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How a model's forward pass is computed.

    runtime: "native" (our CPU step), "torch", or "auto": native on CPUs where it knows the model.
    device: "cpu", "cuda", "cuda:N", or "auto": the first GPU if there is one.
    dtype: of the weights. "auto" loses nothing: on CPUs bfloat16 if the checkpoint is, else
        float32; on GPUs the checkpoint's own.
    quantization: of the weights; "int8" and "int4", by groups of 32 (int8 on torch: by
        rows); "fp8" on GPUs that have it.
    threads: of the native runtime; None for the physical cores.
    kv_cache_dtype: "auto" is the dtype of the arithmetic.
    """

    runtime: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    threads: int | None = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (
            ("runtime", RUNTIMES),
            ("dtype", DTYPES),
            ("quantization", QUANTIZATIONS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
        ):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise unknown("device", self.device, ("auto", "cpu", "cuda", "cuda:N"))
        if self.threads is not None:
            require_integer("threads", self.threads, 1)
