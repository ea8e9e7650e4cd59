"""The functional step against transformers' own forward pass, one architecture after another."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, VOCAB, Pair
from torch import Tensor

from slipstream.cache import Cache, TensorKV
from slipstream.config import RuntimeConfig
from slipstream.errors import SlipstreamError
from slipstream.models.adapter import TESTED, StepContext
from slipstream.runtimes import torch as module
from slipstream.runtimes.torch import TorchRuntime
from slipstream.types import StepOutput, StepRows

CLOSE = 1e-4
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, -1, 8]


@cache
def pair(name: str) -> Pair:
    return Pair(tiny_models.config(name), name)


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def rows(
    slot: int, tokens: Sequence[int], parents: Sequence[int] | None = None, wanted: object = None
) -> StepRows:
    parents = range(-1, len(tokens) - 1) if parents is None else parents
    wanted = range(len(tokens)) if wanted is None else wanted
    return StepRows(slot=slot, tokens=tokens, parents=parents, logit_rows=wanted)  # type: ignore[arg-type]


def prefill(runtime: TorchRuntime, cache: Cache, tokens: Sequence[int], chunks: int = 2) -> int:
    slot = cache.allocate()
    for part in np.array_split(np.array(tokens), chunks):
        if len(part):
            output = runtime.step([rows(slot, part.tolist(), wanted=[])], cache)
            cache.commit(output, [slot], [range(len(part))])
    return slot


def path(parents: Sequence[int], tokens: Sequence[int], row: int) -> list[int]:
    above = path(parents, tokens, parents[row]) if parents[row] >= 0 else []
    return [*above, tokens[row]]


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prefill_in_chunks_of_any_size(name: str) -> None:
    runtime, rng = pair(name).runtime, np.random.default_rng(1)
    tokens = text(40, seed=2)
    want = pair(name).want(tokens)
    assert want.std() > 0.05  # else nothing is shown
    for _ in range(3):
        cache = runtime.new_cache(2, 64)
        slot = cache.allocate()
        got, start = [], 0
        while start < len(tokens):
            count = int(rng.integers(1, 16))
            part = tokens[start : start + count]
            output = runtime.step([rows(slot, part)], cache)
            cache.commit(output, [slot], [range(len(part))])
            got.append(output.logits)
            start += count
        assert_close(torch.cat(got), want)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_node_of_a_tree_is_the_end_of_its_own_path(name: str) -> None:
    runtime = pair(name).runtime
    for committed in (0, 3, 17):
        cache = runtime.new_cache(1, 64)
        known, guesses = text(committed, seed=3), text(len(TREE), seed=4)
        slot = prefill(runtime, cache, known)
        output = runtime.step([rows(slot, guesses, TREE)], cache)
        for row in range(len(TREE)):
            want = pair(name).want([*known, *path(TREE, guesses, row)])[-1]
            assert_close(output.logits[row], want)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_batches(name: str) -> None:
    """Other lengths, other trees, slots apart, some rows of logits: each as if alone."""
    runtime = pair(name).runtime
    cache = runtime.new_cache(5, 64)
    known = [text(n, seed=n) for n in (9, 1, 23, 14, 2)]
    slots = [prefill(runtime, cache, tokens, chunks=1) for tokens in known]
    cache.release(slots[1])
    batch = [
        rows(3, text(4, seed=31), [-1, 0, 0, 2], [1, 3]),
        rows(0, text(1, seed=32), [-1], [0]),
        rows(2, text(6, seed=33), [-1, 0, 1, 1, 2, 3], [5, 0]),
        rows(4, text(3, seed=34), [-1, 0, 1], []),
    ]
    output = runtime.step(batch, cache)
    want = [
        pair(name).want([*known[part.slot], *path(part.parents, part.tokens, row)])[-1]
        for part in batch
        for row in part.logit_rows
    ]
    assert_close(output.logits, torch.stack(want))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_going_on_after_an_accepted_branch(name: str) -> None:
    """The KV of a branch, committed, is the KV of that text."""
    runtime = pair(name).runtime
    cache = runtime.new_cache(2, 64)
    known = [text(11, seed=5), text(4, seed=6)]
    slots = [prefill(runtime, cache, tokens) for tokens in known]
    guesses = [text(len(TREE), seed=7), text(len(TREE), seed=8)]
    output = runtime.step(
        [rows(s, g, TREE, []) for s, g in zip(slots, guesses, strict=True)], cache
    )
    kept = [[0, 2, 5], [8, 9]]
    cache.commit(output, slots, kept)
    after = runtime.step([rows(slot, [7, 8]) for slot in slots], cache).logits.split(2)
    for tokens, guess, branch, got in zip(known, guesses, kept, after, strict=True):
        want = pair(name).want([*tokens, *(guess[row] for row in branch), 7, 8])[-2:]
        assert_close(got, want)


@pytest.mark.parametrize("name", ["llama", "gemma 3, window 6"])
def test_a_step_changes_nothing(name: str) -> None:
    runtime = pair(name).runtime
    cache = runtime.new_cache(1, 64)
    slot = prefill(runtime, cache, text(9, seed=1))
    before = [t.clone() for t in (*cache._keys, *cache._values)]
    part = rows(slot, [1, 2, 3])
    first, second = (runtime.step([part], cache) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert cache.lengths == [9]
    for old, new in zip(before, (*cache._keys, *cache._values), strict=True):
        assert torch.equal(old, new)


def test_only_the_rows_asked_for_have_logits() -> None:
    runtime = pair("llama").runtime
    cache = runtime.new_cache(1, 64)
    slot = cache.allocate()
    assert runtime.step([rows(slot, [1, 2, 3], wanted=[])], cache).logits.shape == (0, VOCAB)
    picked = runtime.step([rows(slot, [1, 2, 3], wanted=[2, 0])], cache).logits
    every = runtime.step([rows(slot, [1, 2, 3])], cache).logits
    assert_close(picked, every[[2, 0]])


def test_what_an_earlier_request_left_in_a_slot_is_not_seen() -> None:
    """Not even where it was not a number: a freed slot may hold anything."""
    runtime = pair("llama").runtime
    cache = runtime.new_cache(2, 64)
    long, short = cache.allocate(), cache.allocate()
    output = runtime.step([rows(short, text(20, seed=1))], cache)
    broken = [torch.full_like(t, torch.nan) for t in output.new_kv.keys]
    cache.commit(
        StepOutput(logits=output.logits, new_kv=TensorKV(keys=broken, values=broken)),
        [short],
        [range(20)],
    )
    cache.release(short)
    assert cache.allocate() == short
    known = text(12, seed=2)
    cache.commit(runtime.step([rows(long, known)], cache), [long], [range(12)])
    got = runtime.step([rows(long, [5]), rows(short, [6, 7])], cache).logits
    assert_close(got[0], pair("llama").want([*known, 5])[-1])
    assert_close(got[1:], pair("llama").want([6, 7]))


def test_shapes_of_the_cache_follow_the_model() -> None:
    cache = pair("qwen3").runtime.new_cache(3, 40)
    keys, values = cache.view([0, 1])
    assert len(keys) == len(values) == 3
    assert keys[0].shape == (2, 2, 0, 16)
    assert cache.bytes == 2 * 3 * 3 * 2 * 40 * 16 * 4


def test_sizes_come_from_the_model() -> None:
    runtime = pair("llama").runtime
    assert (runtime.vocab_size, runtime.max_length) == (VOCAB, 256)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_float32_logits_near_the_reference(dtype: str) -> None:
    half = Pair(tiny_models.config("llama"), dtype=module.DTYPES[dtype])
    cache = half.runtime.new_cache(1, 64)
    tokens = text(20, seed=1)
    got = half.runtime.step([rows(cache.allocate(), tokens)], cache).logits
    assert got.dtype == torch.float32
    want = half.want(tokens)
    assert (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_the_skinny_product_is_the_linear_layer(count: int, bias: bool) -> None:
    linear = torch.nn.Linear(24, 10, bias=bias)
    x = torch.randn(1, count, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module._SkinnyLinear(linear)(x), linear(x))
    assert module._SkinnyLinear(linear)(x).shape == (1, count, 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.build(tiny_models.config("llama"), "eager").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_load_takes_the_dtype_asked_for(folder: Path, dtype: str) -> None:
    """auto is float32 on a CPU."""
    runtime = module.load(folder, name="tiny", config=RuntimeConfig(device="cpu", dtype=dtype))
    cache = runtime.new_cache(1, 8)
    want = torch.float32 if dtype == "auto" else module.DTYPES[dtype]
    assert cache._keys[0].dtype == want
    logits = runtime.step([rows(cache.allocate(), [1, 2])], cache).logits
    reference = pair("llama").want([1, 2])
    assert (logits - reference).abs().max() < 0.05 * reference.abs().max()


def test_a_missing_tensor_is_named(folder: Path) -> None:
    """transformers would fill it with random numbers and go on."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SlipstreamError, match=r"my-model.*layers\.1\.self_attn\.k_proj"):
        module.load(folder, name="my-model", config=RuntimeConfig(device="cpu"))


