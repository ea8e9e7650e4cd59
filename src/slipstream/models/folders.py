"""Checks that a folder holds a complete model, cheaply: the weights themselves aren't read."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.errors import SlipstreamError

BLOCKS_FILE = "blocks.safetensors"  # quantised blocks beside the weights made from them
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")


def check_folder(path: Path) -> None:
    """Check a model folder without reading its weights.

    Raises SlipstreamError naming the file when config.json, the tokenizer or a shard is missing,
    when a JSON file can't be parsed or when a safetensors file is cut short.
    """
    config = path / "config.json"
    if not config.is_file():
        inside = sorted(path.glob("*.gguf"))
        hint = f"; did you mean {inside[0]}?" if inside else ""
        raise SlipstreamError(f"{config} is missing, so {path} isn't a model folder{hint}")
    if not isinstance(_json_file(config), dict):
        raise SlipstreamError(f"{config}: not a JSON object")
    weights = set(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        content = _json_file(index)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise SlipstreamError(f"{index}: no weight_map from tensor to file")
        weights |= {path / shard for shard in shards.values()}
    if not weights:
        raise SlipstreamError(f"{path} has no *.safetensors file (other weights aren't read)")
    for file in sorted(weights):
        _check_safetensors(file)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise SlipstreamError(f"{path} has no tokenizer (tokenizer.json is missing)")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (path / name).is_file() and not isinstance(_json_file(path / name), dict):
            raise SlipstreamError(f"{path / name}: not a JSON object")


def _json_file(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise SlipstreamError(f"{path}: cannot be read ({err.strerror or err})") from err
    except ValueError as err:
        raise SlipstreamError(f"{path}: not valid JSON ({err})") from err


def _check_safetensors(path: Path) -> None:
    """Hold a file's header against its size: a cheap way to see that a download was cut."""
    if not path.is_file():
        raise SlipstreamError(f"{path} is missing (model.safetensors.index.json names it)")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"its header runs past the file's {size} bytes")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key[:2] != "__"]
        if 8 + length + max(ends, default=0) != size:
            raise ValueError(f"{size} bytes, its header says {8 + length + max(ends, default=0)}")
    except OSError as err:
        raise SlipstreamError(f"{path}: cannot be read ({err.strerror or err})") from err
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as err:
        raise SlipstreamError(
            f"{path}: damaged or cut short ({err}); fetch the file again"
        ) from err
