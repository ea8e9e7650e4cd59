"""Tiny random Llama checkpoints on disk: real folders, real tokenizers, a millisecond a step.

The tokenizer is a byte-level BPE: every string can be encoded, and characters outside ASCII are
split over several tokens. Greedy text is readable, repeats itself, and does not end by itself;
sampled text contains everything.
"""

from __future__ import annotations

import atexit
import functools
import json
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream import LLM

SPECIAL = ("<|eos|>", "<|start|>", "<|end|>")
EOS = 0
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("o", "n"), ("a", "n"))
SMILE = ":smile:"  # one token that terminal libraries like to turn into a picture
CONTEXT = 4096
READABLE = {*string.ascii_lowercase, *" .,", *("".join(pair) for pair in MERGES)}
CIRCLE = 8
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_root = tempfile.TemporaryDirectory(prefix="tiny_llm_")
atexit.register(_root.cleanup)


def tokenizer_of(
    merges: Sequence[tuple[str, str]] = MERGES, template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges), SMILE]
    core = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevelDecoder()
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([SMILE])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIAL[EOS],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def target() -> Path:
    """The folder of the target."""
    return save("target")


@functools.cache
def draft() -> Path:
    """The target with its weights disturbed: a draft model that is right about half of the time."""
    return save("draft", disturbed=0.2)


@functools.cache
def stranger() -> Path:
    """A model whose tokenizer differs from the target's in one merged token."""
    return save("stranger", tokenizer_of((*MERGES[:-1], ("e", "n"))))


@functools.cache
def without_template() -> Path:
    return save("bare", tokenizer_of(template=None))


def save(
    name: str, tokenizer: PreTrainedTokenizerFast | None = None, disturbed: float = 0.0
) -> Path:
    """Write a checkpoint; ``disturbed`` is the share of noise in its weights."""
    folder = Path(_root.name) / name
    tokenizer = tokenizer or tokenizer_of()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config)
        model.get_input_embeddings().weight.mul_(5)
        for layer in model.model.layers:  # so that what was said long ago matters
            layer.self_attn.q_proj.weight.mul_(3)
            layer.self_attn.k_proj.weight.mul_(3)
            layer.self_attn.o_proj.weight.mul_(2)
        _shape_head(model.lm_head.weight, model.get_input_embeddings().weight, tokenizer)
        for weight in model.parameters():
            if disturbed and weight.dim() > 1:
                weight += disturbed * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _shape_head(head: Tensor, embedding: Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
    """Make text of readable characters that goes round in circles, with exceptions."""
    readable = [i for i in range(len(tokenizer)) if tokenizer.decode([i]) in READABLE]
    for i in set(range(len(tokenizer))) - set(readable):
        head[i] = 0
    for at, token in enumerate(readable):
        circle = at - at % CIRCLE
        after = readable[min(circle + (at + 1) % CIRCLE, len(readable) - 1)]
        head[after] += 0.7 * embedding[token]


def copy_of(folder: Path, to: Path, **config: Any) -> Path:
    """A copy to damage; ``config`` replaces entries of config.json."""
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    if config:
        (to / "config.json").write_text(json.dumps(config))
    return to


def llm(speculative_config: dict[str, Any] | None = None, **options: Any) -> LLM:
    """The target, ready; its weights are read once for the whole session."""
    if options:
        return LLM(str(target()), speculative_config=speculative_config, **options)
    return _plain().with_speculation(speculative_config)


def with_draft(**options: Any) -> LLM:
    return llm({"method": "draft_model", "model": str(draft()), **options})


@functools.cache
def _plain() -> LLM:
    return LLM(str(target()))


def drop_tensor(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if key != name}
    save_file(tensors, file, metadata={"format": "pt"})
