"""Builds a transformers ``config.json`` from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.models.gguf_reader import GgufFile
from slipstream.models.gguf_tokenizer import eos_ids, special_ids

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Llama 3.1 to 3.3 stretch the low rope frequencies; their GGUFs keep only the resulting factors.
# These are the published settings, tried against those factors.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def build_config(file: GgufFile) -> dict[str, Any]:
    """The transformers configuration of a GGUF's model.

    Raises SlipstreamError (without the file's name, which the caller adds) for an architecture or
    a setting that isn't supported and for a missing key.
    """
    meta = file.meta
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise SlipstreamError(
            f"architecture {arch!r} isn't supported; supported: {', '.join(ARCHITECTURES)}"
        )
    if meta.get("split.count", 1) > 1:
        raise SlipstreamError("one part of a split GGUF; merge the parts first")
    if meta.get(f"{arch}.expert_count", 0) > 0:
        raise SlipstreamError("a mixture of experts; only dense models are supported")
    if "token_embd.weight" not in file.tensors:
        raise SlipstreamError("tensor token_embd.weight is missing")
    heads, width = _size(meta, arch, "attention.head_count"), _size(meta, arch, "embedding_length")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": _size(meta, arch, "feed_forward_length"),
        "num_hidden_layers": _size(meta, arch, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _size(meta, arch, "attention.head_count_kv", heads),
        "head_dim": _size(meta, arch, "attention.key_length", width // heads),
        "max_position_embeddings": _size(meta, arch, "context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _short(_need(meta, arch, "attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "dtype": _dtype(file),
    }
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    _check_sizes(file, arch, config)
    config["rope_parameters"] = _rope(file, arch, config["head_dim"])
    config.update(_token_ids(meta, config["vocab_size"]))
    return config


def _need(meta: dict[str, Any], arch: str, key: str) -> Any:
    value = meta.get(f"{arch}.{key}")
    if value is None:
        raise SlipstreamError(f"metadata key {arch}.{key} is missing")
    return value


def _size(meta: dict[str, Any], arch: str, key: str, default: int | None = None) -> int:
    """A positive whole number, the same for every layer where the file has one per layer."""
    value = meta.get(f"{arch}.{key}", default)
    if value is None:
        value = _need(meta, arch, key)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise SlipstreamError(f"{arch}.{key} is {value!r}; one positive number is supported")
    return value


def _short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, where the file has 9.99999975e-06."""
    return float(str(np.float32(value)))


def _check_sizes(file: GgufFile, arch: str, config: dict[str, Any]) -> None:
    head, layers = config["head_dim"], config["num_hidden_layers"]
    if layers > len(file.tensors):  # a damaged number; the weights are listed layer by layer
        raise SlipstreamError(f"{layers} layers, but only {len(file.tensors)} tensors")
    meta = file.meta
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(f"{arch}.{key}", head) != head:
            raise SlipstreamError(f"{arch}.{key} is {meta[f'{arch}.{key}']}, a head has {head}")
    if head % 2 or config["num_attention_heads"] % config["num_key_value_heads"]:
        raise SlipstreamError(
            f"{config['num_attention_heads']} heads of {head} values with "
            f"{config['num_key_value_heads']} key-value heads don't fit together"
        )


def _dtype(file: GgufFile) -> str:
    """What transformers loads the weights as: the common type of all matrices, or float32."""
    kinds = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    only = kinds.pop() if len(kinds) == 1 else "F32"
    return {"F16": "float16", "BF16": "bfloat16"}.get(only, "float32")


def _token_ids(meta: dict[str, Any], rows: int) -> dict[str, Any]:
    special = special_ids(meta, len(meta.get("tokenizer.ggml.tokens") or []))
    if len(meta.get("tokenizer.ggml.tokens") or []) > rows:
        raise SlipstreamError(f"more tokens than the {rows} rows of token_embd.weight")
    ids: dict[str, Any] = {}
    if "bos" in special:
        ids["bos_token_id"] = special["bos"]
    ends = eos_ids(special)
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if "pad" in special:
        ids["pad_token_id"] = special["pad"]
    return ids


def _rope(file: GgufFile, arch: str, head: int) -> dict[str, Any]:
    meta = file.meta
    theta = _short(meta.get(f"{arch}.rope.freq_base", 10000.0))
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    old_factor = meta.get(f"{arch}.rope.scale_linear", 1.0)
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise SlipstreamError(f"rope_freqs.weight together with rope scaling {kind!r}")
        return {"rope_theta": theta, **_llama3(file, theta, head)}
    if kind == "none" and old_factor != 1.0:
        kind = "linear"
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(meta.get(f"{arch}.rope.scaling.factor", old_factor))
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    extra = [key for key in meta if key.startswith(f"{arch}.rope.scaling.")]
    known = ("type", "factor", "original_context_length", "finetuned")
    if kind != "yarn" or any(key.rsplit(".", 1)[1] not in known for key in extra):
        raise SlipstreamError(f"rope scaling {kind!r} with keys {extra} isn't supported")
    original = _size(meta, arch, "rope.scaling.original_context_length")
    yarn = {"factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "yarn", "rope_theta": theta, **yarn}


def _llama3(file: GgufFile, theta: float, head: int) -> dict[str, Any]:
    """The Llama 3 rope settings whose factors are those of ``rope_freqs.weight``."""
    info = file.tensors["rope_freqs.weight"]
    if info.type_name != "F32" or info.shape != (head // 2,):
        raise SlipstreamError(f"rope_freqs.weight is {info.type_name} of shape {info.shape}")
    stored = file.raw("rope_freqs.weight").view(np.float32)[0]
    factor = float(stored.max())
    turns = LLAMA3_CONTEXT * theta ** (-np.arange(0, head, 2) / head) / (2 * math.pi)
    blend = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    if not np.allclose(stored, 1 / ((1 - blend) / factor + blend), rtol=1e-4):
        raise SlipstreamError("rope_freqs.weight isn't the scaling of Llama 3.1 to 3.3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }
