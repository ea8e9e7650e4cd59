"""The target's final norm: between the last layer, where features end, and the LM head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from slipstream.errors import SlipstreamError
from slipstream.models.sources import resolve
from slipstream.models.weights import Weights
from slipstream.runtimes import native_layout as layout
from slipstream.runtimes.native import read_config


def read_last_norm(model: str) -> Callable[[Tensor], Tensor]:
    """[..., h] of the last layer → [..., h] that the LM head sees, in float32.

    Raises SlipstreamError for an architecture whose norm isn't known.
    """
    folder = resolve(model)
    config = read_config(folder, model)
    if config.model_type not in layout.SUPPORTED:
        known = ", ".join(layout.SUPPORTED)
        raise SlipstreamError(
            f"{model}: the final norm of {config.model_type} models isn't known; known are {known}"
        )
    words, tensors = layout.config_words(config), Weights(folder, model)
    vectors = {
        ours: layout.prepare(config, theirs, tensors[theirs]).float()
        for ours, (theirs,) in layout.outer_names(config, tensors).vectors.items()
    }
    weight, bias, eps = vectors["norm"], vectors.get("norm_bias"), words["eps"]

    def normed(last: Tensor) -> Tensor:
        last, scale = last.float(), weight.to(last.device)
        if words["layer_norm"]:
            shift = None if bias is None else bias.to(last.device)
            return functional.layer_norm(last, scale.shape, scale, shift, eps)
        return functional.rms_norm(last, scale.shape, scale, eps)

    return normed
