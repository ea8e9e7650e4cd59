"""Tokenizers rebuilt from GGUF metadata."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from slipstream.errors import SlipstreamError
from slipstream.models import gguf_tokenizer

TEXTS = ["hello hello12", " two  spaces\n\ttab ", "naïve café 日本 🙂", "12345 it's", ""]

BYTES = ["<eos>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
BYTES += ["he", "ll", "hell", "hello", "12", "123", "<tool>"]
BYTE_META: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": BYTES,
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(BYTES) - 4) + [4],
    "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "1 2", "12 3"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["ll", "he", "▁he", "llo", "hello", "▁hello", "▁", "h", "e", "l", "o", "1", "2"]
SPM_META: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES + WORDS,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(WORDS))],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def load(folder: Path, meta: dict[str, Any]) -> Any:
    text, config = gguf_tokenizer.build(meta, 512)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("pre", gguf_tokenizer.PRE_TOKENIZERS)
def test_byte_level_round_trip(tmp_path: Path, pre: str) -> None:
    tokenizer = load(tmp_path, BYTE_META | {"tokenizer.ggml.pre": pre})
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["hello"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    tokenizer = load(tmp_path, BYTE_META | {"tokenizer.ggml.pre": pre})
    ids = tokenizer.encode("1234", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces


def test_special_tokens_are_parsed_and_skipped(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, BYTE_META)
    ids = tokenizer.encode("<|im_start|>hello<tool><|im_end|>")
    assert ids == [1, BYTES.index("hello"), BYTES.index("<tool>"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<tool>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token) == (1, 2, None)
    assert tokenizer.model_max_length == 512


@pytest.mark.parametrize("added", [True, False])
def test_bos_is_added_where_the_file_says_so(tmp_path: Path, added: bool) -> None:
    for index, meta in enumerate([BYTE_META, SPM_META]):
        folder = tmp_path / str(index)
        folder.mkdir()
        tokenizer = load(folder, meta | {"tokenizer.ggml.add_bos_token": added})
        assert (tokenizer.encode("hello")[0] == 1) is added
        pair = tokenizer("hello", "hello")["input_ids"]
        assert pair.count(1) == 2 * added


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, SPM_META)
    ids = tokenizer.encode("hello hé")
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces == ["<s>", "▁hello", "▁", "h", "<0xC3>", "<0xA9>"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, SPM_META | {"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("hello")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "hello"]
    assert tokenizer.decode(tokenizer.encode(" hello"), skip_special_tokens=True) == " hello"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
    ({"tokenizer.ggml.pre": "tekken"}, "'tekken'.*smollm"),
    ({"tokenizer.ggml.tokens": []}, "missing or empty"),
    ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
    ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
    ({"tokenizer.ggml.merges": ["zz yy"]}, "can't be built"),
    ({"tokenizer.ggml.merges": ["zz"]}, "isn't a pair"),
    ({"tokenizer.ggml.tokens": [*BYTES[:-1], "he"]}, "'he' is in the vocabulary twice"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(SlipstreamError, match=text):
        gguf_tokenizer.build(BYTE_META | change, 512)
