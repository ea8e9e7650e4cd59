"""The config.json of a Llama as transformers reads it, without importing transformers.

Its configuration classes bring half of torch's distributed code in: that takes longer than reading
the default model.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
_DEFAULTS = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
_NOT_PLAIN = ("auto_map", "partial_rotary_factor", "quantization_config", "rope_scaling")


def read(folder: Path) -> SimpleNamespace | None:
    """What is in the file and the defaults of what is not; None where only transformers knows."""
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if given.get("model_type") != "llama" or any(given.get(name) for name in _NOT_PLAIN):
        return None
    shape = SimpleNamespace(**(_DEFAULTS | given))
    sizes = [given.get(name) for name in _SIZES]
    if not all(type(size) is int and size > 0 for size in sizes) or "rms_norm_eps" not in given:
        return None
    if shape.hidden_size % shape.num_attention_heads or "hidden_act" not in given:
        return None
    shape.head_dim = given.get("head_dim") or shape.hidden_size // shape.num_attention_heads
    shape.num_key_value_heads = given.get("num_key_value_heads") or shape.num_attention_heads
    shape.rope_parameters = given.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": given.get("rope_theta"),
    }
    rope = shape.rope_parameters
    plain = rope.keys() == {"rope_type", "rope_theta"} and rope["rope_type"] == "default"
    return shape if plain and rope["rope_theta"] else None
