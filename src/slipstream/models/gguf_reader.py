"""Reads the header of a GGUF file: metadata, and where each tensor's bytes lie.

The ``gguf`` package's own reader keeps one numpy array per token, which takes seconds for a
vocabulary, and reads past the end of a cut file in silence. This one is a bounds-checked walk
over the bytes: it takes well under a second and refuses a damaged file by name. Tensor data is
mapped, not read.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has 32-bit counts and is not written by anything current
MAX_DIMS = 4

# GGUF value types: the number in the file -> struct code.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
SCALARS[12] = "d"
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``shape`` in numpy order (rows first), ``offset`` and ``nbytes`` in bytes."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF's metadata and tensor table. The tensor bytes stay on disk until asked for."""

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, as uint8 of shape (rows, bytes per row)."""
        info = self.tensors[name]
        rows = math.prod(info.shape[:-1])
        data = np.memmap(self.path, np.uint8, "r", offset=info.offset, shape=(info.nbytes,))
        return data.reshape(rows, info.nbytes // rows)


class _Cut(Exception):
    """The header asks for bytes that the file doesn't have."""


class _Cursor:
    """A position in the file that moves forward and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0

    def need(self, count: int) -> int:
        """Move ``count`` bytes on; returns where they start."""
        start = self.at
        if count > self.size - start:
            raise _Cut
        self.at = start + count
        return start

    def number(self, code: str) -> Any:
        start = self.need(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self.need(length)
        return str(self.data[start : self.at], "utf-8")

    def array(self) -> list[Any]:
        kind, length = self.number("I"), self.number("Q")
        if kind == STRING:
            if length * 8 > self.size - self.at:  # each string has an 8-byte length
                raise _Cut
            return [self.string() for _ in range(length)]
        if kind not in SCALARS:
            raise ValueError(f"arrays of value type {kind} are unknown")
        dtype = np.dtype("<" + SCALARS[kind]) if kind != 7 else np.dtype(np.bool_)
        start = self.need(length * dtype.itemsize)
        return np.frombuffer(self.data, dtype, length, start).tolist()

    def value(self) -> Any:
        kind = self.number("I")
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return self.number(SCALARS[kind])


def read(path: Path) -> GgufFile:
    """Read a GGUF's header.

    Raises SlipstreamError naming the file when it can't be opened, isn't a GGUF, or is damaged
    or cut short (the tensor table is held against the file's size).
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise SlipstreamError(f"{path}: not a GGUF file (it doesn't start with 'GGUF')")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(data))
    except SlipstreamError:
        raise
    except OSError as err:
        raise SlipstreamError(f"{path}: cannot be read ({err.strerror or err})") from err
    except _Cut:
        raise SlipstreamError(
            f"{path}: the GGUF file is cut short or damaged (its header runs past the end of "
            f"the file); fetch it again"
        ) from None
    except (ValueError, OverflowError, MemoryError) as err:
        raise SlipstreamError(f"{path}: damaged GGUF header ({err})") from err


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    cursor.need(4)
    version = cursor.number("I")
    if version not in VERSIONS:
        hint = "big-endian files aren't supported" if version & 0xFFFF == 0 else "need 2 or 3"
        raise SlipstreamError(f"{path}: GGUF version {version} ({hint})")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    meta: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        meta[key] = cursor.value()
    infos = [_tensor(cursor) for _ in range(tensor_count)]
    align = meta.get("general.alignment", 32)
    if not isinstance(align, int) or align <= 0:
        raise ValueError(f"general.alignment is {align}")
    base = -(-cursor.at // align) * align
    tensors = {info.name: _placed(info, base) for info in infos}
    _check_ends(path, tensors, cursor.size)
    return GgufFile(path, meta, tensors)


def _tensor(cursor: _Cursor) -> TensorInfo:
    """One row of the tensor table; the offset is still relative to the data section."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string()
    dims = cursor.number("I")
    if not 1 <= dims <= MAX_DIMS:
        raise ValueError(f"tensor {name} has {dims} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(dims)]))
    type_id, offset = cursor.number("I"), cursor.number("Q")
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise ValueError(f"tensor {name} has the unknown type {type_id}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"tensor {name} of shape {shape} can't be cut in blocks of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    return TensorInfo(name, kind.name, shape, offset, nbytes)


def _placed(info: TensorInfo, base: int) -> TensorInfo:
    return TensorInfo(info.name, info.type_name, info.shape, base + info.offset, info.nbytes)


def _check_ends(path: Path, tensors: dict[str, TensorInfo], size: int) -> None:
    for info in tensors.values():
        if info.offset + info.nbytes > size:
            raise SlipstreamError(
                f"{path}: the GGUF file is cut short (tensor {info.name} ends at byte "
                f"{info.offset + info.nbytes}, the file has {size}); fetch it again"
            )
