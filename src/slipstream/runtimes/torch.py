"""The functional step on PyTorch, eager: GPUs, and the reference on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream import tree
from slipstream.cache import Cache, LayerShape, TensorKV, TorchCache
from slipstream.config import RuntimeConfig
from slipstream.errors import SlipstreamError
from slipstream.models.adapter import (
    ATTENTION,
    TESTED,
    FunctionalModel,
    StepContext,
    check_model,
)
from slipstream.models.shape import check_config, context_length
from slipstream.runtimes import quantize
from slipstream.runtimes.plain import plain_logits
from slipstream.types import StepOutput, StepRows, chain_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SKINNY_ROWS = 32  # up to here W·xᵀ beats x·Wᵀ on CPUs (docs/decisions.md)


class TorchRuntime:
    """A transformers model behind the ``Runtime`` protocol."""

    exact = False  # products of one row and of several add up in different orders

    def __init__(self, model: Any, name: str) -> None:
        self.name = name
        self._model = FunctionalModel(model, name)
        config = model.config.get_text_config()
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.max_length: int = context_length(config)
        self.hidden_size: int = config.hidden_size
        self.layers: int = config.num_hidden_layers
        if self._model.device.type == "cpu":
            _transpose_products(model)
        self._layers = self._probe()

    @property
    def embedding(self) -> Tensor:
        """[V, hidden], of the model itself."""
        weight: Tensor = self._model.model.get_input_embeddings().weight
        return weight

    def new_cache(self, slots: int, max_length: int) -> TorchCache:
        return TorchCache(
            self._layers,
            slots=slots,
            max_length=max_length,
            dtype=self._model.dtype,
            device=self._model.device,
        )

    def step(self, batch: Sequence[StepRows], cache: Cache, taps: Sequence[int] = ()) -> StepOutput:
        assert isinstance(cache, TorchCache)
        slots = [rows.slot for rows in batch]
        keys, values = cache.view(slots)
        return self._run(batch, [cache.lengths[slot] for slot in slots], keys, values, taps)

    def check_against_transformers(self) -> None:
        """Compare a few tokens with the model's own attention; raise if the logits differ."""
        model, tokens = self._model.model, [i % self.vocab_size for i in range(1, 13)]
        logits = plain_logits(self, tokens, 1, chunk=7)  # the second of two steps has a past
        window = getattr(model.config.get_text_config(), "sliding_window", None)
        if window is not None and window not in self._model.windows:
            raise SlipstreamError(
                f"{self.name} ({model.config.model_type}): its sliding window of {window} doesn't "
                "reach attention: this architecture isn't supported"
            )
        model.set_attn_implementation("eager")
        try:
            expected = self._model.own_logits(self._tensor([tokens]))
        finally:
            model.set_attn_implementation(ATTENTION)
        gap = float((logits - expected).abs().max())
        allowed = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        if not gap <= allowed * max(1.0, float(expected.abs().max())):
            raise SlipstreamError(
                f"{self.name} ({model.config.model_type}): logits differ from transformers' own by "
                f"{gap:.2g}: this architecture isn't supported"
            )

    def _run(
        self,
        batch: Sequence[StepRows],
        lengths: Sequence[int],
        keys: Sequence[Tensor] | None,
        values: Sequence[Tensor] | None,
        taps: Sequence[int] = (),
    ) -> StepOutput:
        width = max(len(rows.tokens) for rows in batch)
        tokens = np.zeros((len(batch), width), dtype=np.int64)
        positions = np.zeros((len(batch), width), dtype=np.int64)
        mask = np.zeros((len(batch), width, width), dtype=bool)
        mask[:] = np.eye(width, dtype=bool)  # a padded row sees itself: a softmax needs something
        for b, rows in enumerate(batch):
            count = len(rows.tokens)
            tokens[b, :count] = rows.tokens
            positions[b, :count] = lengths[b] + tree.depths(rows.parents)
            mask[b, :count, :count] = tree.ancestors(rows.parents)
        wanted = [(b, row) for b, rows in enumerate(batch) for row in rows.logit_rows]
        context = StepContext(
            past_keys=keys,
            past_values=values,
            lengths=self._tensor(lengths),
            positions=self._tensor(positions),
            tree=self._tensor(mask),
        )
        picked = self._tensor(np.array(wanted, dtype=np.int64).reshape(-1, 2)).T
        logits, tapped = self._model.forward(
            self._tensor(tokens), context, (picked[0], picked[1]), taps
        )
        features = None
        if tapped is not None:
            features = torch.cat([tapped[b, : len(rows.tokens)] for b, rows in enumerate(batch)])
        order = range(self.layers)
        return StepOutput(
            logits=logits,
            new_kv=TensorKV(
                keys=[context.new_keys[i] for i in order],
                values=[context.new_values[i] for i in order],
            ),
            features=features,
        )

    def _tensor(self, data: Any) -> Tensor:
        return torch.as_tensor(data, device=self._model.device)

    def _probe(self) -> list[LayerShape]:
        """Learn the KV shapes from a forward pass of one token over nothing committed."""
        try:
            kv = self._run([chain_rows(0, [0])], [0], None, None).new_kv
        except KeyError as missing:
            raise SlipstreamError(
                f"{self.name}: layer {missing} never called attention: this architecture isn't "
                "supported"
            ) from None
        return [
            LayerShape(kv_heads=k.shape[1], key_dim=k.shape[3], value_dim=v.shape[3])
            for k, v in zip(kv.keys, kv.values, strict=True)
        ]


