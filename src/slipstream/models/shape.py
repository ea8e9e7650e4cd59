"""What a model's configuration alone tells, before any weight is read."""

from __future__ import annotations

from typing import Any

from slipstream.errors import SlipstreamError

_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "attention")


def check_config(config: Any, name: str) -> None:
    """Raise if the architecture can't run as a functional step; reads the configuration only."""
    if getattr(config, "is_encoder_decoder", False):
        raise SlipstreamError(
            f"{name} is an encoder-decoder model ({config.model_type}): choose a decoder-only one"
        )
    kinds = list(
        getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    )
    foreign = [f"{i} ({kind})" for i, kind in enumerate(kinds) if kind not in _SOFTMAX_LAYERS]
    if foreign:
        shown = ", ".join(foreign[:4]) + (", …" if len(foreign) > 4 else "")
        raise SlipstreamError(
            f"{name} ({config.model_type}) has layers that are neither full nor sliding-window "
            f"attention: {shown}; their state can't be branched yet; choose a model without them"
        )


def context_length(config: Any) -> int:
    """Tokens of context in which a row's rotation depends on its own position alone.

    transformers chooses the frequencies of "dynamic" and "longrope" from the longest position of a
    whole forward pass: beyond the original context a draft would change the rows before it. Such
    models run up to there.
    """
    longest: int = getattr(config, "max_position_embeddings", None) or 2**20
    rope = getattr(config, "rope_parameters", None) or {}
    for values in [rope] if "rope_type" in rope else rope.values():
        if isinstance(values, dict) and values.get("rope_type") in ("dynamic", "longrope"):
            original = values.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, original or longest)
    return longest
