"""What the native runtime refuses and says: before loading, without its extension, and in it."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_llm
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import RuntimeConfig
from slipstream.errors import SlipstreamError
from slipstream.models.load import LoadedModel, load
from slipstream.runtimes import native
from slipstream.runtimes.torch import TorchRuntime

built = pytest.mark.skipif(native.MISSING is not None, reason=str(native.MISSING))
if native.MISSING is None:
    import hostile
WRONG = (ValueError, TypeError)


def loaded(**options: Any) -> tuple[LoadedModel, list[str]]:
    """The tiny target, and what was said."""
    said: list[str] = []
    return load(str(tiny_llm.target()), RuntimeConfig(**options), notify=said.append), said


# Before anything is read


@pytest.mark.parametrize(
    ("options", "stored", "gigabytes"),
    [
        ({}, ["F32"], 4.0),
        ({}, ["BF16"], 2.0),
        ({}, ["BF16", "F32"], 4.0),
        ({"dtype": "bfloat16"}, ["F32"], 2.0),
        ({"dtype": "float32"}, ["BF16"], 4.0),
        ({"quantization": "int8"}, ["F32"], 1.0625),
        ({"quantization": "int4"}, ["BF16"], 0.625),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], stored: list[str], gigabytes: float
) -> None:
    weights: Any = SimpleNamespace(count=2**30, stored_types=stored)
    needed = int(gigabytes * 2**30)
    monkeypatch.setattr(native, "available_memory", lambda: needed)
    native._check_memory(weights, RuntimeConfig(**options), "x")
    monkeypatch.setattr(native, "available_memory", lambda: needed - 1)
    with pytest.raises(SlipstreamError, match=f"x needs {gigabytes:.1f} GiB .* choose --quant"):
        native._check_memory(weights, RuntimeConfig(**options), "x")


@built
def test_memory_is_looked_at_when_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_memory", lambda: 1000)
    with pytest.raises(SlipstreamError, match=r"target needs 0\.0 GiB for its weights"):
        loaded()


def test_available_memory_is_this_machines() -> None:
    assert 2**20 < native.available_memory() < 2**50


@built
def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.os, "cpu_count", lambda: 2)
    with pytest.raises(SlipstreamError, match="--threads 3: this machine has 2 cores"):
        loaded(threads=3)
    model, _ = loaded(threads=2)
    assert isinstance(model.runtime, native.NativeRuntime)
    assert model.runtime.threads == 2


@built
def test_portable_kernels_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native, "NativeRuntime", functools.partial(native.NativeRuntime, kernels="portable")
    )
    _, said = loaded()
    assert said == ["this CPU has neither AVX2 nor NEON: the native step runs without them, slowly"]


@built
def test_other_kernels_are_not_worth_a_line() -> None:
    model, said = loaded()
    assert isinstance(model.runtime, native.NativeRuntime)
    assert len(said) == (model.runtime.kernels == "portable")


# Without the extension

NOT_BUILT = "the native step isn't built (no file): install slipstream with a C++ compiler"
WITHOUT = """
import sys
sys.modules["slipstream._native"] = None  # makes its import an ImportError
from slipstream.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_the_extension_torch_runs_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "MISSING", NOT_BUILT)
    model, said = loaded()
    assert isinstance(model.runtime, TorchRuntime)
    assert said == [f"{tiny_llm.target()} runs on torch: {NOT_BUILT}"]
    assert loaded(runtime="torch")[1] == []


def test_without_the_extension_asking_for_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MISSING", NOT_BUILT)
    with pytest.raises(SlipstreamError) as error:
        loaded(runtime="native")
    want = f"{tiny_llm.target()}: {NOT_BUILT}; --runtime auto runs it on torch"
    assert str(error.value) == want