def load(folder: Path, *, name: str, config: RuntimeConfig) -> TorchRuntime:
    """Load a transformers checkpoint folder."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    device = find_device(config.device)
    quantize.check_options(config, device)
    dtype = _dtype(config, device)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        shape = AutoConfig.from_pretrained(folder)
        check_config(shape, name)
        _check_kv(config, shape.dtype if dtype == "auto" else dtype)
        with torch.device("meta"):  # the class tells, before any weight is read
            empty = AutoModelForCausalLM.from_config(shape)
        check_model(empty, name)
        if config.quantization != "none":
            quantize.check_model(empty, name)
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
        if config.quantization != "none":
            quantize.quantize(model, config.quantization, device)
        model = model.to(device)
    except SlipstreamError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SlipstreamError(f"{name}: transformers can't load {folder}: {reason}") from error
    absent = sorted(found["missing_keys"]) + sorted(str(k) for k in found["mismatched_keys"])
    if absent:  # transformers would fill them with random numbers
        raise SlipstreamError(
            f"{name}: {folder} lacks {len(absent)} of the model's tensors, {absent[0]} first: "
            "fetch the checkpoint again"
        )
    runtime = TorchRuntime(model, name)
    if shape.get_text_config().model_type not in TESTED:
        runtime.check_against_transformers()
    return runtime


def find_device(device: str) -> torch.device:
    """ "cpu", "cuda", "cuda:1" …, or "auto": the first GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise SlipstreamError(f"no {device} here, torch sees {count} GPUs: use --device cpu")
    return place


def _dtype(config: RuntimeConfig, device: torch.device) -> Any:
    """What to load the weights in; "auto" for the checkpoint's own."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if config.quantization in ("int4", "fp8") else "auto"


def _check_kv(config: RuntimeConfig, dtype: torch.dtype | None) -> None:
    """Raise if KV is to be kept in another dtype than that of the arithmetic."""
    wanted = config.kv_cache_dtype
    if wanted != "auto" and DTYPES[wanted] != dtype:
        raise SlipstreamError(
            f"--kv-cache-dtype {wanted}: on torch KV has the dtype of the arithmetic "
            f"({str(dtype).removeprefix('torch.')}): choose auto, or --runtime native on CPUs"
        )


def _transpose_products(model: nn.Module) -> None:
    """On CPUs compute the few rows of a step as (W·xᵀ)ᵀ: x·Wᵀ would cost a step a row."""
    for module in model.modules():
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            continue  # a quantised weight has a type, and a product, of its own
        if module.weight.dtype == torch.float32:
            module.forward = _SkinnyLinear(module)  # type: ignore[assignment,method-assign]


class _SkinnyLinear:
    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] → [..., N]."""
        weight, bias = self._linear.weight, self._linear.bias
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > _SKINNY_ROWS:
            return nn.functional.linear(x, weight, bias)
        if len(rows) == 1:  # two equal columns, copied: a product with one is the slower one
            product = torch.mm(weight, rows.repeat(2, 1).T)[:, :1].T
        else:
            product = torch.mm(weight, rows.T).T
        product = product if bias is None else product + bias
        return product.reshape(*x.shape[:-1], weight.shape[0])
