"""Tiny random models of many architectures, and transformers' own forward pass as reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.models.adapter import ATTENTION
from slipstream.runtimes.torch import TorchRuntime

VOCAB = 97
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases and tied embeddings": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, scaled rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral, window 5": ("Mistral", {"sliding_window": 5}),
    "gemma 2, soft-capped, window 6": ("Gemma2", {"head_dim": 16, "sliding_window": 6}),
    "gemma 3, window 6": (
        "Gemma3Text",
        {"head_dim": 16, "sliding_window": 6, "layer_types": SLIDING},
    ),
    "phi 3": ("Phi3", {}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None}),
    "gpt-2": ("GPT2", {}),
    "olmo 2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "logits_scaling": 3.0}),
    "smollm 3": ("SmolLM3", {}),
    "gpt-oss, sinks, window 6": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": SLIDING,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "cohere 2, window 6": ("Cohere2", {"sliding_window": 6}),
}


def config(name: str) -> Any:
    kind, more = ARCHITECTURES[name]
    if kind == "GPT2":
        return transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4)
    options = {k: v for k, v in {**BASE, **more}.items() if v is not None}
    return getattr(transformers, f"{kind}Config")(**options)


def build(config: Any, attention: str, seed: int = 0, dtype: Any = torch.float32) -> Any:
    """Weights large enough for attention to matter: at the usual scale a wrong mask hides."""
    config = copy.deepcopy(config)  # the model writes its attention into it
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape).to(dtype)
        if parameter.dim() > 1:
            parameter.data = 0.15 * noise
        else:
            parameter.data += 0.1 * noise
    model.tie_weights()
    return model.eval()


class Pair:
    """The same model twice: ours, and transformers' eager attention as reference."""

    def __init__(self, config: Any, name: str = "tiny", dtype: Any = torch.float32) -> None:
        self.reference = build(config, "eager", dtype=dtype)
        self.runtime = TorchRuntime(build(config, ATTENTION, dtype=dtype), name)

    def want(self, tokens: Sequence[int]) -> Tensor:
        """[T, V]: the reference's logits of a whole text."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(tokens)])).logits[0].float()
