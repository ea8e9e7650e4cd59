"""Random EAGLE-3 heads, in each public format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.models.eagle3 import Eagle3Config, Eagle3Weights, vocabulary_maps

CONFIG = Eagle3Config(
    hidden=32,
    target_hidden=24,
    heads=4,
    kv_heads=2,
    dim=8,
    inner=48,
    vocab=50,
    draft_vocab=12,
    taps=(1, 2, 3),
    verifier="the-target",
)


def random_head(config: Eagle3Config = CONFIG, seed: int = 0) -> Eagle3Weights:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.3 * torch.randn(shape, generator=generator) + (1.0 if "norm" in name else 0.0)
        for name, shape in config.shapes().items()
    }
    ids = torch.randperm(config.vocab, generator=generator)[: config.draft_vocab].sort().values
    tensors["d2t"], tensors["t2d"] = vocabulary_maps(ids.tolist(), config.vocab)
    return Eagle3Weights(config=config, tensors=tensors)


def save_safeailab(folder: Path, head: Eagle3Weights, *, pickled: bool = False) -> Path:
    """As SafeAILab's repository publishes heads: flat config, ``midlayer``, no taps."""
    folder.mkdir(parents=True)
    config = head.config
    words: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "target_hidden_size": config.target_hidden,
        "intermediate_size": config.inner,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab,
        "draft_vocab_size": config.draft_vocab,
        "rms_norm_eps": config.eps,
        "max_position_embeddings": config.max_length,
    }
    (folder / "config.json").write_text(json.dumps(words))
    tensors = {k.replace("layers.0.", "midlayer."): v for k, v in head.tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder
