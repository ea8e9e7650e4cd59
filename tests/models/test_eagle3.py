"""EAGLE-3 checkpoints: both public formats, the forward pass by its definition, what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny_heads import CONFIG, random_head, save_safeailab
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models import eagle3
from slipstream.models.eagle3 import Eagle3Config, Eagle3Weights
from slipstream.models.eagle3_module import Eagle3Module


def same(a: Eagle3Weights, b: Eagle3Weights) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    head = random_head()
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):  # the second replaces the first
        eagle3.write(folder, head, speculative_tokens=4)
        again = eagle3.read(folder, "head")
        same(head, again)
        assert again.config == head.config
        head = again
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("normed", [True, False])
def test_what_speculators_and_vllm_look_for_is_written(tmp_path: Path, normed: bool) -> None:
    head = random_head(dataclasses.replace(CONFIG, norm_before_residual=normed))
    eagle3.write(tmp_path / "head", head, speculative_tokens=5)
    words = json.loads((tmp_path / "head" / "config.json").read_text())
    assert words["speculators_model_type"] == "eagle3"
    assert words["norm_before_residual"] is normed
    assert words["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert words["transformer_layer_config"]["model_type"] == "llama"
    (proposal,) = words["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 5
    assert eagle3.read(tmp_path / "head", "head").config.norm_before_residual is normed


@pytest.mark.parametrize("pickled", [True, False])
def test_safeailab_checkpoints(tmp_path: Path, pickled: bool) -> None:
    head = random_head()
    again = eagle3.read(save_safeailab(tmp_path / "head", head, pickled=pickled), "head")
    same(head, again)
    assert again.config.taps == ()  # the target's own number of layers decides
    assert again.config.hidden == CONFIG.hidden


def test_layers_by_their_output(tmp_path: Path) -> None:
    """SpecForge nests them, and names the layer that a feature comes out of."""
    head = random_head(dataclasses.replace(CONFIG, taps=()))
    folder = save_safeailab(tmp_path / "head", head)
    words = json.loads((folder / "config.json").read_text())
    words["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}
    (folder / "config.json").write_text(json.dumps(words))
    assert eagle3.read(folder, "head").config.taps == (2, 15, 27)


def test_a_full_vocabulary_needs_no_maps(tmp_path: Path) -> None:
    head = random_head(dataclasses.replace(CONFIG, draft_vocab=CONFIG.vocab))
    tensors = {k: v for k, v in head.tensors.items() if k not in ("d2t", "t2d")}
    folder = save_safeailab(tmp_path / "head", dataclasses.replace(head, tensors=tensors))
    assert eagle3.read(folder, "head").target_ids.tolist() == list(range(CONFIG.vocab))


def test_draft_tokens_that_are_padding_are_left_out() -> None:
    head = random_head(seed=5)
    ids = head.target_ids
    size = int(ids[-2]) + 1
    less = eagle3.within(head, size)
    assert less.target_ids.tolist() == ids[:-1].tolist()
    assert torch.equal(less.tensors["lm_head.weight"], head.tensors["lm_head.weight"][:-1])
    assert less.config.shapes()["lm_head.weight"] == less.tensors["lm_head.weight"].shape
    assert eagle3.within(head, CONFIG.vocab) is head


@pytest.mark.parametrize(("layers", "taps"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (2, (1, 1, 0))])
def test_layers_tapped_by_default(layers: int, taps: tuple[int, ...]) -> None:
    assert eagle3.default_taps(layers) == taps


# The forward pass


def reference(
    config: Eagle3Config,
    w: Mapping[str, Tensor],
    embedding: Tensor,
    tokens: list[int],
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """A chain of rows, one at a time, in double precision and plain loops, from the paper's
    description: hidden states [Q, h], not normed, and logits [Q, d]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + config.eps) * w[name].double()

    def times(name: str, x: Tensor) -> Tensor:
        return w[f"layers.0.{name}.weight"].double() @ x

    def turned(x: Tensor, position: int) -> Tensor:
        out, half = x.clone(), config.dim // 2
        for head in range(len(x) // config.dim):
            for i in range(half):
                angle = position * config.rope_theta ** (-2 * i / config.dim)
                a, b = head * config.dim + i, head * config.dim + i + half
                out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
                out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
        return out

    keys: list[Tensor] = []
    values: list[Tensor] = []
    states, logits = [], []
    for position, token in enumerate(tokens):
        normed = norm(hidden[position].double(), "layers.0.hidden_norm.weight")
        residual = normed if config.norm_before_residual else hidden[position].double()
        embedded = norm(embedding[token].double(), "layers.0.input_layernorm.weight")
        x = torch.cat([embedded, normed])
        query = turned(times("self_attn.q_proj", x), position)
        keys.append(turned(times("self_attn.k_proj", x), position))
        values.append(times("self_attn.v_proj", x))
        mixed = []
        for head in range(config.heads):
            group = head // (config.heads // config.kv_heads)
            part = slice(group * config.dim, (group + 1) * config.dim)
            q = query[head * config.dim : (head + 1) * config.dim]
            scores = torch.stack([q @ k[part] for k in keys]) / math.sqrt(config.dim)
            shares = scores.softmax(0)
            mixed.append(sum(s * v[part] for s, v in zip(shares, values, strict=True)))
        x = residual + times("self_attn.o_proj", torch.cat(mixed))  # type: ignore[arg-type]
        inner = norm(x, "layers.0.post_attention_layernorm.weight")
        gate = times("mlp.gate_proj", inner)
        x = x + times("mlp.down_proj", gate * torch.sigmoid(gate) * times("mlp.up_proj", inner))
        states.append(x)
        logits.append(w["lm_head.weight"].double() @ norm(x, "norm.weight"))
    return torch.stack(states), torch.stack(logits)


def module_of(head: Eagle3Weights, embedding: Tensor) -> Eagle3Module:
    module = Eagle3Module(head.config, embedding)
    floats = {k: v for k, v in head.tensors.items() if v.is_floating_point()}
    module.load_state_dict(floats)
    return module.eval()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("split", [0, 3])
def test_the_module_computes_what_the_definition_says(normed: bool, split: int) -> None:
    """In one pass, and in two with KV in between."""
    config = dataclasses.replace(CONFIG, norm_before_residual=normed)
    head = random_head(config, seed=3)
    embedding = torch.randn(config.vocab, config.hidden, generator=torch.Generator().manual_seed(1))
    tokens = [3, 1, 4, 1, 5, 9, 2]
    features = torch.randn(len(tokens), 3 * config.target_hidden)
    module = module_of(head, embedding)
    hidden = module.fuse(features)
    torch.testing.assert_close(hidden, features @ head.tensors["fc.weight"].T)
    want_states, want_logits = reference(config, head.tensors, embedding, tokens, hidden.detach())
    parts, past = [], None
    for begin, end in ((0, split), (split, len(tokens))):
        if begin == end:
            continue
        seen = torch.ones(end - begin, end, dtype=torch.bool).tril(begin)
        positions = torch.arange(begin, end)[None]
        ids = torch.tensor([tokens[begin:end]])
        out, past = module(ids, hidden[None, begin:end], positions, seen, past)
        parts.append(out[0])
    states = torch.cat(parts)
    torch.testing.assert_close(states.double(), want_states, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(module.logits(states).double(), want_logits, atol=2e-4, rtol=1e-4)


# What is refused


def damage_config(**words: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | words))

    return damage


def damage_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def put(tensors: dict[str, Tensor], name: str, at: int, value: float) -> None:
    tensors[name].view(-1)[at] = value


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_config(hidden_size=None), "config.json lacks hidden_size: no EAGLE-3 head"),
        (damage_config(draft_vocab_size=None), "lacks draft_vocab_size"),
        (damage_config(num_hidden_layers=2), "a head of 2 layers"),
        (damage_config(rope_scaling={"rope_type": "llama3"}), "scaled rotary"),
        (damage_config(intermediate_size=47), r"down_proj.weight is \[32, 48\], .* \[32, 47\]"),
        (damage_config(target_hidden_size=32), r"fc.weight is \[32, 72\], .* \[32, 96\]"),
        (damage_tensors(lambda t: t.pop("fc.weight")), "the checkpoint lacks fc.weight"),
        (damage_tensors(lambda t: t.pop("midlayer.hidden_norm.weight")), "lacks layers.0.hidden_n"),
        (
            damage_tensors(lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(32)})),
            "EAGLE-3 has not, layers.0.self_attn.q_proj.bias",
        ),
        (
            damage_tensors(lambda t: put(t, "lm_head.weight", 7, math.nan)),
            "lm_head.weight holds numbers that are none",
        ),
        (damage_tensors(lambda t: put(t, "d2t", 11, 100)), "d2t leads out of the vocabulary of 50"),
        (damage_tensors(lambda t: put(t, "d2t", 0, -1)), "d2t leads out of the vocabulary"),
        (
            damage_tensors(lambda t: t["d2t"].copy_(-torch.arange(12))),
            "d2t leads to tokens twice",
        ),
        (damage_tensors(lambda t: t["t2d"].logical_not_()), "t2d doesn't mark"),
        (lambda folder: (folder / "config.json").unlink(), "config.json can't be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither .* nor pytorch_model"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 9), "can't be read"),
    ],
)
def test_a_damaged_head_is_refused(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = save_safeailab(tmp_path / "head", random_head())
    damage(folder)
    with pytest.raises(SlipstreamError, match=f"my-head: .*{message}"):
        eagle3.read(folder, "my-head")
