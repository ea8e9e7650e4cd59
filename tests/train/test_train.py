"""Training of a head end to end on a tiny target: it learns, it goes on, it says what is wrong."""

from __future__ import annotations

import dataclasses
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import tiny_eagle
import tiny_llm
import torch
from models.tiny_heads import CONFIG
from safetensors.torch import load_file
from train import unrolled

from slipstream.errors import SlipstreamError
from slipstream.models import eagle3, medusa
from slipstream.models.eagle3_module import Eagle3Module
from slipstream.runtimes.torch_head import eagle3_head
from slipstream.train import eagle3 as recipe
from slipstream.train import features, loop, text
from slipstream.train.config import TrainConfig, TrainOptions
from slipstream.train.eagle3_loss import Batch, Collate
from slipstream.train.questions import read_questions
from slipstream.train.target import read_target
from slipstream.train.unroll import unroll
from slipstream.types import chain_rows


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


def test_options_left_out_are_the_methods_own(tmp_path: Path) -> None:
    settings = tiny_eagle.config(tmp_path / "own", passes=None, taps=None, epochs=1)
    head = eagle3.read(Path(tiny_eagle.run(settings)["head"]), "head")
    assert head.config.taps == recipe.default_taps(tiny_llm.llm().model.runtime.layers)


def trained_on(head: Path, out: Path, **changes: Any) -> TrainConfig:
    sizes = {"taps": None, "heads": None, "draft_vocab": None}
    return tiny_eagle.config(out, init=str(head), epochs=1, **(sizes | changes))


def test_a_head_is_trained_on(tmp_path: Path) -> None:
    """It goes on from what it was, however small the step."""
    first, _ = tiny_eagle.trained()
    settings = trained_on(first, tmp_path / "on", learning_rate=1e-6)
    second = Path(tiny_eagle.run(settings)["head"])
    for name, tensor in weights(first).items():
        torch.testing.assert_close(weights(second)[name], tensor, atol=2e-3, rtol=1e-2)
    before, after = loop.read_log(first / loop.LOG)[-1], loop.read_log(second / loop.LOG)[-1]
    assert after["tau"] == pytest.approx(before["tau"], abs=0.02)
    assert after["loss"] == pytest.approx(before["loss"], rel=0.5)


def test_medusa_heads_are_trained_on(tmp_path: Path) -> None:
    settings = tiny_eagle.config(tmp_path / "heads", method="medusa", heads=2, epochs=1)
    first = Path(tiny_eagle.run(settings)["head"])
    settings = trained_on(first, tmp_path / "on", method="medusa", learning_rate=1e-6)
    second = Path(tiny_eagle.run(settings)["head"])
    before, after = (medusa.read(folder, "heads").tensors for folder in (first, second))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=2e-3, rtol=1e-2)


def test_a_head_to_train_on_must_fit(tmp_path: Path) -> None:
    head, _ = tiny_eagle.trained()
    with pytest.raises(SlipstreamError, match="has its own draft_vocab"):
        trained_on(head, tmp_path, draft_vocab=30)
    with pytest.raises(SlipstreamError, match="no draft head 'nowhere'"):
        trained_on(Path("nowhere"), tmp_path)
    with pytest.raises(SlipstreamError, match="has neither medusa_lm_head"):
        tiny_eagle.run(trained_on(head, tmp_path, method="medusa"))
    assert [path.name for path in tmp_path.iterdir()] == []


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1e-3}, "learning_rate 0.002, not 0.001"),
        ({"taps": (0, 1)}, r"taps \[0, 1, 2\], not \[0, 1\]"),
        ({"data": "other"}, "a run with data"),
    ],
)
def test_a_folder_goes_on_with_its_own_settings(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Weights and text of other settings would be taken for its own."""
    out = tiny_eagle.trained()[0].parent
    if "data" in change:
        change = {"data": str(tiny_eagle.questions(tmp_path / "other.jsonl", 41))}
    with pytest.raises(SlipstreamError, match=message):
        tiny_eagle.run(tiny_eagle.config(out, **change))


def test_a_loss_that_is_no_number_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_eagle.config(tmp_path / "nan")
    object.__setattr__(settings.options, "save_minutes", 0.0)
    real, steps = recipe.training_loss, 0

    def loss(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return real(*args) * (float("nan") if steps == 4 else 1.0)

    monkeypatch.setattr(recipe, "training_loss", loss)
    with pytest.raises(SlipstreamError, match="the loss of step 4 is no number"):
        tiny_eagle.run(settings)
    state = torch.load(settings.out / "state" / "state.pt", weights_only=True)
    assert state["step"] == 3
    assert all(bool(p.isfinite().all()) for p in state["module"].values())


def test_layers_that_are_not_there_are_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="has 2 layers"):
        tiny_eagle.run(tiny_eagle.config(tmp_path / "taps", taps=(0, 1, 9)))
    assert not (tmp_path / "taps").exists()


def test_which_position_learns_what(tmp_path: Path) -> None:
    """Share of drafts that get to each position, against the head at work, row by row."""
    folder, _ = tiny_eagle.trained()
    weights, passes = eagle3.read(folder, "head"), 3
    target = read_target(str(tiny_llm.target()))
    shards = sorted((folder.parent / "features").glob("*.safetensors"))
    conversations = list(text.read(folder.parent / "text.jsonl"))
    entries = list(features.entries(conversations, weights.config.taps, folder.parent / "features"))
    assert shards
    example = max((e.load() for e in entries[:8]), key=len)
    ids = weights.target_ids.tolist()
    module = Eagle3Module(weights.config, target.embedding)
    module.load_state_dict({k: v.float() for k, v in weights.tensors.items() if "2" not in k})
    size = torch.ones(weights.config.features)  # what is on disk takes features as they are
    collate = Collate(target, ids, size, passes, torch.device("cpu"))
    with torch.autocast("cpu", enabled=False):
        batch = collate([example])
        found = unroll(module, batch.tokens, module.fuse(batch.features), batch.counts, passes)
    head = eagle3_head(weights, target.embedding)
    hidden = head.fuse(example.features[:-1].float())
    tokens = example.tokens[1:].tolist()
    counted = batch.counts[0].nonzero()[:, 0].tolist()
    for row in counted[:: max(1, len(counted) // 6)]:
        for index, logits in enumerate(found):
            # the last ``index`` tokens before are drafted: the head goes on from its own states
            known = row + 1 - index
            cache = head.new_cache(1, len(tokens))
            slot = cache.allocate()
            states = hidden[:known]
            for drafted in range(index + 1):
                rows = chain_rows(slot, tokens[: known + drafted], logit_rows=[known + drafted - 1])
                output = head.step([rows], cache, states)
                assert output.features is not None
                states = torch.cat([states, output.features[-1:, 0]])
            torch.testing.assert_close(
                logits[counted.index(row)], output.logits[0], atol=2e-3, rtol=2e-3
            )
    normed = target.normed(example.last.float())
    for row, probs in zip(counted, batch.probs, strict=True):
        want = (target.lm_head @ normed[row + 1])[weights.target_ids].softmax(-1)
        torch.testing.assert_close(probs, want, atol=1e-4, rtol=1e-3)


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
    batch = Batch(
        tokens=torch.randint(config.vocab, counts.shape),
        features=torch.randn(*counts.shape, config.features),
        inside=torch.ones_like(counts),
        counts=counts,
        probs=torch.empty(0),
        best=torch.empty(0),
        missed=0,
    )
    found = []
    for logits in (
        unrolled.unroll(module, batch, passes),
        unroll(module, batch.tokens, module.fuse(batch.features), counts, passes),
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
