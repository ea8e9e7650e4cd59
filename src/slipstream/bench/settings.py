"""What a bench measures, checked before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.config import RuntimeConfig, SamplingParams, require_integer
from slipstream.drafters import SpeculativeConfig, parse
from slipstream.errors import SlipstreamError
from slipstream.models.sources import DEFAULT_MODEL
from slipstream.runtimes import Runtime

PLAIN = "plain"
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Where the cost curve t(B, n) is taken. contexts: committed tokens of each request.
    rows: n, of each request. batches: B, requests in the step; 1 is always among them."""

    contexts: Sequence[int] = (128, 1024)
    rows: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 12, 16)
    batches: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        named = (("--context-lengths", "contexts"), ("--rows", "rows"), ("--batch", "batches"))
        for option, name in named:
            _check_list(option, getattr(self, name), 1)
        if 1 not in self.batches:
            object.__setattr__(self, "batches", (1, *self.batches))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """methods: label → ``speculative_config``; plain decoding runs beside them in any case.

    precisions: a RuntimeConfig each, loaded one after the other. temperatures, concurrencies: each
    with each. concurrency: requests kept in flight. rounds: how often every side runs.
    all_turns: of a question, not only the first. peers: name → path, see ``bench.peers``.
    """

    methods: Mapping[str, SpeculativeConfig]
    model: str = DEFAULT_MODEL
    precisions: Sequence[RuntimeConfig] = (RuntimeConfig(),)
    temperatures: Sequence[float] = (0.0,)
    concurrencies: Sequence[int] = (1,)
    max_tokens: int = 128
    rounds: int = 3
    seed: int = 0
    max_model_len: int | None = None
    all_turns: bool = False
    curve: Curve | None = None
    peers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_list("--concurrency", self.concurrencies, 1)
        require_integer("--rounds", self.rounds, 1)
        require_integer("--max-tokens", self.max_tokens, 1)
        if not self.temperatures:
            raise SlipstreamError("--temperature names nothing: give one or several")
        for temperature in self.temperatures:
            self.params(0, temperature)
        for config in self.methods.values():
            parse(config)
        if self.peers and not (0 in self.temperatures and 1 in self.concurrencies):
            raise SlipstreamError(
                "peers run greedily, one request at a time: have 0 in --temperature and 1 in "
                "--concurrency"
            )
        if self.peers:
            from slipstream.bench import peers

            for name, path in self.peers.items():
                peers.check(name, path)

    def params(self, number: int, temperature: float) -> SamplingParams:
        """Of prompt ``number``, the same on every side and in every round."""
        return SamplingParams(
            temperature=temperature, max_tokens=self.max_tokens, seed=self.seed + number
        )


def _check_list(option: str, values: Sequence[int], least: int) -> None:
    if not values:
        raise SlipstreamError(f"{option} names nothing: give one or several")
    for value in values:
        require_integer(option, value, least)


def precisions(
    dtypes: Sequence[str], quantizations: Sequence[str], **options: Any
) -> list[RuntimeConfig]:
    """Every combination that is something of its own: unquantised each dtype, quantised one each.

    options: the other fields of RuntimeConfig.
    """
    if not dtypes or not quantizations:
        raise SlipstreamError("--dtype and --quantization must name something each")
    if "auto" in dtypes and len(dtypes) > 1:
        raise SlipstreamError("--dtype auto is one of the others: name them all, or auto alone")
    beside = dtypes[0] if len(dtypes) == 1 else "auto"  # what quantised weights don't settle
    found: dict[RuntimeConfig, None] = {}  # in order, each once
    for quantization in quantizations:
        for dtype in dtypes if quantization == "none" else [beside]:
            found[RuntimeConfig(dtype=dtype, quantization=quantization, **options)] = None
    return list(found)


def precision_of(config: RuntimeConfig, runtime: Runtime) -> str:
    """The name of what the weights are stored as: fp32, bf16, fp16, int8, int4 or fp8."""
    if config.quantization != "none":
        return config.quantization
    if config.dtype != "auto":
        return SHORT[config.dtype]
    stored = getattr(runtime, "weight_dtype", runtime.dtype)
    return SHORT[str(stored).removeprefix("torch.")]


def label(configs: Iterable[SpeculativeConfig]) -> dict[str, SpeculativeConfig]:
    """Each ``speculative_config`` under its method's name, and its options where two share it."""
    configs = list(configs)
    counts = Counter(parse(config).method for config in configs)
    found: dict[str, SpeculativeConfig] = {}
    for config in configs:
        name = parse(config).method
        if counts[name] > 1:
            parts = [config] if isinstance(config, Mapping) else config
            options = (f"{k}={v}" for part in parts for k, v in part.items() if k != "method")
            name = " ".join([name, *options])
        if name in found:
            raise SlipstreamError(f"the method {name} is there twice: leave one out")
        found[name] = config
    return found
