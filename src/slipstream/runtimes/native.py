"""The functional step in C++: the fast path on CPUs (``native/``).

A row's bits depend on its own path alone, not on the other rows, the chunks of a prefill, the batch
or the threads: greedy speculative text equals plain text exactly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.cache import Cache
from slipstream.config import RuntimeConfig, SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.extension import MISSING
from slipstream.extension import native as _native
from slipstream.models import plain_config
from slipstream.models.shape import check_config, context_length
from slipstream.models.weights import Blocks, Weights
from slipstream.runtimes import native_layout as layout
from slipstream.types import StepOutput, StepRows

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0625, "int4": 0.625}  # of a packed weight
_BLOCKS = {"int8": ("Q8_0",), "int4": ("Q4_0", "Q4_1")}  # GGUF blocks that go in as they are


@dataclass(frozen=True, kw_only=True)
class NativeKV:
    """output: the extension's. starts: for each request of the step its first row there."""

    output: Any
    starts: Sequence[int]


class NativeCache(Cache):
    """Slots that grow alone, by doubling."""

    def __init__(self, model: Any, *, slots: int, max_length: int, narrow: bool) -> None:
        super().__init__(slots=slots, max_length=max_length)
        self.native = _native.Cache(model, slots, max_length, narrow)

    @property
    def bytes(self) -> int:
        return int(self.native.bytes)

    def _clear(self, slot: int) -> None:
        pass  # what lies beyond a slot's length is never looked at

    def _append(
        self, new_kv: NativeKV, slots: Sequence[int], kept: Sequence[Sequence[int]]
    ) -> None:
        rows = [
            [start + row for row in rows] for start, rows in zip(new_kv.starts, kept, strict=True)
        ]
        lengths = [self.lengths[slot] for slot in slots]
        self.native.commit(new_kv.output, list(slots), lengths, rows)


