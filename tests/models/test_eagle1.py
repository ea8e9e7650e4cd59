"""EAGLE-1 heads: both public formats, the forward pass, and drafts beside a target."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_llm
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.models import eagle1
from slipstream.models.eagle1 import Eagle1Shape, Eagle1Weights
from slipstream.runtimes.outer import read_last_norm, read_matrices
from slipstream.runtimes.torch_head import eagle1_head
from slipstream.types import chain_rows

SHAPE = Eagle1Shape(hidden=32, heads=4, kv_heads=2, dim=8, inner=48, vocab=50)
SPECULATORS = {"fc.": "fusion_fc.", "layers.0.": "transformer."}


def random_weights(shape: Eagle1Shape = SHAPE, seed: int = 0, scale: float = 0.3) -> Eagle1Weights:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: scale * torch.randn(size, generator=generator) + (1.0 if "norm" in name else 0.0)
        for name, size in shape.shapes().items()
    }
    return Eagle1Weights(shape=shape, tensors=tensors)


def layer_of(shape: Eagle1Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps,
    }


def save_safeailab(folder: Path, head: Eagle1Weights) -> Path:
    folder.mkdir(parents=True)
    words = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **layer_of(head.shape)}
    (folder / "config.json").write_text(json.dumps(words | {"bias": head.shape.bias}))
    matrix = torch.randn(head.shape.vocab, head.shape.hidden)
    torch.save({**head.tensors, "embed_tokens.weight": matrix}, folder / "pytorch_model.bin")
    return folder


def save_speculators(folder: Path, head: Eagle1Weights) -> Path:
    folder.mkdir(parents=True)
    words = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "fusion_bias": head.shape.bias,
        "layernorms": False,
        "transformer_layer_config": layer_of(head.shape),
        "speculators_config": {"verifier": {"name_or_path": "org/the-target"}},
    }
    (folder / "config.json").write_text(json.dumps(words))
    tensors = {}
    for name, tensor in head.tensors.items():
        for ours, theirs in SPECULATORS.items():
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("save", [save_safeailab, save_speculators])
@pytest.mark.parametrize("bias", [True, False])
def test_public_formats(
    tmp_path: Path, save: Callable[[Path, Eagle1Weights], Path], bias: bool
) -> None:
    want = random_weights(dataclasses.replace(SHAPE, bias=bias))
    found = eagle1.read(save(tmp_path / "head", want), "head")
    assert dataclasses.replace(found.shape, verifier="") == want.shape
    for name, tensor in want.tensors.items():
        assert torch.equal(found.tensors[name], tensor)


def reference(
    shape: Eagle1Shape, w: Mapping[str, Tensor], embedded: Tensor, hidden: Tensor
) -> Tensor:
    """Rows one at a time, in double precision and plain loops, from the paper's description: the
    guessed hidden states [Q, h]."""

    def times(name: str, x: Tensor) -> Tensor:
        return w[f"layers.0.{name}.weight"].double() @ x

    def turned(x: Tensor, position: int) -> Tensor:
        pairs = x.view(-1, 2, shape.dim // 2)
        steps = torch.arange(shape.dim // 2, dtype=torch.float64)
        angles = position * shape.rope_theta ** (-2 * steps / shape.dim)
        first, second = pairs[:, 0], pairs[:, 1]
        cosine, sine = angles.cos(), angles.sin()
        return torch.stack(
            [first * cosine - second * sine, second * cosine + first * sine], 1
        ).flatten()

    keys, values, states = [], [], []
    for position in range(len(embedded)):
        both = torch.cat([embedded[position], hidden[position]]).double()
        x = w["fc.weight"].double() @ both + w["fc.bias"].double()
        query = turned(times("self_attn.q_proj", x), position).view(shape.heads, -1)
        keys.append(turned(times("self_attn.k_proj", x), position).view(shape.kv_heads, -1))
        values.append(times("self_attn.v_proj", x).view(shape.kv_heads, -1))
        mixed = []
        for head, q in enumerate(query):
            group = head // (shape.heads // shape.kv_heads)
            scores = torch.stack([q @ key[group] for key in keys]) / math.sqrt(shape.dim)
            mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        x = x + times("self_attn.o_proj", torch.cat(mixed))
        norm = w["layers.0.post_attention_layernorm.weight"].double()
        inner = x / torch.sqrt((x * x).mean() + shape.eps) * norm
        gate = times("mlp.gate_proj", inner)
        x = x + times("mlp.down_proj", gate * torch.sigmoid(gate) * times("mlp.up_proj", inner))
        states.append(x)
    return torch.stack(states)


def test_the_head_computes_what_the_definition_says() -> None:
    """Committed rows, then a guess that goes on from the head's own state."""
    weights = random_weights(seed=3)
    embedding, lm_head = torch.randn(2, SHAPE.vocab, SHAPE.hidden).unbind()
    head = eagle1_head(weights, embedding, lm_head, lambda x: 2 * x)
    tokens = [3, 1, 4, 1, 5]
    hidden = head.fuse(torch.randn(len(tokens), SHAPE.hidden))
    cache = head.new_cache(1, 16)
    slot = cache.allocate()
    output = head.step([chain_rows(slot, tokens, logit_rows=[len(tokens) - 1])], cache, hidden)
    want = reference(SHAPE, weights.tensors, embedding[tokens], hidden)
    assert output.features is not None
    torch.testing.assert_close(output.features[:, 0].double(), want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        output.logits[-1:], (want[-1:].float() @ lm_head.T), atol=2e-3, rtol=1e-3
    )
    cache.commit(output, [slot], [range(len(tokens))])
    more = head.step([chain_rows(slot, [9])], cache, output.features[-1:, 0])
    states = torch.cat([hidden, output.features[-1:, 0]])
    longer = reference(SHAPE, weights.tensors, embedding[[*tokens, 9]], states)
    assert more.features is not None
    torch.testing.assert_close(more.features[:, 0].double(), longer[-1:], atol=2e-4, rtol=1e-4)


