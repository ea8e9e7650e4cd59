"""A transformers model in the words of the native step: its configuration and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
SUPPORTED = [
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
]
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def config_of(config: Any) -> dict[str, Any]:
    """A transformers configuration in the words of the native step."""
    kind = config.model_type
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    gemma = kind.startswith("gemma")
    query_scale = dim**-0.5
    if gemma:
        query_scale = config.query_pre_attn_scalar**-0.5
    elif kind == "granite":
        query_scale = config.attention_multiplier
    act = getattr(config, "hidden_activation", None) or config.hidden_act
    return {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "dim": dim,
        "inner": config.intermediate_size,
        "vocab": config.vocab_size,
        "eps": getattr(config, "rms_norm_eps", None) or config.layer_norm_eps,
        "layer_norm": kind == "gpt_neox",
        "gated": kind != "gpt_neox",
        "parallel_residual": kind == "gpt_neox" and config.use_parallel_residual,
        "activation": _ACTIVATIONS[act],
        "query_scale": query_scale,
        "attention_softcap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "logit_softcap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "embedding_scale": config.hidden_size**0.5
        if gemma
        else getattr(config, "embedding_multiplier", 1.0),
        "residual_scale": getattr(config, "residual_multiplier", 1.0),
        "logit_scale": 1 / getattr(config, "logits_scaling", 1.0) if kind == "granite" else 1.0,
    }


def rotary_of(config: Any) -> tuple[list[tuple[np.ndarray, float]], dict[str, int]]:
    """Tables (inverse frequencies, scale of sine and cosine), and the table of each layer type."""
    parameters = config.rope_parameters
    per_type = parameters if "rope_type" not in parameters else {"": parameters}
    tables, index = [], {}
    for layer_type, values in per_type.items():
        index[layer_type] = len(tables)
        tables.append(_rotary_table(config, layer_type or None, values))
    return tables, index


def _rotary_table(
    config: Any, layer_type: str | None, values: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = values.get("rope_type", "default")
    if kind != "default":
        extra = {"layer_type": layer_type} if layer_type else {}
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **extra)
        return frequencies.float().numpy(), float(scale)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(dim * values.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
    return (1.0 / values["rope_theta"] ** exponents).numpy(), 1.0


def outer_of(config: Any, tensors: Tensors) -> dict[str, Tensor]:
    """Embedding, last norm and head."""
    neox = config.model_type == "gpt_neox"
    embedding = tensors["gpt_neox.embed_in.weight" if neox else "model.embed_tokens.weight"]
    norm = "gpt_neox.final_layer_norm" if neox else "model.norm"
    found = {
        "embedding": embedding,
        "head": tensors.get("lm_head.weight", tensors.get("embed_out.weight", embedding)),
        "norm": tensors[norm + ".weight"].float() + _norm_offset(config),
    }
    if norm + ".bias" in tensors:
        found["norm_bias"] = tensors[norm + ".bias"]
    return found


def layer_of(config: Any, tensors: Tensors, layer: int) -> dict[str, Tensor]:
    """The tensors of a layer under the native step's names."""
    make = _neox_layer if config.model_type == "gpt_neox" else _llama_layer
    return make(config, tensors, layer)


def _norm_offset(config: Any) -> float:
    """Gemma stores its norm weights less one."""
    return 1.0 if config.model_type.startswith("gemma") else 0.0


def _norm_names(kind: str) -> dict[str, str]:
    if kind.startswith("gemma"):
        return {
            "before_attention": "input_layernorm",
            "after_attention": "post_attention_layernorm",
            "before_mlp": "pre_feedforward_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
    if kind == "olmo2":
        return {
            "after_attention": "post_attention_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
    return {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}


def _llama_layer(config: Any, tensors: Tensors, layer: int) -> dict[str, Tensor]:
    at = f"model.layers.{layer}."
    norms = _norm_names(config.model_type) | {
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
    }
    found = {
        ours: tensors[at + theirs + ".weight"].float() + _norm_offset(config)
        for ours, theirs in norms.items()
        if at + theirs + ".weight" in tensors
    }
    parts = {  # fused where the checkpoint has them so, else joined here
        "qkv": [["self_attn.qkv_proj"], [f"self_attn.{p}_proj" for p in "qkv"]],
        "up": [["mlp.gate_up_proj"], ["mlp.gate_proj", "mlp.up_proj"]],
        "out": [["self_attn.o_proj"]],
        "down": [["mlp.down_proj"]],
    }
    for suffix, ours in ((".weight", ""), (".bias", "_bias")):
        for name, choices in parts.items():
            for choice in choices:
                keys = [at + part + suffix for part in choice]
                if all(key in tensors for key in keys):
                    found[name + ours] = torch.cat([tensors[key] for key in keys])
    return found


def _neox_layer(config: Any, tensors: Tensors, layer: int) -> dict[str, Tensor]:
    at, heads = f"gpt_neox.layers.{layer}.", config.num_attention_heads
    dim = config.hidden_size // heads
    found = {}
    for suffix, ours in ((".weight", ""), (".bias", "_bias")):
        qkv = tensors.get(at + "attention.query_key_value" + suffix)
        if qkv is not None:  # stored head by head; wanted as all queries, all keys, all values
            by_head = qkv.view(heads, 3, dim, *qkv.shape[1:])
            found["qkv" + ours] = by_head.transpose(0, 1).reshape(qkv.shape)
        for name, theirs in (
            ("before_attention", "input_layernorm"),
            ("before_mlp", "post_attention_layernorm"),
            ("out", "attention.dense"),
            ("up", "mlp.dense_h_to_4h"),
            ("down", "mlp.dense_4h_to_h"),
        ):
            if at + theirs + suffix in tensors:
                found[name + ours] = tensors[at + theirs + suffix]
    return found
