"""A transformers model in the words of the native step: its configuration, and the names of its
tensors. Nothing is loaded here."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUPPORTED = (
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
)
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """The native step's name of each matrix and vector → the checkpoint's tensors that make it up,
    one below the other."""

    matrices: dict[str, list[str]] = field(default_factory=dict)
    vectors: dict[str, list[str]] = field(default_factory=dict)


def unsupported(config: Any) -> str | None:
    """Why the native step can't compute this model; None if it can."""
    if config.model_type not in SUPPORTED:
        return f"the native step doesn't know {config.model_type} models"
    if getattr(config, "quantization_config", None):
        return "the native step doesn't read transformers' quantised checkpoints"
    if _activation(config) not in _ACTIVATIONS:
        return f"the native step doesn't know the activation {_activation(config)}"
    if config.model_type == "gemma3_text" and getattr(config, "use_bidirectional_attention", False):
        return "the native step knows causal attention only"
    return None


def config_words(config: Any) -> dict[str, Any]:
    """A transformers configuration in the words of the native step."""
    kind = config.model_type
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    gemma = kind.startswith("gemma")
    query_scale = dim**-0.5
    if gemma:
        query_scale = config.query_pre_attn_scalar**-0.5
    elif kind == "granite":
        query_scale = config.attention_multiplier
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
        "activation": _ACTIVATIONS[_activation(config)],
        "query_scale": query_scale,
        "attention_softcap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "logit_softcap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "embedding_scale": config.hidden_size**0.5
        if gemma
        else getattr(config, "embedding_multiplier", 1.0),
        "residual_scale": getattr(config, "residual_multiplier", 1.0),
        "logit_scale": 1 / getattr(config, "logits_scaling", 1.0) if kind == "granite" else 1.0,
    }


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or str(config.hidden_act)


def _rotary_of(config: Any) -> tuple[list[tuple[np.ndarray, float]], dict[str, int]]:
    """Tables (inverse frequencies, scale of sine and cosine), and the table of each layer type."""
    parameters = config.rope_parameters
    per_type = parameters if "rope_type" not in parameters else {"": parameters}
    tables: list[tuple[np.ndarray, float]] = []
    index: dict[str, int] = {}
    for layer_type, values in per_type.items():
        index[layer_type] = len(tables)
        tables.append(_rotary_table(config, layer_type or None, values))
    return tables, index


def _rotary_table(
    config: Any, layer_type: str | None, values: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    kind = values.get("rope_type", "default")
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        extra = {"layer_type": layer_type} if layer_type else {}
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **extra)
        return frequencies.float().numpy(), float(scale)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(dim * values.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
    return (1.0 / values["rope_theta"] ** exponents).numpy(), 1.0


def rotary_and_window(config: Any) -> tuple[list[tuple[np.ndarray, float]], list[int], list[int]]:
    """Rotary tables; for each layer the index of its table, and its sliding window (0: none)."""
    tables, index = _rotary_of(config)
    tables = [*tables, (np.zeros(0, np.float32), 1.0)]  # for layers that don't rotate
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    rotates = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    which = [
        index.get(kind or "", 0) if turn else len(tables) - 1
        for kind, turn in zip(kinds, rotates, strict=True)
    ]
    return tables, which, [window if k in (None, "sliding_attention") else 0 for k in kinds]


def outer_names(config: Any, present: Container[str]) -> Names:
    """Embedding, head (none where it is tied to the embedding) and last norm."""
    neox = config.model_type == "gpt_neox"
    embedding = "gpt_neox.embed_in" if neox else "model.embed_tokens"
    norm = "gpt_neox.final_layer_norm" if neox else "model.norm"
    matrices = {"embedding": [embedding + ".weight"]}
    if not config.tie_word_embeddings:
        # a GPT-NeoX checkpoint on disk has the first name, transformers' own model the second
        old = neox and "embed_out.weight" in present
        matrices["head"] = ["embed_out.weight" if old else "lm_head.weight"]
    vectors = {"norm": [norm + ".weight"]}
    if neox:
        vectors["norm_bias"] = [norm + ".bias"]
    return Names(matrices=matrices, vectors=vectors)


def layer_names(config: Any, layer: int, present: Container[str]) -> Names:
    """present: the names of the checkpoint's tensors; biases and fused matrices are optional."""
    neox = config.model_type == "gpt_neox"
    at = f"{'gpt_neox' if neox else 'model'}.layers.{layer}."
    found = Names()
    for ours, choices in (_NEOX_PARTS if neox else _LLAMA_PARTS).items():
        for suffix, word, into in (
            (".weight", "", found.matrices),
            (".bias", "_bias", found.vectors),
        ):
            for choice in choices:  # fused where the checkpoint has them so, else joined here
                names = [at + part + suffix for part in choice]
                if all(name in present for name in names):
                    into[ours + word] = names
        if ours not in found.matrices:  # so that the error names what is missing
            found.matrices[ours] = [at + part + ".weight" for part in choices[-1]]
    for ours, theirs in _norm_names(config.model_type).items():
        for suffix, word in ((".weight", ""), (".bias", "_bias")):
            if at + theirs + suffix in present:
                found.vectors[ours + word] = [at + theirs + suffix]
    return found


def prepare(config: Any, name: str, tensor: Tensor) -> Tensor:
    """A tensor of the checkpoint as the native step takes it."""
    if config.model_type.startswith("gemma") and "norm" in name:
        return tensor.float() + 1.0  # stored less one
    if "query_key_value" in name:  # head by head; wanted as all queries, all keys, all values
        heads = config.num_attention_heads
        by_head = tensor.view(heads, 3, -1, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)
    return tensor


_LLAMA_PARTS = {
    "qkv": [["self_attn.qkv_proj"], [f"self_attn.{p}_proj" for p in "qkv"]],
    "out": [["self_attn.o_proj"]],
    "up": [["mlp.gate_up_proj"], ["mlp.gate_proj", "mlp.up_proj"]],
    "down": [["mlp.down_proj"]],
}
_NEOX_PARTS = {
    "qkv": [["attention.query_key_value"]],
    "out": [["attention.dense"]],
    "up": [["mlp.dense_h_to_4h"]],
    "down": [["mlp.dense_4h_to_h"]],
}


def _norm_names(kind: str) -> dict[str, str]:
    heads = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    if kind.startswith("gemma"):
        return heads | {
            "before_attention": "input_layernorm",
            "after_attention": "post_attention_layernorm",
            "before_mlp": "pre_feedforward_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
    if kind == "olmo2":
        return heads | {
            "after_attention": "post_attention_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
    return heads | {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
