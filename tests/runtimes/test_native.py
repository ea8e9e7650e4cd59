"""The native runtime: torch's logits up to rounding, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as remember
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.config import RuntimeConfig
from slipstream.models.adapter import ATTENTION
from slipstream.models.weights import Blocks
from slipstream.runtimes import native
from slipstream.runtimes.native_layout import SUPPORTED
from slipstream.runtimes.torch import TorchRuntime
from slipstream.types import StepRows, chain_rows

pytestmark = pytest.mark.skipif(native.MISSING is not None, reason=str(native.MISSING))
NAMES = [n for n in tiny_models.ARCHITECTURES if tiny_models.config(n).model_type in SUPPORTED]
FORMATS = {
    "fp32": RuntimeConfig(dtype="float32"),
    "bf16": RuntimeConfig(dtype="bfloat16"),
    "int8": RuntimeConfig(quantization="int8"),
    "int4": RuntimeConfig(quantization="int4"),
    "fp32, KV in bf16": RuntimeConfig(dtype="float32", kv_cache_dtype="bfloat16"),
}


@remember
def model(name: str) -> Any:
    return tiny_models.build(tiny_models.config(name), ATTENTION)


@remember
def reference(name: str) -> TorchRuntime:
    return TorchRuntime(model(name), name)


@remember
def runtime(
    name: str, precision: str = "fp32", threads: int = 1, kernels: str = ""
) -> native.NativeRuntime:
    options = FORMATS[precision]
    options = RuntimeConfig(**{**vars(options), "threads": threads})
    return native.NativeRuntime(
        model(name).config, model(name).state_dict(), Blocks(None, name), options, kernels
    )


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny_models.VOCAB, (count,), generator=generator).tolist()


def rows(slot: int, ids: Sequence[int], parents: Sequence[int], last: int) -> StepRows:
    wanted = range(len(ids) - last, len(ids))
    return StepRows(slot=slot, tokens=list(ids), parents=list(parents), logit_rows=list(wanted))


def schedule(tokens: Sequence[int]) -> list[tuple[list[StepRows], list[list[int]]]]:
    """A prefill, another of another length, trees of both at once, one row of each."""
    return [
        ([rows(0, tokens[:23], range(-1, 22), 23)], [list(range(23))]),
        ([rows(2, tokens[:4], range(-1, 3), 1)], [list(range(4))]),
        (
            [
                rows(0, tokens[23:29], [-1, 0, 0, 1, 2, 4], 6),
                rows(2, tokens[4:7], [-1, 0, 0], 2),
            ],
            [[0, 2, 4], [0, 1]],
        ),
        ([rows(2, [5], [-1], 1), rows(0, [7], [-1], 1)], [[0], [0]]),
    ]


def run(of: Any, steps: Sequence[tuple[list[StepRows], list[list[int]]]]) -> list[Tensor]:
    cache = of.new_cache(3, 64)
    for _ in range(3):
        cache.allocate()
    found = []
    for batch, kept in steps:
        output = of.step(batch, cache)
        cache.commit(output, [rows.slot for rows in batch], kept)
        found.append(output.logits)
    cache.check()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_torch(name: str) -> None:
    steps = schedule(text(40))
    for got, want in zip(run(runtime(name), steps), run(reference(name), steps), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_features_are_those_of_torch(name: str) -> None:
    """Of every layer, over committed KV, a tree and two requests at once."""
    (batch, kept), _, (trees, _), _ = schedule(text(40))
    taps = [3, 0, 2, 1]
    found = []
    for of in (runtime(name), reference(name)):
        cache = of.new_cache(3, 64)
        for _ in range(3):
            cache.allocate()
        cache.commit(of.step(batch, cache), [0], kept)
        found.append(of.step(trees, cache, taps).features)
        assert of.step(trees, cache).features is None
    got, want = found
    assert got is not None
    assert got.shape == (9, 4, 64)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_threads_and_instruction_sets_change_no_bit(name: str, precision: str) -> None:
    steps = schedule(text(40))
    want = run(runtime(name, precision), steps)
    for threads, kernels in ((2, ""), (3, "portable"), (1, "portable")):
        for got, expected in zip(
            run(runtime(name, precision, threads, kernels), steps), want, strict=True
        ):
            assert torch.equal(got, expected)


def alone(of: native.NativeRuntime, path: Sequence[int]) -> Tensor:
    """[V]: logits after a text read token by token."""
    cache = of.new_cache(1, 256)
    slot = cache.allocate()
    for token in path:
        output = of.step([chain_rows(slot, [token], [0])], cache)
        cache.commit(output, [slot], [[0]])
    return output.logits[0]


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    """Requests with a committed context, read in chunks, and a tree each."""
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        context = draw(st.integers(0, 70))
        cuts = sorted(draw(st.sets(st.integers(1, max(1, context)), max_size=3)) | {context})
        parents = [-1]
        for node in range(1, draw(st.integers(1, 20))):
            parents.append(draw(st.integers(0, node - 1)))
        requests.append({"context": context, "cuts": cuts, "parents": parents})
    return {
        "requests": requests,
        "seed": draw(st.integers(0, 1000)),
        "threads": draw(st.sampled_from([1, 2, 3])),
        "kernels": draw(st.sampled_from(["", "portable"])),
    }


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gemma 2, soft-capped, window 6"])
@settings(max_examples=12, deadline=None)
@given(case=situations())
def test_a_row_has_the_same_bits_in_any_company(
    name: str, precision: str, case: dict[str, Any]
) -> None:
    of = runtime(name, precision, case["threads"], case["kernels"])
    cache = of.new_cache(len(case["requests"]), 256)
    batch, paths = [], []
    for i, request in enumerate(case["requests"]):
        slot, done = cache.allocate(), 0
        known = text(request["context"], seed=case["seed"] + i)
        for cut in request["cuts"]:
            if cut > done:
                output = of.step([chain_rows(slot, known[done:cut])], cache)
                cache.commit(output, [slot], [range(cut - done)])
                done = cut
        parents = request["parents"]
        tokens = text(len(parents), seed=case["seed"] + 100 + i)
        batch.append(rows(slot, tokens, parents, len(tokens)))
        for node in range(len(tokens)):
            path = []
            while node >= 0:
                path.append(tokens[node])
                node = parents[node]
            paths.append([*known, *reversed(path)])
    logits = of.step(batch, cache).logits
    one = runtime(name, precision)
    picked = torch.Generator().manual_seed(case["seed"])
    for row in torch.randperm(len(paths), generator=picked)[:3].tolist():
        assert torch.equal(logits[row], alone(one, paths[row]))


def test_a_long_prefill_has_the_bits_of_single_steps() -> None:
    of, known = runtime("llama", threads=2), text(150)
    cache = of.new_cache(1, 256)
    slot = cache.allocate()
    logits = of.step([chain_rows(slot, known, range(150))], cache).logits
    for length in (1, 16, 17, 150):
        assert torch.equal(logits[length - 1], alone(runtime("llama"), known[:length]))


def test_a_slot_grows_and_can_be_used_again() -> None:
    of, known = runtime("llama"), text(240)
    cache = of.new_cache(2, 250)
    for _ in range(2):
        slot = cache.allocate()
        for start in range(0, 240, 40):
            part = known[start : start + 40]
            output = of.step([chain_rows(slot, part, [39])], cache)
            cache.commit(output, [slot], [range(40)])
        assert torch.equal(output.logits[0], alone(of, known))
        cache.release(slot)


def test_nonsense_is_refused_and_changes_nothing() -> None:
    of = runtime("llama")
    cache = of.new_cache(1, 20)
    slot = cache.allocate()
    good = of.step([chain_rows(slot, [1, 2])], cache)
    bad = [
        chain_rows(slot, [97]),
        chain_rows(slot, [-1]),
        chain_rows(7, [1]),
        StepRows(slot=slot, tokens=[1], parents=[0], logit_rows=[]),
        StepRows(slot=slot, tokens=[1], parents=[-2], logit_rows=[]),
        StepRows(slot=slot, tokens=[1], parents=[-1], logit_rows=[1]),
        StepRows(slot=slot, tokens=[1, 2], parents=[-1], logit_rows=[]),
    ]
    for step in bad:
        with pytest.raises((ValueError, IndexError)):
            of.step([step], cache)
    with pytest.raises(ValueError, match="no such row"):
        cache.commit(good, [slot], [[2]])
    with pytest.raises(ValueError, match="another model's"):
        runtime("qwen2").step([chain_rows(slot, [1])], cache)
    cache.commit(good, [slot], [[0, 1]])
    assert cache.lengths == [2]


def test_what_is_not_supported_is_named() -> None:
    llama = tiny_models.config("llama")
    assert native.unsupported(llama, RuntimeConfig()) is None
    for shape, options, word in (
        (tiny_models.config("gpt-2"), RuntimeConfig(), "gpt2"),
        (llama, RuntimeConfig(device="cuda"), "CPUs"),
        (llama, RuntimeConfig(dtype="float16"), "float32 and bfloat16"),
        (llama, RuntimeConfig(quantization="fp8"), "int8 and int4"),
    ):
        assert word in str(native.unsupported(shape, options))


def test_quantised_logits_are_near() -> None:
    steps = schedule(text(40))
    want = run(runtime("llama"), steps)[0]
    spread = float(want.std())
    for precision, allowed in (("bf16", 0.02), ("int8", 0.05), ("int4", 0.5)):
        got = run(runtime("llama", precision), steps)[0]
        error = float((got - want).std())
        assert 0 < error < allowed * spread, precision
