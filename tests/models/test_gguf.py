"""Converting GGUF files: the folder holds the model that the file describes."""

import struct
from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import BYTE_META, Kind, converted, tiny, write_gguf
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
)

from slipstream.errors import SlipstreamError
from slipstream.models import gguf, gguf_reader


def assert_same_logits(folder: Path, model: PreTrainedModel) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(7, 40)[None]
    with torch.no_grad():
        ours, theirs = loaded(ids).logits, model(ids).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_converted_model_gives_the_logits_of_its_weights(
    tmp_path: Path, arch: str, kind: Kind
) -> None:
    model = tiny(arch)
    folder = converted(write_gguf(tmp_path / "m.gguf", model, kind))
    assert_same_logits(folder, model)
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    kept = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    assert stored.dtype == kept.get(kind, torch.float32)
    assert torch.equal(stored.float(), model.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tied_embeddings(tmp_path: Path, arch: str) -> None:
    model = tiny(arch, tied=True)
    assert_same_logits(converted(write_gguf(tmp_path / "m.gguf", model, Kind.Q8_0)), model)


def test_biases_of_a_llama(tmp_path: Path) -> None:
    model = tiny("llama", attention_bias=True, mlp_bias=True)
    assert_same_logits(converted(write_gguf(tmp_path / "m.gguf", model)), model)


def test_the_logits_tell_whether_the_rows_were_moved_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    monkeypatch.setattr(gguf, "_row_order", lambda *_: None)
    with pytest.raises(AssertionError):
        assert_same_logits(converted(write_gguf(tmp_path / "m.gguf", model)), model)


def scalar_q4_k(block: bytes) -> list[float]:
    d, least, q, codes = *struct.unpack("<2e", block[:4]), block[4:16], block[16:]
    out = []
    for j in range(8):
        if j < 4:
            scale, offset = q[j] & 63, q[j + 4] & 63
        else:
            scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4
            offset = (q[j + 4] >> 4) | (q[j] >> 6) << 4
        part = codes[j // 2 * 32 : j // 2 * 32 + 32]
        out += [d * scale * (byte >> j % 2 * 4 & 15) - least * offset for byte in part]
    return out


def scalar_q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (d,) = struct.unpack("<e", block[208:])
    out = []
    for at in range(256):
        half, quarter, column = at // 128, at % 128 // 32, at % 32
        nibble = low[half * 64 + quarter % 2 * 32 + column] >> quarter // 2 * 4 & 15
        code = (nibble | (high[half * 32 + column] >> quarter * 2 & 3) << 4) - 32
        out.append(d * scales[at // 16] * code)
    return out


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_against_a_scalar_reading_of_the_format(tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("qwen2"), kind)
    stored = load_file(converted(path) / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    raw = gguf_reader.read(path).raw("blk.0.ffn_up.weight")
    scalar = {Kind.Q4_K: scalar_q4_k, Kind.Q6_K: scalar_q6_k}[kind]
    expected = torch.tensor([scalar(row.tobytes()) for row in raw[:4]])
    torch.testing.assert_close(stored[:4], expected, rtol=1e-5, atol=1e-6)


def test_config_and_tokenizer_load(tmp_path: Path) -> None:
    meta = BYTE_META | {"tokenizer.ggml.eot_token_id": 0}
    folder = converted(write_gguf(tmp_path / "m.gguf", tiny("llama"), meta=meta))
    config = LlamaConfig.from_pretrained(folder)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 512)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [2, 0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert ids["input_ids"][0] == 1
    assert ids["input_ids"].count(2) == 1


SCALINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
    ),
    (
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 128,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
]


@pytest.mark.parametrize(("keys", "expected"), SCALINGS, ids=["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    model = tiny("qwen2")
    folder = converted(write_gguf(tmp_path / "m.gguf", model, **keys))
    model.config.rope_parameters = {"rope_theta": 50000.0, **expected}
    reference = type(model)(model.config).eval()
    reference.load_state_dict(model.state_dict())
    assert_same_logits(folder, reference)


def test_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), Kind.Q8_0)
    ours, theirs = gguf_reader.read(path), gguf_package.GGUFReader(path)
    named = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.meta == named
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_llama3_rope(tmp_path: Path) -> None:
    model = tiny("llama")
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    parameters = {"rope_type": "llama3", "rope_theta": 50000.0, **scaling}
    model.config.rope_parameters = parameters
    model = type(model)(model.config).eval()
    plain = 50000.0 ** (-torch.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    folder = converted(path)
    assert LlamaConfig.from_pretrained(folder).rope_parameters == parameters
    assert_same_logits(folder, model)
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors * 0.9})
    with pytest.raises(SlipstreamError, match=r"rope_freqs\.weight isn't the scaling"):
        converted(path)
