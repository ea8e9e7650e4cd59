"""Configurations read without transformers against its own reading."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llm
from transformers import AutoConfig

from slipstream.models import plain_config
from slipstream.models.shape import check_config, context_length
from slipstream.models.sources import DEFAULT_MODEL, resolve
from slipstream.runtimes import native_layout as layout

NAMES = ("model_type", "vocab_size", "num_hidden_layers", "tie_word_embeddings", "head_dim")
OLD: dict[str, Any] = {  # as transformers 4 wrote it
    "architectures": ["LlamaForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 130000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "vocab_size": 300,
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compare(folder: Path) -> None:
    ours, theirs = plain_config.read(folder), AutoConfig.from_pretrained(folder).get_text_config()
    assert ours is not None
    check_config(ours, "x")
    assert context_length(ours) == context_length(theirs)
    assert layout.unsupported(ours) == layout.unsupported(theirs)
    assert layout.config_words(ours) == layout.config_words(theirs)
    assert [getattr(ours, name) for name in NAMES] == [getattr(theirs, name) for name in NAMES]
    (tables, *rest), (expected, *others) = map(layout.rotary_and_window, (ours, theirs))
    assert rest == others
    for (frequencies, scale), (their_frequencies, their_scale) in zip(
        tables, expected, strict=True
    ):
        assert scale == their_scale
        np.testing.assert_array_equal(frequencies, their_frequencies)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_dim": 32},
        {"num_key_value_heads": None},
        {"tie_word_embeddings": True, "attention_bias": True},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"hidden_act": "gelu"},
    ],
)
def test_a_llama_is_read_as_transformers_reads_it(tmp_path: Path, change: dict[str, Any]) -> None:
    compare(write(tmp_path, OLD | change))


def test_a_saved_llama_is_read_as_transformers_reads_it() -> None:
    compare(tiny_llm.target())


@pytest.mark.model
def test_the_default_model_is_read_as_transformers_reads_it() -> None:
    compare(resolve(DEFAULT_MODEL))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"hidden_size": "64"},
        {"hidden_size": 66},
        {"rope_theta": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"auto_map": {"AutoConfig": "a.B"}},
    ],
)
def test_the_rest_is_left_to_transformers(tmp_path: Path, change: dict[str, Any]) -> None:
    assert plain_config.read(write(tmp_path, OLD | change)) is None


@pytest.mark.parametrize("name", ["hidden_act", "rms_norm_eps", "vocab_size"])
def test_what_is_missing_is_left_to_transformers(tmp_path: Path, name: str) -> None:
    config = {key: value for key, value in OLD.items() if key != name}
    assert plain_config.read(write(tmp_path, config)) is None
