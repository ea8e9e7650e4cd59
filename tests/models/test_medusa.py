"""Medusa checkpoints: the public format, our own words in it, the forward pass, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny_medusa import PLAIN, SHAPES, random_heads, save_published
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models import medusa
from slipstream.models.medusa import MedusaHeads
from slipstream.models.medusa_module import module_of
from slipstream.runtimes.medusa_heads import PackedHeads

CPU = torch.device("cpu")


def same(a: MedusaHeads, b: MedusaHeads) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name


@pytest.mark.parametrize("name", SHAPES)
def test_a_round_trip_changes_nothing(tmp_path: Path, name: str) -> None:
    heads = random_heads(SHAPES[name])
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):  # the second replaces the first
        medusa.write(folder, heads)
        again = medusa.read(folder, "heads")
        same(heads, again)
        assert again.shape == heads.shape
        heads = again
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_checkpoint_without_our_extensions_has_none_of_our_words(tmp_path: Path) -> None:
    medusa.write(tmp_path / "heads", random_heads())
    words = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert words["medusa_num_heads"] == 3
    assert words["medusa_num_layers"] == 1
    assert not words.keys() & {"draft_vocab_size", "medusa_shared_lm_head"}
    assert set(load_file(tmp_path / "heads" / "medusa_lm_head.safetensors")) == {
        *(f"{i}.0.linear.{part}" for i in range(3) for part in ("weight", "bias")),
        *(f"{i}.1.weight" for i in range(3)),
    }


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("pickled", [True, False])
def test_published_checkpoints(tmp_path: Path, pickled: bool, prefix: str) -> None:
    """Their config says no sizes, and once fewer heads than there are."""
    heads = random_heads()
    for said in (3, 2):
        folder = tmp_path / str(said)
        save_published(folder, heads.tensors, pickled=pickled, prefix=prefix, medusa_num_heads=said)
        again = medusa.read(folder, "heads")
        same(heads, again)
        assert (again.shape.heads, again.shape.hidden, again.shape.vocab) == (3, 32, 50)
        assert again.shape.verifier == "org/x"
        assert again.target_ids.tolist() == list(range(50))


def test_blocks_that_share_their_memory_are_written(tmp_path: Path) -> None:
    """FasterDecoding's heads of two layers are one block twice."""
    heads = random_heads(SHAPES["two layers"])
    tensors = dict(heads.tensors)
    for part in ("weight", "bias"):
        tensors[f"0.1.linear.{part}"] = tensors[f"0.0.linear.{part}"]
    heads = MedusaHeads(shape=heads.shape, tensors=tensors)
    medusa.write(tmp_path / "heads", heads)
    same(heads, medusa.read(tmp_path / "heads", "heads"))


# The forward pass


def reference(heads: MedusaHeads, hidden: Tensor) -> Tensor:
    """[h] → [K, d], in double precision and plain loops, from the paper's description."""
    shape, w = heads.shape, {k: v.double() for k, v in heads.tensors.items()}
    rows = []
    for head in range(shape.heads):
        x = hidden.double()
        for layer in range(shape.layers):
            at = f"{head}.{layer}.linear."
            z = [float(r @ x) + float(b) for r, b in zip(w[at + "weight"], w[at + "bias"])]  # noqa: B905
            x = x + torch.tensor([v / (1 + math.exp(-v)) for v in z], dtype=torch.float64)
        output = w["lm_head.weight"] if shape.shared else w[f"{head}.{shape.layers}.weight"]
        rows.append(torch.stack([row @ x for row in output]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", SHAPES)
def test_module_and_packed_heads_compute_what_the_definition_says(name: str) -> None:
    heads = random_heads(SHAPES[name], seed=3)
    for count in (1, 2, 40):
        hidden = torch.randn(count, 32)
        want = torch.stack([reference(heads, row) for row in hidden], 1)
        got = module_of(heads)(hidden)
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
        packed = PackedHeads(heads, 50, device=CPU)
        torch.testing.assert_close(packed.logits(hidden).double(), want, atol=1e-4, rtol=1e-4)
        # of int8 the weights' rounding is left: a 254th of a row's largest
        rough = PackedHeads(heads, 50, device=CPU, int8=True).logits(hidden).double()
        assert (rough - want).norm() < 0.02 * want.norm()
    assert module_of(heads)(hidden[:6].view(2, 3, 32)).shape[1:3] == (2, 3)


def test_odd_sizes_are_not_given_to_the_int8_product() -> None:
    """It reads 32 numbers at a time, past the end of a row if need be."""
    heads = random_heads(medusa.MedusaShape(heads=2, layers=1, hidden=20, vocab=7, draft_vocab=7))
    hidden = torch.randn(3, 20)
    packed = PackedHeads(heads, 7, device=CPU, int8=True)
    torch.testing.assert_close(packed.logits(hidden), module_of(heads)(hidden))


@pytest.mark.parametrize("name", ["plain", "both"])
def test_guesses_are_the_most_probable_tokens_that_the_tokenizer_knows(name: str) -> None:
    heads = random_heads(SHAPES[name], seed=5)
    hidden = torch.randn(2, 32)
    guesses = PackedHeads(heads, 40, device=CPU).guesses(hidden, 4)
    known = heads.target_ids < 40
    log_probs = module_of(heads)(hidden)[..., known].log_softmax(-1)
    for row, (tokens, scores) in enumerate(guesses):
        best = log_probs[:, row].topk(4)
        assert tokens == heads.target_ids[known][best.indices].tolist()
        torch.testing.assert_close(torch.tensor(scores), best.values)


# What is refused


def damage_config(**words: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | words))

    return damage


def damage_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "medusa_lm_head.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def put(tensors: dict[str, Tensor], name: str, at: int, value: float) -> None:
    tensors[name].view(-1)[at] = value


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_config(medusa_num_heads=None), "config.json lacks .* no Medusa heads"),
        (damage_config(medusa_num_layers="1"), "config.json lacks .* no Medusa heads"),
        (damage_config(medusa_num_layers=-1), "heads of -1 layers"),
        (damage_config(medusa_num_heads=10**9), "1000000000 heads of 1 layers in 11 tensors"),
        (damage_config(medusa_num_heads=4), "lacks 3.0.linear.bias, 3.0.linear.weight, 3.1.weight"),
        (damage_config(medusa_num_layers=2), "has no output layer for head 0"),
        (damage_config(medusa_shared_lm_head=True), "has no output layer"),
        (damage_config(hidden_size=16), r"0.0.linear.bias is \[32\], .* \[16\]"),
        (damage_config(vocab_size=60), r"t2d is \[50\], by its config.json \[60\]"),
        (damage_config(draft_vocab_size=13), r"0.1.weight is \[12, 32\], .* \[13, 32\]"),
        (damage_config(draft_vocab_size=None), r"has, and Medusa has not, d2t, t2d"),
        (damage_tensors(lambda t: t.pop("1.0.linear.bias")), "lacks 1.0.linear.bias"),
        (damage_tensors(lambda t: t.pop("d2t")), "lacks d2t"),
        (
            damage_tensors(lambda t: t.update({"0.1.bias": torch.ones(12)})),
            "Medusa has not, 0.1.bias",
        ),
        (
            damage_tensors(lambda t: put(t, "2.1.weight", 7, math.nan)),
            "2.1.weight holds numbers that are none",
        ),
        (damage_tensors(lambda t: put(t, "d2t", 11, 100)), "d2t leads out of the vocabulary of 50"),
        (damage_tensors(lambda t: t["t2d"].logical_not_()), "t2d doesn't mark"),
        (lambda folder: (folder / "config.json").unlink(), "config.json can't be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (
            lambda folder: (folder / "medusa_lm_head.safetensors").unlink(),
            "neither medusa_lm_head.safetensors nor medusa_lm_head.pt",
        ),
        (
            lambda folder: (folder / "medusa_lm_head.safetensors").write_bytes(b"x" * 9),
            "can't be read",
        ),
    ],
)
def test_damaged_heads_are_refused(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    medusa.write(tmp_path / "heads", random_heads(SHAPES["reduced"]))
    damage(tmp_path / "heads")
    with pytest.raises(SlipstreamError, match=f"my-heads: .*{message}"):
        medusa.read(tmp_path / "heads", "my-heads")


@pytest.mark.parametrize("content", [b"no pickle", None])
def test_a_damaged_pickle_is_refused(tmp_path: Path, content: bytes | None) -> None:
    folder = save_published(tmp_path / "heads", random_heads(PLAIN).tensors, pickled=True)
    if content is None:
        torch.save(torch.ones(2), folder / "medusa_lm_head.pt")
    else:
        (folder / "medusa_lm_head.pt").write_bytes(content)
    with pytest.raises(SlipstreamError, match=r"my-heads: .*(can't be read|no tensors by name)"):
        medusa.read(folder, "my-heads")
