"""Quantised weights on torch: the product of what was rounded, and not far from the model's own."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import VOCAB
from torch import Tensor, nn

from slipstream.config import RuntimeConfig
from slipstream.errors import SlipstreamError
from slipstream.runtimes import quantize
from slipstream.runtimes import torch as module
from slipstream.runtimes.plain import plain_logits
from slipstream.runtimes.torch import TorchRuntime

pytest.importorskip("torchao")

TEXT = [i * 37 % VOCAB for i in range(1, 25)]
MODELS = ["llama", "llama, biases and tied embeddings", "qwen3", "gemma 2, soft-capped, window 6"]
# Of the norm of the logits, which these large random weights make sensitive to any rounding.
FAR = {"int8": 0.1, "int4": 0.7, "fp8": 0.4}


def save(name: str, folder: Path) -> Any:
    """The model, in float32."""
    model = tiny_models.build(tiny_models.config(name), "eager")
    model.save_pretrained(folder)
    return model


def load(folder: Path, quantization: str, **options: Any) -> TorchRuntime:
    options = {"device": "cpu", "quantization": quantization, **options}
    return module.load(folder, name="my-model", config=RuntimeConfig(**options))


def own_logits(model: Any) -> Tensor:
    """[T, V] by transformers' own forward pass."""
    with torch.inference_mode():
        return model(torch.tensor([TEXT])).logits[0].float()


def quantised(runtime: TorchRuntime) -> dict[str, nn.Linear]:
    """The layers whose weights aren't plain numbers any more."""
    layers = runtime._model.model.named_modules()
    return {
        name: layer
        for name, layer in layers
        if isinstance(layer, nn.Linear) and type(layer.weight) is not nn.Parameter
    }


def distance(got: Tensor, want: Tensor) -> float:
    """Of the norm; logits of another model are at about 1.4."""
    assert want.std() > 0.05  # else nothing is shown
    return float((got.cpu() - want).norm() / want.norm())


def logits(runtime: TorchRuntime) -> list[Tensor]:
    """[T, V] from steps of one row, of several, and of more than the transposed product takes."""
    return [plain_logits(runtime, TEXT, 1, chunk) for chunk in (1, 5, len(TEXT))]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_rounded_weights(name: str, kind: str, tmp_path: Path) -> None:
    reference = save(name, tmp_path)
    own, runtime = own_logits(reference), load(tmp_path, kind)
    layers = quantised(runtime)
    assert len(layers) == 3 * 7  # of three blocks all; embedding and head stay
    for place, layer in layers.items():
        reference.get_submodule(place).weight.data = layer.weight.dequantize()
    rounded = own_logits(reference)
    for got in logits(runtime):
        assert distance(got, rounded) < 1e-5
        assert 1e-3 < distance(got, own) < FAR[kind]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_in_half_precision_too(kind: str, dtype: str, tmp_path: Path) -> None:
    own = own_logits(save("llama", tmp_path))
    runtime = load(tmp_path, kind, dtype=dtype)
    assert runtime.dtype == module.DTYPES[dtype]
    assert all(distance(got, own) < FAR[kind] for got in logits(runtime))


def test_int8_in_float16_does_not_overflow_where_the_model_does_not(tmp_path: Path) -> None:
    """Planted: an activation of a few thousand, as real models have."""
    save("llama", tmp_path)
    runtime = load(tmp_path, "int8", dtype="float16")
    layer = quantised(runtime)["model.layers.0.mlp.down_proj"]
    with torch.inference_mode():
        assert layer(torch.full((1, 96), 3000.0, dtype=torch.float16)).isfinite().all()


def test_a_layer_that_is_no_multiple_of_a_group_stays(tmp_path: Path) -> None:
    config = tiny_models.config("llama")
    config.intermediate_size = 100
    tiny_models.build(config, "eager").save_pretrained(tmp_path)
    layers = quantised(load(tmp_path, "int4"))
    assert len(layers) == 3 * 6
    assert not any("down_proj" in name for name in layers)


def test_an_untested_architecture_is_compared_with_its_rounded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TESTED", [])
    save("llama", tmp_path)
    assert quantised(load(tmp_path, "int4"))


@pytest.mark.parametrize("name", ["gpt-2", "mixtral"])
def test_a_model_of_other_layers_is_refused_before_its_weights_are_read(
    name: str, tmp_path: Path
) -> None:
    tiny_models.config(name).save_pretrained(tmp_path)
    with pytest.raises(SlipstreamError, match=r"my-model \(\w+\): --quantization reaches only \d"):
        load(tmp_path, "int8")


def test_a_model_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    config = tiny_models.config("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(SlipstreamError, match="my-model is quantised already"):
        load(tmp_path, "int8")


def test_fp8_on_the_cpu_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"fp8 needs a GPU.*8\.9.*int8"):
        load(tmp_path, "fp8")


@pytest.mark.parametrize("missing", ["torchao", "torchao.quantization"])
def test_without_torchao_its_package_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SlipstreamError, match=r"pip install 'slipstream\[quantization\]'"):
        load(tmp_path, "int8")


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "complaint"),
    [
        ("fp8", (8, 6), "auto", r"fp8 needs.*8\.9.*has 8\.6: choose int8"),
        ("int4", (7, 5), "auto", r"int4 needs.*8\.0.*has 7\.5: choose int8"),
        ("fp8", (9, 0), "float16", "fp8 computes in bfloat16.*float16.*--dtype bfloat16"),
        ("int4", (9, 0), "float32", "int4 computes in bfloat16.*float32.*--dtype bfloat16"),
        ("int4", (8, 0), "auto", None),
        ("fp8", (8, 9), "bfloat16", None),
        ("int8", (7, 0), "float32", None),
    ],
)
def test_what_a_gpu_can_do(
    kind: str,
    capability: tuple[int, int],
    dtype: str,
    complaint: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = RuntimeConfig(quantization=kind, dtype=dtype)
    with pytest.raises(SlipstreamError, match=complaint) if complaint else nullcontext():
        quantize.check_options(config, torch.device("cuda:0"))


@pytest.mark.parametrize(("kv", "dtype"), [("bfloat16", "auto"), ("float32", "bfloat16")])
def test_kv_in_another_dtype_is_refused(kv: str, dtype: str, tmp_path: Path) -> None:
    tiny_models.config("llama").save_pretrained(tmp_path)
    with pytest.raises(SlipstreamError, match=f"--kv-cache-dtype {kv}.*--runtime native"):
        load(tmp_path, "none", kv_cache_dtype=kv, dtype=dtype)


@pytest.mark.parametrize(("kv", "dtype"), [("float32", "auto"), ("bfloat16", "bfloat16")])
def test_kv_in_the_dtype_of_the_arithmetic_is_what_there_is(
    kv: str, dtype: str, tmp_path: Path
) -> None:
    save("llama", tmp_path)
    runtime = load(tmp_path, "none", kv_cache_dtype=kv, dtype=dtype)
    assert runtime.new_cache(1, 8)._keys[0].dtype == module.DTYPES[kv]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", FAR)
def test_on_the_gpu(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    own = own_logits(save(name, tmp_path))
    runtime = load(tmp_path, kind, device="cuda")
    assert len(quantised(runtime)) == 3 * 7
    assert all(distance(got, own) < FAR[kind] for got in logits(runtime))