@pytest.mark.parametrize("runtime", ["auto", "native"])
def test_the_command_line_without_the_extension(runtime: str) -> None:
    arguments = ["generate", "--model", str(tiny_llm.target()), "--max-tokens", "4"]
    command = [sys.executable, "-c", WITHOUT, *arguments, "--runtime", runtime, "in on"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (2 if runtime == "native" else 0), done.stderr
    assert bool(done.stdout.strip()) == (runtime == "auto")
    lines = [line for line in done.stderr.splitlines() if "the native step isn't built" in line]
    assert len(lines) == 1
    assert "install slipstream with a C++ compiler" in lines[0]
    assert "Traceback" not in done.stderr


# The extension itself


@built
@pytest.mark.parametrize("case", ["none"] if native.MISSING else hostile.CASES)
def test_nothing_ends_the_process(case: Any) -> None:
    file = Path(__file__).with_name("hostile.py")
    done = subprocess.run([sys.executable, file, case.__name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@functools.cache
def reading() -> tuple[Any, Any, Any]:
    """A model, a cache of it that holds 40 tokens, and what the next token gives."""
    model = hostile.model()
    cache = hostile.filled(model)
    return model, cache, hostile.read(model, cache, 1, 40).logits(hostile.VOCAB)


@built
@pytest.mark.parametrize(
    "config",
    [
        {"kv_heads": 3},
        {"hidden": 0},
        {"vocab": -1},
        {"inner": 2**31},
        {"dim": 12},  # shorter than the rotary table
        {"rotary": []},
        {"activation": "relu"},
        {"hidden": 64},
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused(config: dict[str, Any]) -> None:
    def build() -> None:
        model = hostile.native.Model(hostile.CONFIG | config, hostile.outer(), 1, "")
        model.add_layer(hostile.layer(), 0, 0)

    with pytest.raises(WRONG):
        build()


def zeros(kind: str, rows: int, columns: int, dtype: Any = np.float32) -> Any:
    return "int8" if kind == "Q8_0" else "float32", [(kind, np.zeros((rows, columns), dtype))]


@built
@pytest.mark.parametrize(
    "part",
    [
        {"up": zeros("float32", 63, 32)},
        {"up": zeros("float32", 65, 32)},
        {"up": zeros("float32", 64, 31)},
        {"up": zeros("float32", 64, 33)},
        {"up": zeros("bfloat16", 64, 32)},  # twice the bytes of the kind
        {"up": zeros("Q8_0", 64, 33, np.uint8)},
        {"up": zeros("float16", 64, 32)},
        {"up": ("float32", zeros("Q8_0", 64, 34, np.uint8)[1])},
        {"up": ("int3", [])},
        {"up": ("float32", [])},
        {"up": ("float32", [("float32", np.zeros(64 * 32, np.float32))])},
        {"before_mlp": np.zeros(31, np.float32)},
        {"before_mlp": np.zeros((32, 1), np.float32)},
        {"query_norm": np.zeros(8, np.float32)},
    ],
)
def test_wrong_weights_are_refused(part: dict[str, Any]) -> None:
    model = hostile.model(layers=0)
    with pytest.raises(WRONG):
        model.add_layer({**hostile.layer(), **part}, 0, 0)
    with pytest.raises(WRONG, match="rotary"):
        model.add_layer(hostile.layer(), 0, 1)
    with pytest.raises(WRONG):
        model.add_layer(hostile.layer(), -1, 0)


@built
@pytest.mark.parametrize(
    ("slots", "lengths", "rows"),
    [
        ([2], [40], [[0]]),
        ([-1], [40], [[0]]),
        ([0], [-1], [[0]]),
        ([0], [64], [[0]]),
        ([0], [2**63 - 1], [[0]]),
        ([0], [2**63], [[0]]),
        ([0], [40], [[1]]),
        ([0], [40], [[-1]]),
        ([0], [40], [[0] * 25]),
        ([0, 1], [40], [[0]]),
        ([0], [40, 0], [[0]]),
        ([0], [40], []),
    ],
)
def test_a_wrong_commit_is_refused(slots: Any, lengths: Any, rows: Any) -> None:
    model, cache, want = reading()
    output = hostile.read(model, cache, 1, 40)
    with pytest.raises(WRONG):
        cache.commit(output, slots, lengths, rows)
    assert np.array_equal(hostile.read(model, cache, 1, 40).logits(hostile.VOCAB), want)


numbers = st.one_of(st.integers(-2, 3), st.integers(0, 20), st.sampled_from([63, 64, 256, 2**62]))


@st.composite
def calls(draw: st.DrawFn) -> list[Any]:
    """The arguments of a step: sound ones, up to three of which are replaced."""
    count = draw(st.integers(1, 20))
    parents = [draw(st.integers(-1, r - 1)) for r in range(count)]
    arguments: list[Any] = [[1] * count, parents, [0] * count, [40] * count, [count - 1], [0], 2]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, 6))
        if at == 6:
            arguments[6] = draw(numbers)
        elif arguments[at] and draw(st.booleans()):
            arguments[at][draw(st.integers(0, len(arguments[at]) - 1))] = draw(numbers)
        else:
            arguments[at] = draw(st.lists(numbers, max_size=20))
    return arguments


@built
@settings(max_examples=300)
@given(arguments=calls())
def test_a_step_gives_numbers_or_an_error(arguments: list[Any]) -> None:
    model, cache, want = reading()
    output = hostile.native.Output()
    try:
        hostile.native.step(model, cache, output, *arguments)
    except WRONG:
        pass
    else:
        logits, features = output.logits(hostile.VOCAB), output.features(32)
        assert logits.shape == (len(arguments[4]), hostile.VOCAB)
        assert features.shape == (len(arguments[0]) * len(arguments[5]), 32)
        assert np.isfinite(logits).all()
    assert np.array_equal(hostile.read(model, cache, 1, 40).logits(hostile.VOCAB), want)


@st.composite
def draft_calls(draw: st.DrawFn) -> list[Any]:
    """The arguments of a draft: sound ones, up to two of which are replaced."""
    step = draw(calls())[:5]
    requests = len(step[4])
    counts = [draw(st.integers(1, 4)) for _ in range(requests)]
    choices = [
        (0.8, 3, 0.9, 0.01, [0.5] * count if draw(st.booleans()) else []) for count in counts
    ]
    arguments = [*step, counts, choices, draw(st.integers(1, hostile.VOCAB))]
    for _ in range(draw(st.integers(0, 2))):
        which = draw(st.integers(0, 2))
        if which == 0:
            arguments[5] = draw(st.lists(numbers, max_size=3))
        elif which == 1:
            odd = draw(st.sampled_from([-1.0, 0.0, 2.0, float("nan"), float("inf")]))
            drawn = draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.0, float("nan")]), max_size=3))
            arguments[6] = [(odd, draw(numbers), odd, odd, drawn)] * requests
        else:
            arguments[7] = draw(numbers)
    return arguments


@built
@settings(max_examples=300)
@given(arguments=draft_calls())
def test_a_draft_gives_tokens_or_an_error(arguments: list[Any]) -> None:
    model, cache, want = reading()
    try:
        drafts = hostile.native.draft(model, cache, hostile.native.Output(), *arguments)
    except WRONG:
        pass
    else:
        counts, choices, width = arguments[5:]
        for (tokens, probs), count, choice in zip(drafts, counts, choices, strict=True):
            assert len(tokens) == count
            assert all(0 <= token < width for token in tokens)
            assert probs.shape == (len(choice[4]), width)
    assert np.array_equal(hostile.read(model, cache, 1, 40).logits(hostile.VOCAB), want)
