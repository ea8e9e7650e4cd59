"""Converts a GGUF file to a folder that transformers loads: config, weights, tokenizer.

Quantised tensors become float32 with exactly the values their blocks stand for; F32, F16 and
BF16 tensors keep their type. The weights are written one tensor at a time, so a conversion needs
memory for one tensor, not for the model.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.models import gguf_reader, gguf_tokenizer
from slipstream.models.folders import BLOCKS_FILE
from slipstream.models.gguf_config import build_config
from slipstream.models.gguf_reader import GgufFile, TensorInfo

KEPT_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}  # GGUF type -> safetensors type
BYTES = {"F32": 4, "F16": 2, "BF16": 2}
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q8_0")  # kept beside the weights: a runtime can compute on them
CHUNK_VALUES = 1 << 22  # values dequantised at once: small enough to stay near the caches

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(path: Path, out: Path, notify: Callable[[str], None]) -> None:
    """Write ``out`` (a folder that doesn't exist yet) from the GGUF file ``path``.

    Raises SlipstreamError naming the file when it is damaged, when its architecture, tokenizer or
    a tensor type isn't supported, or when tensors are missing; ``out`` doesn't exist then.
    """
    file = gguf_reader.read(path)
    try:
        config = build_config(file)
        names = _names(file, config)
        text, tokenizer_config = gguf_tokenizer.build(file.meta, config["max_position_embeddings"])
    except SlipstreamError as err:
        raise SlipstreamError(f"{path}: {err}") from err
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as err:
        raise SlipstreamError(f"{path}: its metadata doesn't make sense ({err})") from err
    notify(f"converting {path.name} ({path.stat().st_size / 1e6:.0f} MB) once for transformers")
    out.mkdir(parents=True)
    try:
        _write_weights(file, config, names, out / "model.safetensors")
        _write_blocks(file, config, names, out / BLOCKS_FILE)
        (out / "tokenizer.json").write_text(text, encoding="utf-8")
        _write_json(out / "tokenizer_config.json", tokenizer_config)
        _write_json(out / "generation_config.json", _generation(config))
        _write_json(out / "config.json", config)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if key in config}


def _hub_name(name: str) -> str | None:
    """The transformers name of a GGUF tensor, or None for a tensor that isn't a weight of ours."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in BLOCK_NAMES:
        return None
    return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight the configured model has, with its shape (rows first)."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)
    biased = {"qwen2": "qkv"}.get(config["model_type"], "qkvo" * config["attention_bias"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", (width,)
        yield f"{at}post_attention_layernorm.weight", (width,)
        sizes = {"q": (queries, width), "k": (keys, width), "v": (keys, width)}
        for letter, shape in {**sizes, "o": (width, queries)}.items():
            yield f"{at}self_attn.{letter}_proj.weight", shape
            if letter in biased:
                yield f"{at}self_attn.{letter}_proj.bias", shape[:1]
        if config["model_type"] == "qwen3":
            yield f"{at}self_attn.q_norm.weight", (head,)
            yield f"{at}self_attn.k_norm.weight", (head,)
        for word, shape in {"gate": (inner, width), "up": (inner, width)}.items():
            yield f"{at}mlp.{word}_proj.weight", shape
            if config.get("mlp_bias"):
                yield f"{at}mlp.{word}_proj.bias", shape[:1]
        yield f"{at}mlp.down_proj.weight", (width, inner)
        if config.get("mlp_bias"):
            yield f"{at}mlp.down_proj.bias", (width,)


def _names(file: GgufFile, config: dict[str, Any]) -> dict[str, str]:
    """transformers name -> GGUF name, for exactly the weights that the model needs.

    Raises SlipstreamError for a missing, unexpected or wrongly shaped tensor, or for a tensor
    type that can't be dequantised.
    """
    wanted = dict(_shapes(config))
    found: dict[str, str] = {}
    for name, info in file.tensors.items():
        if name == "rope_freqs.weight":  # build_config has read it
            continue
        hub_name = _hub_name(name)
        if hub_name not in wanted:
            raise SlipstreamError(
                f"tensor {name} isn't part of a {config['model_type']} model as it is known here"
            )
        if info.shape != wanted[hub_name]:
            raise SlipstreamError(
                f"tensor {name} has shape {info.shape}, the metadata says {wanted[hub_name]}"
            )
        found[hub_name] = name
    missing = [name for name in wanted if name not in found]
    if missing:
        raise SlipstreamError(f"{len(missing)} tensors are missing, {missing[0]} for one")
    _check_types(file)
    return found


def _check_types(file: GgufFile) -> None:
    """Dequantise one block of each type in the file, before anything is written."""
    for info in {info.type_name: info for info in file.tensors.values()}.values():
        if info.type_name in KEPT_TYPES:
            continue
        try:
            row = _block_bytes(info)
            _dequantize(np.zeros((1, row), np.uint8), info.type_name)
        except Exception as err:
            raise SlipstreamError(
                f"tensor {info.name} has type {info.type_name}, which can't be dequantised"
            ) from err


def _block_bytes(info: TensorInfo) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return int(GGML_QUANT_SIZES[GGMLQuantizationType[info.type_name]][1])


def _dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.asarray(dequantize(raw, GGMLQuantizationType[type_name]), np.float32)


def _row_order(hub_name: str, rows: int, config: dict[str, Any]) -> np.ndarray | None:
    """The stored row that each row of the transformers weight is taken from, where it moves.

    GGUFs of the llama architecture hold the rows of the query and key projections with the two
    halves of each head interleaved (the pairs that rope rotates side by side); transformers
    rotates the two halves of a head against each other.
    """
    is_query, is_key = ".q_proj." in hub_name, ".k_proj." in hub_name
    if config["model_type"] != "llama" or not (is_query or is_key):
        return None
    heads = config["num_attention_heads"] if is_query else config["num_key_value_heads"]
    stored = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return stored.swapaxes(1, 2).reshape(rows)


def _chunks(file: GgufFile, info: TensorInfo, order: np.ndarray | None) -> Iterator[np.ndarray]:
    """A tensor's values a few rows at a time: float32, or the stored bytes for kept types."""
    raw = file.raw(info.name)
    if len(info.shape) == 1 and order is not None:  # a bias: one value is one row
        raw = raw.reshape(info.shape[0], -1)
    if order is not None:
        raw = raw[order]
    step = max(1, CHUNK_VALUES // info.shape[-1])
    for start in range(0, len(raw), step):
        rows = raw[start : start + step]
        yield rows if info.type_name in KEPT_TYPES else _dequantize(rows, info.type_name)


def _write_weights(
    file: GgufFile, config: dict[str, Any], names: dict[str, str], out: Path
) -> None:
    """One safetensors file of the values."""
    infos = {hub_name: file.tensors[name] for hub_name, name in names.items()}
    kinds = {name: KEPT_TYPES.get(info.type_name, "F32") for name, info in infos.items()}
    # 4-byte types first, so that every tensor starts at a multiple of its own size.
    ordered = sorted(infos, key=lambda name: (-BYTES[kinds[name]], name))
    shapes = {name: (kinds[name], infos[name].shape, BYTES[kinds[name]]) for name in ordered}
    parts = (
        chunk
        for name in ordered
        for chunk in _chunks(file, infos[name], _row_order(name, infos[name].shape[0], config))
    )
    _write_safetensors(out, shapes, {"format": "pt"}, parts)


def _write_blocks(file: GgufFile, config: dict[str, Any], names: dict[str, str], out: Path) -> None:
    """Another of the quantised blocks themselves, rows in the order of the weights; the metadata
    names each tensor's type. None if there are no such blocks."""
    kinds = {hub: file.tensors[name].type_name for hub, name in names.items()}
    kept = {hub: kind for hub, kind in kinds.items() if kind in BLOCK_TYPES}
    if not kept:
        return
    raw = {hub: file.raw(names[hub]) for hub in kept}
    orders = {hub: _row_order(hub, len(rows), config) for hub, rows in raw.items()}
    shapes = {hub: ("U8", rows.shape, 1) for hub, rows in raw.items()}
    parts = (rows if orders[hub] is None else rows[orders[hub]] for hub, rows in raw.items())
    _write_safetensors(out, shapes, kept, parts)


def _write_safetensors(
    out: Path,
    shapes: dict[str, tuple[str, tuple[int, ...], int]],
    metadata: dict[str, str],
    parts: Iterable[np.ndarray],
) -> None:
    """Header length, JSON header, then the tensors in its order.

    shapes: name → (safetensors type, shape, bytes of a value). parts: their rows, one after the
    other.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (kind, shape, size) in shapes.items():
        start, end = end, end + int(np.prod(shape)) * size
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with out.open("wb") as sink:
        sink.write(struct.pack("<Q", len(head)) + head)
        for part in parts:
            sink.write(np.ascontiguousarray(part).data)
        if sink.tell() != 8 + len(head) + end:
            raise AssertionError(f"wrote {sink.tell()} bytes, the header says {end}")
