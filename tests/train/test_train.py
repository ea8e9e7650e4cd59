"""Training of a head end to end on a tiny target: it learns, it goes on, it says what is wrong."""

from __future__ import annotations

import dataclasses
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import tiny_eagle
import torch
from models.tiny_heads import CONFIG
from safetensors.torch import load_file
from train import unrolled

from slipstream.errors import SlipstreamError
from slipstream.models import eagle3, medusa
from slipstream.models.eagle3_module import Eagle3Module
from slipstream.train import eagle3 as recipe
from slipstream.train import loop
from slipstream.train.config import TrainConfig, TrainOptions
from slipstream.train.questions import read_questions
from slipstream.train.unroll import unroll


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_trained_head_is_right_more_often_than_it_was(tmp_path: Path) -> None:
    folder, tau = tiny_eagle.trained()
    log = loop.read_log(folder / loop.LOG)
    assert log[-1]["tau"] > log[0]["tau"]
    assert tau["chain, T=0"] > 1.5
    assert tau["tree, T=0"] >= tau["chain, T=0"]
    assert eagle3.read(folder, "head").config.taps == (0, 1, 2)
    assert "the command" in (folder / "README.md").read_text()
    assert (folder / "curves.png").is_file()


def test_medusa_heads_come_from_the_same_command(tmp_path: Path) -> None:
    """Text, training and measuring as for EAGLE-3; the features are the last layer's alone."""
    settings = tiny_eagle.config(tmp_path / "heads", method="medusa", heads=3, epochs=30)
    found = tiny_eagle.run(settings)
    heads = medusa.read(Path(found["head"]), "heads")
    assert heads.shape.heads == 3
    log = loop.read_log(Path(found["head"]) / loop.LOG)
    assert log[-1]["tau"] > log[0]["tau"]
    assert found["mean_tokens_per_step"]["chain, T=0"] > 1.1
    assert "3 Medusa heads" in (Path(found["head"]) / "README.md").read_text()


class Killed(BaseException):
    pass


def test_a_run_that_was_killed_goes_on_to_the_same_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, _ = tiny_eagle.trained()
    settings = tiny_eagle.config(tmp_path / "killed")
    monkeypatch.setattr(TrainOptions, "save_minutes", 0.0)
    real, steps = recipe.training_loss, 0

    def loss(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 8:
            raise Killed
        return real(*args)

    monkeypatch.setattr(recipe, "training_loss", loss)
    object.__setattr__(settings.options, "save_minutes", 0.0)
    with pytest.raises(Killed):
        tiny_eagle.run(settings)
    assert not (settings.out / "head").exists()
    tiny_eagle.run(settings)
    total = loop.read_log(want / loop.LOG)[-1]["step"]
    assert steps == total + 1  # seven steps were not done again
    for name, tensor in weights(want).items():
        assert torch.equal(tensor, weights(settings.out / "head")[name]), name


def test_rows_of_a_later_pass_see_committed_rows_and_their_own_path() -> None:
    """Pass i, row s: pass 0 up to s - i, then one row of each pass, the last its own."""
    rows, index = 6, 2
    seen = unrolled.seen(rows, index).view(rows, index + 1, rows)
    for s in range(index, rows):
        want = {(0, t) for t in range(s - index + 1)} | {(1, s - 1), (2, s)}
        assert {(int(p), int(t)) for p, t in seen[s].nonzero()} == want


@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_later_passes_run_only_the_rows_they_need(passes: int, kv_heads: int) -> None:
    """Prompts and answers of several lengths; the same logits and gradients as by definition."""
    config = dataclasses.replace(CONFIG, kv_heads=kv_heads)
    module = Eagle3Module(config, torch.randn(config.vocab, config.hidden))
    counts = torch.zeros(4, 12, dtype=torch.bool)
    for b, (begin, end) in enumerate(((3, 9), (5, 12), (3, 4), (6, 6))):
        counts[b, begin:end] = True
    counts[0, 5] = False  # of a token that the draft vocabulary doesn't have
    batch = recipe.Batch(
        tokens=torch.randint(config.vocab, counts.shape),
        features=torch.randn(*counts.shape, config.features),
        counts=counts,
        probs=torch.empty(0),
        best=torch.empty(0),
        missed=0,
    )
    found = []
    for logits in (
        unrolled.unroll(module, batch, passes),
        unroll(module, batch.tokens, batch.features, counts, passes),
    ):
        module.zero_grad()
        torch.stack(logits).pow(2).mean().backward()
        gradients = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        found.append((torch.stack(logits), gradients))
    for want, have in zip(*found, strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "is empty"),
        ("{}\n", ":1: no text under"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "nobody asks"),
        ('{"prompt": "   "}\n', "no text under"),
        ("not json\n", "not a JSON object"),
    ],
)
def test_data_without_a_question_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(lines)
    with pytest.raises(SlipstreamError, match=message):
        read_questions(path)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    data = tiny_eagle.questions(tmp_path / "three.jsonl", 3)
    with pytest.raises(SlipstreamError, match="fewer than 1000 tokens"):
        tiny_eagle.run(tiny_eagle.config(tmp_path / "few", data=str(data)))


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(SlipstreamError, match=r"features need .* has 0\.0 GB free"):
        tiny_eagle.run(tiny_eagle.config(tmp_path / "full"))
    assert not list((tmp_path / "full" / "features").iterdir())


def test_a_disk_that_fills_leaves_whole_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    def full(parts: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(SlipstreamError, match="make room, then run the same command again"):
            tiny_eagle.run(tiny_eagle.config(tmp_path / "fills"))
    assert not list((tmp_path / "fills" / "features").iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle"}, "unknown method 'eagle': did you mean 'eagle3'"),
        ({"method": "medusa", "taps": (1, 2)}, "taps is an option of eagle3, not of medusa"),
        ({"heads": 3}, "heads is an option of medusa, not of eagle3"),
        ({"loss": "l2"}, "unknown loss 'l2'"),
        ({"passes": 0}, "passes must be an integer of at least 1"),
        ({"keep_answers": True}, "--keep-answers is of a file"),
    ],
)
def test_options_out_of_range(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        TrainConfig(**({"method": "eagle3", "out": tmp_path} | changes))
