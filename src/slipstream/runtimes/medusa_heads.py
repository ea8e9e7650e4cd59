"""Medusa heads at work: a few rows a step, every weight read once.

``models/medusa_module.py`` computes the same, and is what this is held against.

Shapes: K heads · B rows · h hidden · d draft vocabulary · N, M of one product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.models.medusa import MedusaHeads

_SKINNY_ROWS = 32  # as in runtimes/torch.py
_GROUP = 32  # torch's int8 product reads that many numbers of a row at once, however long the row
Product = Callable[[Tensor], Tensor]  # [B, M] → [B, N]
Guesses = tuple[list[list[int]], list[list[float]]]
"""Tokens (target ids) of each head, the most probable first, and their log-probabilities."""


class PackedHeads:
    """vocab_size: draft tokens with ids from there on are never guessed. int8: of the weights, by
    rows, with bfloat16 activations; on CPUs only, and where h is a multiple of 32."""

    def __init__(
        self,
        heads: MedusaHeads,
        vocab_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        int8: bool = False,
    ) -> None:
        shape, tensors = heads.shape, heads.tensors
        self._ids = heads.target_ids[heads.target_ids < vocab_size].to(device)
        self._heads, self._dtype = shape.heads, dtype
        packed = int8 and device.type == "cpu" and shape.hidden % _GROUP == 0

        def product(names: list[str], rows: int) -> Product:
            weight = torch.cat([tensors[name][:rows] for name in names])
            return _int8_product(weight) if packed else _product(weight.to(device, dtype))

        def bias(layer: int) -> Tensor:
            return torch.stack([tensors[f"{i}.{layer}.linear.bias"] for i in each]).to(
                device, dtype
            )

        each, h, d = range(shape.heads), shape.hidden, len(self._ids)
        self._biases = [bias(layer) for layer in range(shape.layers)]
        names = [[f"{i}.{layer}.linear.weight" for i in each] for layer in range(shape.layers)]
        self._first = [product(layer, h) for layer in names[:1]]  # one input: one product for all
        self._further = [[product([name], h) for name in layer] for layer in names[1:]]
        outputs = (
            ["lm_head.weight"] if shape.shared else [f"{i}.{shape.layers}.weight" for i in each]
        )
        self._outputs = [product([name], d) for name in outputs]

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, h] that the target's LM head sees → float32 [K, B, d]."""
        states = hidden.to(self._dtype).expand(self._heads, *hidden.shape)
        for layer, bias in enumerate(self._biases):
            if layer == 0:
                inner = self._first[0](states[0]).unflatten(-1, bias.shape).transpose(0, 1)
            else:
                inner = _each(self._further[layer - 1], states)
            states = states + functional.silu(inner + bias[:, None])
        if len(self._outputs) > 1:
            return _each(self._outputs, states).float()
        return self._outputs[0](states.flatten(0, 1)).unflatten(0, states.shape[:2]).float()

    def guesses(self, hidden: Tensor, count: int) -> list[Guesses]:
        """The ``count`` most probable tokens of each head, for each row of hidden: [B, h]."""
        logits = self.logits(hidden)
        best = logits.topk(min(count, logits.shape[-1]))
        scores = best.values - logits.logsumexp(-1, keepdim=True)
        tokens = self._ids[best.indices].transpose(0, 1).tolist()
        return list(zip(tokens, scores.transpose(0, 1).tolist(), strict=True))


def _each(products: list[Product], states: Tensor) -> Tensor:
    pairs = zip(products, states, strict=True)
    return torch.stack([product(rows) for product, rows in pairs])


def _product(weight: Tensor) -> Product:
    """weight: [N, M]. On CPUs the few rows of a step go in as (W·xᵀ)ᵀ, a single one as two."""

    def linear(rows: Tensor) -> Tensor:
        return functional.linear(rows, weight)

    def transposed(rows: Tensor) -> Tensor:
        if len(rows) > _SKINNY_ROWS:
            return linear(rows)
        both = rows.repeat(2, 1) if len(rows) == 1 else rows
        return torch.mm(weight, both.T).T[: len(rows)]

    return transposed if weight.device.type == "cpu" and weight.dtype == torch.float32 else linear


def _int8_product(weight: Tensor) -> Product:
    weight = weight.float()
    scales = weight.abs().amax(1).clamp_min(1e-12) / 127
    packed = (weight / scales[:, None]).round().to(torch.int8)
    narrow = scales.bfloat16()

    def product(rows: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(rows.bfloat16().contiguous(), packed, narrow).float()

    return product
