"""Weights of the torch runtime in eight or four bits, through torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slipstream.config import RuntimeConfig
from slipstream.errors import SlipstreamError

_GROUP = 32  # weights that share a scale
_CAPABILITY = {"int4": (8, 0), "fp8": (8, 9)}  # the least whose kernels there are on GPUs


def check_options(config: RuntimeConfig, device: torch.device) -> None:
    """Raise if this quantization can't run on this device, or without torchao."""
    kind = config.quantization
    if kind == "none":
        return
    if kind == "fp8" and device.type != "cuda":
        raise SlipstreamError(
            "--quantization fp8 needs a GPU of compute capability 8.9: choose int8 or int4"
        )
    if device.type == "cuda" and kind in _CAPABILITY:
        least, found = _CAPABILITY[kind], torch.cuda.get_device_capability(device)
        if found < least:
            raise SlipstreamError(
                f"--quantization {kind} needs a GPU of compute capability {least[0]}.{least[1]}, "
                f"{device} has {found[0]}.{found[1]}: choose int8"
            )
        if config.dtype not in ("auto", "bfloat16"):
            raise SlipstreamError(
                f"--quantization {kind} computes in bfloat16 on GPUs, not in {config.dtype}: "
                "choose int8 or --dtype bfloat16"
            )
    try:
        _recipe(kind, torch.bfloat16, device)
    except ImportError as error:
        raise SlipstreamError(
            f"--quantization {kind} on torch needs torchao: pip install 'slipstream[quantization]' "
            f"({error})"
        ) from error


def check_model(model: Any, name: str) -> None:
    """Raise if most of a model's weights would stay as they are; a model on meta will do."""
    if getattr(model.config, "quantization_config", None):
        raise SlipstreamError(f"{name} is quantised already: leave --quantization out")
    outer = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    total = sum(w.numel() for w in model.parameters() if id(w) not in outer)
    taken = sum(layer.weight.numel() for layer in _layers(model))
    if taken < total / 2:
        raise SlipstreamError(
            f"{name} ({model.config.model_type}): --quantization reaches only "
            f"{taken / total:.0%} of its weights on torch: leave it out"
        )


def quantize(model: Any, kind: str, device: torch.device) -> None:
    """Replace the weights of the linear layers, each moved to the device first, then the rest."""
    from torchao.quantization import quantize_

    chosen = set(_layers(model))
    recipe = _recipe(kind, model.dtype, device)
    quantize_(model, recipe, filter_fn=lambda module, _: module in chosen, device=device)


def _layers(model: Any) -> list[nn.Linear]:
    """Embedding and head stay: they are the last to lose precision without a loss of quality."""
    head = model.get_output_embeddings()
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module is not head and module.in_features % _GROUP == 0
    ]


def _recipe(kind: str, dtype: torch.dtype, device: torch.device) -> Any:
    """torchao's configuration; they all run on kernels that torch itself brings."""
    import torchao.quantization as ao

    rows, groups = ao.PerRow(), ao.PerGroup(_GROUP)
    if kind == "int8":  # by rows the scale comes after the product: that overflows in float16
        return ao.Int8WeightOnlyConfig(granularity=groups if dtype == torch.float16 else rows)
    if kind == "fp8":  # activations a scale a row too, so that no row depends on its neighbours
        exact = ao.Float8MMConfig(use_fast_accum=False)
        return ao.Float8DynamicActivationFloat8WeightConfig(granularity=rows, mm_config=exact)
    if device.type == "cuda":
        return ao.Int4WeightOnlyConfig(group_size=_GROUP, int4_packing_format="tile_packed_to_4d")
    int4, both = torch.int4, ao.MappingType.ASYMMETRIC  # type: ignore[attr-defined]
    # torch has no kernel for it on CPUs: kept a byte each and widened every time, correct but slow
    return ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=groups, mapping_type=both)