class NativeRuntime:
    """A packed model behind the ``Runtime`` protocol.

    kernels: the instruction set in use; "" chooses the best that this processor has. model: the
    extension's. narrow: whether caches hold bf16.
    """

    dtype = torch.float32  # of the arithmetic, whatever the weights are stored as
    exact = True

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, Tensor],
        blocks: Blocks,
        options: RuntimeConfig,
        kernels: str = "",
    ) -> None:
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_length: int = context_length(config)
        self.threads = options.threads or physical_cores()
        self.narrow = options.kv_cache_dtype == "bfloat16"
        pack = _Packer(config, tensors, blocks, options)
        tables, table_of, windows = layout.rotary_and_window(config)
        words = layout.config_words(config) | {"rotary": tables}
        outer = pack(layout.outer_names(config, tensors), outer=True)
        self.model = _native.Model(words, outer, self.threads, kernels)
        self.layers: int = config.num_hidden_layers
        for i in range(self.layers):
            layer = pack(layout.layer_names(config, i, tensors))
            self.model.add_layer(layer, windows[i], table_of[i])
        self.kernels: str = self.model.kernels

    @property
    def weight_bytes(self) -> int:
        """Of the packed weights."""
        return int(self.model.bytes)

    def new_cache(self, slots: int, max_length: int) -> NativeCache:
        return NativeCache(self.model, slots=slots, max_length=max_length, narrow=self.narrow)

    def step(self, batch: Sequence[StepRows], cache: Cache, taps: Sequence[int] = ()) -> StepOutput:
        assert isinstance(cache, NativeCache)
        rows, output = Rows(batch, cache), _native.Output()
        _native.step(self.model, cache.native, output, *rows.columns, list(taps), self.layers)
        logits = torch.from_numpy(output.logits(self.vocab_size))
        features = None
        if taps:
            flat = torch.from_numpy(output.features(self.hidden_size))
            features = flat.view(-1, len(taps), self.hidden_size)
        kv = NativeKV(output=output, starts=rows.starts)
        return StepOutput(logits=logits, new_kv=kv, features=features)

    def draft(
        self,
        batch: Sequence[StepRows],
        cache: Cache,
        counts: Sequence[int],
        choices: Sequence[Choice],
        vocab_size: int,
    ) -> tuple[StepOutput, list[tuple[list[int], Tensor]]]:
        """As a draft model: ``counts[i]`` further tokens after the rows of request i, in one call.

        batch: the last row of each request is the one whose logits are asked for. Returns the
        KV of all rows, without logits, and for each request its guesses with the distributions
        [count, vocab_size] they were drawn from ([0, vocab_size]: they are the most probable
        tokens).
        """
        assert isinstance(cache, NativeCache)
        rows, output = Rows(batch, cache), _native.Output()
        chosen = [
            (c.params.temperature, c.params.top_k, c.params.top_p, c.params.min_p, list(c.numbers))
            for c in choices
        ]
        drafts = _native.draft(
            self.model, cache.native, output, *rows.columns, list(counts), chosen, vocab_size
        )
        none = torch.empty(0, self.vocab_size)
        step = StepOutput(logits=none, new_kv=NativeKV(output=output, starts=rows.starts))
        return step, [(tokens, torch.from_numpy(probs)) for tokens, probs in drafts]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How guesses are chosen. numbers: one in [0, 1) a guess, to draw it with; none for the most
    probable tokens."""

    params: SamplingParams
    numbers: Sequence[float] = ()


class Rows:
    """A batch as the extension takes it. starts: for each request its first row."""

    def __init__(self, batch: Sequence[StepRows], cache: Cache) -> None:
        tokens: list[int] = []
        parents: list[int] = []
        slots: list[int] = []
        past: list[int] = []
        wanted: list[int] = []
        self.starts: list[int] = []
        self.columns = (tokens, parents, slots, past, wanted)
        for rows in batch:
            start, count = len(tokens), len(rows.tokens)
            self.starts.append(start)
            tokens += rows.tokens
            parents += [start + p if p >= 0 else p for p in rows.parents]
            slots += [rows.slot] * count
            past += [cache.lengths[rows.slot]] * count
            wanted += [start + r for r in rows.logit_rows]


class _Packer:
    """Reads tensors as the native step takes them: (format, [(how it is stored, rows), …])."""

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, Tensor],
        blocks: Blocks,
        options: RuntimeConfig,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._blocks = blocks
        self._options = options

    def __call__(self, names: layout.Names, *, outer: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {name: self._vector(parts) for name, parts in names.vectors.items()}
        return found | {name: self._matrix(parts, outer) for name, parts in names.matrices.items()}

    def _tensor(self, name: str) -> Tensor:
        return layout.prepare(self._config, name, self._tensors[name])

    def _vector(self, names: Sequence[str]) -> np.ndarray:
        return torch.cat([self._tensor(name).float() for name in names]).numpy()

    def _matrix(self, names: Sequence[str], outer: bool) -> tuple[str, list[tuple[str, Any]]]:
        format_ = self._format(names, outer)
        carried = _BLOCKS.get(format_, ())
        parts: list[tuple[str, Any]] = []
        for name in names:
            if self._blocks.kinds.get(name) in carried:
                parts.append((self._blocks.kinds[name], self._blocks.rows(name)))
                continue
            tensor = self._tensor(name).contiguous()
            if tensor.dtype == torch.bfloat16:
                parts.append(("bfloat16", tensor.view(torch.uint16).numpy()))
            else:
                parts.append(("float32", tensor.float().numpy()))
        return format_, parts

    def _format(self, names: Sequence[str], outer: bool) -> str:
        """Of a matrix. int4 leaves embedding and head at int8, and blocks of 8 bits as they are:
        they are the last to lose precision without a loss of quality."""
        quantization = self._options.quantization
        if quantization == "none" or self._columns(names[0]) % 32:
            if self._options.dtype != "auto":
                return self._options.dtype
            narrow = all(self._tensors[name].dtype == torch.bfloat16 for name in names)
            return "bfloat16" if narrow else "float32"
        if quantization == "int4":
            kinds = {self._blocks.kinds.get(name, "") for name in names}
            eight = kinds == {"Q8_0"} or (outer and not kinds & set(_BLOCKS["int4"]))
            return "int8" if eight else "int4"
        return quantization

    def _columns(self, name: str) -> int:
        return int(self._tensors[name].shape[1])


def read_config(folder: Path, name: str) -> Any:
    """The text part of a folder's config.json, with transformers' defaults filled in."""
    plain = plain_config.read(folder)
    if plain is not None:
        return plain
    from transformers import AutoConfig

    try:
        shape = AutoConfig.from_pretrained(folder).get_text_config()
    except (ValueError, KeyError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SlipstreamError(f"{name}: transformers can't load {folder}: {reason}") from error
    check_config(shape, name)
    return shape


def load(
    folder: Path, *, name: str, config: RuntimeConfig, shape: Any, notify: Callable[[str], None]
) -> NativeRuntime:
    """Pack a checkpoint folder whose configuration is ``shape``; ask ``unsupported`` first."""
    cores = os.cpu_count() or 1
    if config.threads is not None and config.threads > cores:
        raise SlipstreamError(f"--threads {config.threads}: this machine has {cores} cores")
    # torch's threads spin for milliseconds after each of its operations over a row of logits, on
    # the cores that the next step wants: a step took 1.6 to 2.7 times as long beside them
    torch.set_num_threads(1)
    weights = Weights(folder, name)
    _check_memory(weights, config, name)
    try:
        runtime = NativeRuntime(shape, weights, weights.blocks, config)
    except KeyError as missing:
        raise SlipstreamError(
            f"{name}: {folder} lacks the tensor {missing}: fetch the checkpoint again"
        ) from None
    except ValueError as error:
        raise SlipstreamError(f"{name}: {folder} doesn't fit its config.json: {error}") from None
    if runtime.kernels == "portable":
        notify("this CPU has neither AVX2 nor NEON: the native step runs without them, slowly")
    return runtime


def _check_memory(weights: Weights, config: RuntimeConfig, name: str) -> None:
    """Raise if the packed weights won't fit, before anything is read."""
    per_weight = _BYTES["bfloat16" if config.dtype == "bfloat16" else "float32"]
    if config.quantization != "none":
        per_weight = _BYTES[config.quantization]
    elif config.dtype == "auto" and all(t == "BF16" for t in weights.stored_types):
        per_weight = _BYTES["bfloat16"]
    needed, available = weights.count * per_weight, available_memory()
    if needed > available:
        raise SlipstreamError(
            f"{name} needs {needed / 2**30:.1f} GiB for its weights, of memory "
            f"{available / 2**30:.1f} GiB are free: choose --quantization int8 or int4, "
            "--dtype bfloat16, or a smaller model"
        )


def available_memory() -> int:
    """Bytes that a process may still take."""
    path = Path("/proc/meminfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**63


def unsupported(shape: Any, config: RuntimeConfig) -> str | None:
    """Why a model can't run on this runtime with these options; None if it can."""
    if MISSING is not None:
        return MISSING
    if config.device.startswith("cuda"):
        return "the native step runs on CPUs"
    if config.dtype == "float16":
        return "the native step knows float32 and bfloat16"
    if config.quantization == "fp8":
        return "the native step knows int8 and int4"
    return layout.unsupported(shape)


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once."""
    available: Iterable[int] = range(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        available = os.sched_getaffinity(0)
    siblings = set()
    for cpu in available:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text() if path.is_file() else str(cpu))
    return max(1, len(siblings))
