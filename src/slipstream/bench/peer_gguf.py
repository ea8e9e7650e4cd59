"""GGUF files in other precisions, made once for the peers that read GGUF.

Written with the ``gguf`` package, whose quantisation has the same bits as llama.cpp's own, so that
no tool of a peer is needed for another peer's file.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.models import gguf_reader
from slipstream.models.sources import cache_dir, say

FORMAT = 1  # raised when a file comes out differently, so that old ones aren't used
FOUR_BITS = ("Q4_0", "Q4_1")
EMBEDDINGS = ("token_embd.weight", "output.weight")  # int4 files keep these in 8 bits


def workspace(source: Path) -> Path:
    """The folder of the cache for what is made from a model's file or folder."""
    file = source / "model.safetensors" if source.is_dir() else source
    stat = file.stat() if file.is_file() else source.stat()
    content = f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns} {FORMAT}"
    name = f"{source.stem[:60]}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    return cache_dir() / "peers" / name


def variant(source: Path, wanted: str) -> Path:
    """A model's GGUF with weights of a type: ``source`` itself where they are, else made from it.

    wanted: F32, F16, BF16, Q8_0, Q4_0, or Q4: Q4_0 or Q4_1, whichever the source has, since another
    four bits would be another model; Q4_0 if it has neither.
    """
    file = gguf_reader.read(source)
    inner = {t.type_name for name, t in file.tensors.items() if _is_weight(name, t.shape)}
    if inner <= set(FOUR_BITS if wanted == "Q4" else (wanted,)):
        return source
    wanted = "Q4_0" if wanted == "Q4" else wanted
    target = workspace(source) / f"{wanted}.gguf"
    if not target.is_file():
        say(f"writing {source.name} as {wanted} once for the peers, into {target.parent}")
        unfinished = target.with_name(f"{wanted}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(source, unfinished, wanted)
            unfinished.replace(target)
        except OSError as error:
            raise SlipstreamError(
                f"cannot write to {target.parent} ({error.strerror or error}); the environment "
                "variable SLIPSTREAM_CACHE moves it"
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)
    return target


def _is_weight(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and name not in EMBEDDINGS


def _kind(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """The type a tensor gets: vectors stay float32."""
    if len(shape) == 1:
        return "F32"
    return "Q8_0" if wanted in FOUR_BITS and name in EMBEDDINGS else wanted


def _write(source: Path, target: Path, wanted: str) -> None:
    """Copy metadata and tensors of a GGUF, the tensors through float32 into other types."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, arch=str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    prefix = "ALL" if wanted == "F32" else "MOSTLY"
    writer.add_file_type(LlamaFileType[f"{prefix}_{wanted}"])
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        kind = GGMLQuantizationType[_kind(tensor.name, shape, wanted)]
        data: Any = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        try:
            data = quantize(data.reshape(shape), kind)
        except ValueError as error:  # a row that is no whole number of blocks
            raise SlipstreamError(
                f"{source}: tensor {tensor.name} of shape {shape} can't be {kind.name} ({error}): "
                "choose another precision"
            ) from error
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
