"""Small random models and the GGUF files made from them."""

from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slipstream.models import gguf

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
BYTE_TOKENS += ["he", "ll", "hell", "hello", "12", "<tool>"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2"]
BYTE_META: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": BYTE_TOKENS,
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(BYTE_TOKENS) - 4) + [4],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}


def tiny(arch: str, tied: bool = False, **settings: Any) -> PreTrainedModel:
    """A small random float32 model whose every weight matters to its logits."""
    config_class, model_class = MODELS[arch]
    config = config_class(
        vocab_size=len(BYTE_TOKENS),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **settings,
    )
    torch.manual_seed(3)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():  # biases and norms start at 0 and 1
            if name.endswith("bias") or "norm" in name:
                value.normal_(1.0, 0.3)
    return model


def gguf_name(name: str) -> str:
    tops = {hub: ours for ours, hub in gguf.TOP_NAMES.items()}
    if name in tops:
        return tops[name]
    _, _, layer, *middle, end = name.split(".")
    blocks = {hub: ours for ours, hub in gguf.BLOCK_NAMES.items()}
    return f"blk.{layer}.{blocks['.'.join(middle)]}.{end}"


def interleaved(value: np.ndarray, heads: int) -> np.ndarray:
    """A query or key projection as GGUFs of the llama architecture hold it."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def raw_blocks(kind: Kind, shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks with small scales, for the types that the gguf package can't quantise."""
    block, size = gguf_package.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    at = {Kind.Q4_K: [0, 2], Kind.Q6_K: [208]}[kind]
    for start in at:
        blocks[..., start : start + 2] = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Kind = Kind.F32,
    meta: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **changed: Any,
) -> Path:
    """Write ``model`` as a GGUF with its matrices in ``kind``.

    The model's own matrices become what the file's blocks stand for, so that it stays the
    reference. ``extra`` are further tensors. ``changed`` replaces metadata of the architecture
    (dots as two underscores); None leaves a key out.
    """
    config, arch = model.config, model.config.model_type
    writer = gguf_package.GGUFWriter(path, arch)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    keys |= {key.replace("__", "."): value for key, value in changed.items()}
    everything = {f"{arch}.{key}": value for key, value in keys.items()}
    for key, value in (everything | (BYTE_META if meta is None else meta)).items():
        adders: dict[type, Any] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            adders[type(value)](key, value)
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        moved = heads.get(name.split(".")[-2]) if arch == "llama" else None
        value = interleaved(value, moved) if moved else value.copy()
        if value.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(gguf_name(name), value)
            continue
        if kind in (Kind.Q4_K, Kind.Q6_K):
            stored = raw_blocks(kind, value.shape)
        else:
            stored = gguf_package.quants.quantize(value, kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        back = gguf_package.quants.dequantize(stored, kind).astype(np.float32)
        if moved:  # undo it by looking each row up, not by the code under test
            index = interleaved(np.arange(len(back)), moved)
            back = back[np.argsort(index)]
        parameter.data.copy_(torch.from_numpy(back.copy()))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path) -> Path:
    out = path.parent / "out"
    gguf.convert(path, out, lambda line: None)
    return out