def for_the_tiny_target(scale: float = 0.05) -> Eagle1Weights:
    runtime = tiny_llm.llm().model.runtime
    shape = Eagle1Shape(
        hidden=runtime.hidden_size, heads=4, kv_heads=2, dim=16, inner=64, vocab=runtime.vocab_size
    )
    return random_weights(shape, scale=scale)


def test_what_it_goes_on_from_is_what_the_lm_head_sees() -> None:
    """The target's last layer, after its final norm."""
    runtime, name = tiny_llm.llm().model.runtime, str(tiny_llm.target())
    embedding, lm_head = read_matrices(name)
    head = eagle1_head(for_the_tiny_target(), embedding, lm_head, read_last_norm(name))
    cache = runtime.new_cache(1, 16)
    rows = chain_rows(cache.allocate(), [40, 41, 42], logit_rows=[2])
    output = runtime.step([rows], cache, [runtime.layers])
    assert output.features is not None
    seen = head.fuse(output.features.flatten(1))
    torch.testing.assert_close(seen[-1:] @ lm_head.T, output.logits[-1:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("runtime", ["native", "torch"])
@pytest.mark.parametrize("options", [{"tree_width": 1}, {"draft_sample_method": "probabilistic"}])
def test_the_text_is_that_of_plain_decoding(
    tmp_path: Path, runtime: str, options: dict[str, Any]
) -> None:
    folder = save_safeailab(tmp_path / "head", for_the_tiny_target())
    plain = tiny_llm.llm(runtime=runtime)
    fast = plain.with_speculation(
        {"method": "eagle", "model": str(folder), "path_floor": 0.0, **options}
    )
    params = SamplingParams(max_tokens=30, temperature=0)
    prompts = ["the fox on the ice", "hide"]
    want, found = (llm.generate(prompts, params) for llm in (plain, fast))
    for a, b in zip(want, found, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    assert fast.engine.metrics.drafted > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"draft_vocab_size": 10}, "is an EAGLE-3 head"),
        ({"layernorms": True}, "further norms"),
        ({"num_hidden_layers": 2}, "a head of 2 layers"),
        ({"intermediate_size": None}, "lacks intermediate_size: no EAGLE head"),
        ({"bias": False}, "has, and EAGLE-1 has not, fc.bias"),
        ({"hidden_size": 64}, "by its config.json"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: dict[str, Any], message: str) -> None:
    folder = save_safeailab(tmp_path / "head", random_weights())
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | words))
    with pytest.raises(SlipstreamError, match=message):
        eagle1.read(folder, "head")


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    folder = save_safeailab(tmp_path / "head", random_weights())
    with pytest.raises(SlipstreamError, match="for another target: its hidden size is 32"):
        LLM(str(tiny_llm.target()), speculative_config={"method": "eagle", "model": str(folder)})