def test_what_counts_as_tested_is_tested() -> None:
    compared = {tiny_models.config(name).model_type for name in ARCHITECTURES}
    assert set(TESTED) <= compared


@pytest.mark.parametrize("name", ["llama", "gpt-2", "gemma 2, soft-capped, window 6"])
def test_the_comparison_at_load_passes_what_is_right_and_changes_nothing(name: str) -> None:
    runtime = pair(name).runtime
    cache = runtime.new_cache(1, 64)
    part = rows(cache.allocate(), [1, 2, 3])
    before = runtime.step([part], cache).logits
    runtime.check_against_transformers()
    assert torch.equal(runtime.step([part], cache).logits, before)


def test_the_comparison_at_load_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: attention that forgets what was committed."""
    runtime = Pair(tiny_models.config("llama"), "my-model").runtime
    past = StepContext.past
    monkeypatch.setattr(StepContext, "past", lambda *args: tuple(0 * t for t in past(*args)))
    with pytest.raises(SlipstreamError, match=r"my-model \(llama\).*differ"):
        runtime.check_against_transformers()


def test_an_untested_architecture_is_compared_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TESTED", [])
    tiny_models.build(tiny_models.config("gpt-2"), "eager").save_pretrained(tmp_path)
    module.load(tmp_path, name="my-model", config=RuntimeConfig(device="cpu"))
    past = StepContext.past
    monkeypatch.setattr(StepContext, "past", lambda *args: tuple(0 * t for t in past(*args)))
    with pytest.raises(SlipstreamError, match="my-model"):
        module.load(tmp_path, name="my-model", config=RuntimeConfig(device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(SlipstreamError, match=f"{device}.*--device cpu"):
        module.find_device(device)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="my-model"):
        module.load(tmp_path, name="my-model", config=RuntimeConfig(device="cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(SlipstreamError, match=r"my-model.*nonsense"):
        module.load(tmp_path, name="my-model", config=RuntimeConfig(device="cpu"))


def test_broken_weights_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SlipstreamError, match="my-model"):
        module.load(folder, name="my-model", config=RuntimeConfig(device="cpu"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_features_are_transformers_hidden_states(name: str) -> None:
    """The input of each layer; what the last layer gives has no norm yet, and is not among them."""
    runtime, tokens = pair(name).runtime, text(9, seed=4)
    with torch.inference_mode():
        states = pair(name).reference(torch.tensor([tokens]), output_hidden_states=True)
    cache = runtime.new_cache(1, 16)
    output = runtime.step([rows(cache.allocate(), tokens)], cache, [2, 0, 1, 3])
    assert output.features is not None
    assert output.features.shape[:2] == (9, 4)
    for at, layer in ((0, 2), (1, 0), (2, 1)):
        assert_close(output.features[:, at], states.hidden_states[layer][0])
