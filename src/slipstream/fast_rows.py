"""Loops over rows of a vocabulary in C++ (``native/sampling.cpp``): too many small steps for
PyTorch on a CPU. Each does what its reference in ``sampling`` or ``noise`` does, to float32's
rounding; ``serves`` says when to call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.extension import native as _native

if TYPE_CHECKING:
    from slipstream.config import SamplingParams


def serves(rows: Tensor) -> bool:
    """Whether these rows can be handed over: fp32 on a CPU, each in one piece, and the extension
    is there."""
    fits = rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.stride(-1) == 1
    return _native is not None and fits


def argmax(logits: Tensor) -> list[int]:
    """[n, V] → n ids, the first of the greatest."""
    return list(_native.argmax(logits.numpy()))


def log_softmax(logits: Tensor) -> Tensor:
    """[n, V] → [n, V]."""
    return torch.from_numpy(_native.log_softmax(logits.numpy()))


def target_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """[n, V] logits after bias and penalties → [n, V] probabilities; ``sampling.truncate``."""
    probs = _native.probabilities(
        logits.numpy(), params.temperature, params.top_k, params.top_p, params.min_p
    )
    return torch.from_numpy(probs)


def inverse_cdf(probs: Tensor, uniform: float) -> int:
    """[V] → id; ``noise.inverse_cdf``."""
    return int(_native.inverse_cdf(probs.numpy(), uniform))
