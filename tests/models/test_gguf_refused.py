"""GGUF files that are refused: damaged ones, and what isn't supported."""

import struct
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
from tiny_gguf import Kind, converted, tiny, write_gguf

from slipstream.errors import SlipstreamError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"expert_count": 8}, "mixture of experts"),
    ({"block_count": None}, "llama.block_count is missing"),
    ({"block_count": 3}, "9 tensors are missing"),
    ({"block_count": 2**31}, "2147483648 layers"),
    ({"block_count": 1}, "isn't part of a llama model"),
    ({"embedding_length": 128}, "has shape"),
    ({"rope__dimension_count": 32}, "rope.dimension_count is 32"),
    ({"rope__scaling__type": "longrope"}, "longrope"),
    ({"attention__head_count_kv": [1, 2]}, r"\[1, 2\]"),
]


@pytest.mark.parametrize(("keys", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_refused_metadata(tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), **keys)
    with pytest.raises(SlipstreamError, match=text) as caught:
        converted(path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_unknown_architecture_and_type(tmp_path: Path) -> None:
    writer = gguf_package.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.add_tensor("x", np.zeros(32, np.float32))
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    with pytest.raises(SlipstreamError, match=r"a\.gguf: .*'mamba'.*llama, qwen2, qwen3"):
        converted(tmp_path / "a.gguf")
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), Kind.Q4_0)
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    for number, text in [(99, "unknown type 99"), (24, "I8, which can't be dequantised")]:
        path.write_bytes(data[:at] + struct.pack("<I", number) + data[at + 4 :])
        with pytest.raises(SlipstreamError, match=text):
            converted(path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"))
    data = path.read_bytes()
    ends = [0, 3, 4, 8, 20, 24, 40, *range(60, 9000, 487), len(data) // 2, len(data) - 100]
    for end in ends:
        path.write_bytes(data[:end])
        with pytest.raises(SlipstreamError, match=r"m\.gguf: "):
            converted(path)
    path.write_bytes(data[:24] + b"\xff" * 8 + data[32:])  # a key of 2**64 - 1 bytes
    with pytest.raises(SlipstreamError, match="cut short or damaged"):
        converted(path)
    assert not (tmp_path / "out").exists()
