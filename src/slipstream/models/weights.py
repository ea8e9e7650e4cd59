"""The tensors of a model folder, read one at a time: memory for one, not for the model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.folders import BLOCKS_FILE


class Weights(Mapping[str, Tensor]):
    """Name → tensor, mapped from its file for as long as it is held.

    blocks: where the folder was converted from a quantised GGUF file, what the float32 tensors
    were made from.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {tensor: folder / shard for tensor, shard in shards.items()}
        else:
            files = [f for f in sorted(folder.glob("*.safetensors")) if f.name != BLOCKS_FILE]
            self._files = {key: file for file in files for key in _keys(file, name)}
        self._name = name
        path = folder / BLOCKS_FILE
        self.blocks = Blocks(path if path.is_file() else None, name)

    def __getitem__(self, key: str) -> Tensor:
        with _open(self._files[key], "pt", self._name) as file:
            tensor: Tensor = file.get_tensor(key)
            return tensor

    def __contains__(self, key: object) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def count(self) -> int:
        """Numbers in all tensors, from the files' headers."""
        return sum(math.prod(shape) for _, shape in self._headers())

    @property
    def stored_types(self) -> set[str]:
        """safetensors' names of the types in use: "F32", "BF16" …"""
        return {kind for kind, _ in self._headers()}

    def _headers(self) -> Iterator[tuple[str, list[int]]]:
        for path in sorted(set(self._files.values())):
            with _open(path, "pt", self._name) as file:
                for key in file.keys():  # noqa: SIM118 — no mapping
                    part = file.get_slice(key)
                    yield part.get_dtype(), part.get_shape()


class Blocks:
    """Quantised blocks of a GGUF file, rows in the order of the transformers weight.

    kinds: tensor name → GGUF type.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self._path = path
        self._name = name
        self.kinds: dict[str, str] = {}
        if path is not None:
            with _open(path, "np", name) as file:
                self.kinds = dict(file.metadata() or {})

    def rows(self, key: str) -> np.ndarray:
        """uint8 [rows, bytes of a row]."""
        assert self._path is not None
        with _open(self._path, "np", self._name) as file:
            found: np.ndarray = file.get_tensor(key)
            return found


def _keys(file: Path, name: str) -> list[str]:
    with _open(file, "pt", name) as opened:
        return list(opened.keys())


def _open(path: Path, framework: str, name: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework)
    except (OSError, SafetensorError) as error:
        raise SlipstreamError(f"{name}: {path} can't be read: {error}") from error
