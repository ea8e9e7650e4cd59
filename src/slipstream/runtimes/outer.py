"""What stands outside of a target's layers, read from its folder for heads that need it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from slipstream.errors import SlipstreamError
from slipstream.models.sources import resolve
from slipstream.models.weights import Weights
from slipstream.runtimes import native_layout as layout
from slipstream.runtimes.native import read_config

PLAIN = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Architectures without scaled or capped logits and embeddings."""


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


def read_matrices(model: str) -> tuple[Tensor, Tensor]:
    """(embedding, LM head), [V, h] each, in float32; the same tensor where they are tied.

    Raises SlipstreamError for an architecture whose logits or embeddings aren't plain products.
    """
    folder = resolve(model)
    config = read_config(folder, model)
    if config.model_type not in PLAIN:
        raise SlipstreamError(
            f"{model}: heads that share the LM head of {config.model_type} models aren't known; "
            f"known are those of {', '.join(PLAIN)}"
        )
    tensors = Weights(folder, model)
    matrices = layout.outer_names(config, tensors).matrices
    embedding = tensors[matrices["embedding"][0]].float()
    head = matrices.get("head")
    return embedding, tensors[head[0]].float() if head else embedding
