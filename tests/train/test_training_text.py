"""Training text: the model's own questions, a user's, and what a kill leaves of either."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_llm
import torch
from safetensors.torch import load_file

from slipstream.errors import SlipstreamError
from slipstream.train import asking, features, text
from slipstream.train.recorder import Reader, Recorder, recording
from slipstream.train.target import read_target
from slipstream.train.text import Conversation


@pytest.fixture(autouse=True)
def long_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model seldom comes to an end."""
    monkeypatch.setattr(asking, "_LONGEST", 512)


class Killed(BaseException):
    pass


def make(path: Path, tokens: int = 3500) -> list[Conversation]:
    text.make(
        tiny_llm.llm(),
        path,
        tokens=tokens,
        max_tokens=24,
        seed=3,
        report=lambda _: None,
        round_size=16,  # a third of them end by themselves
    )
    return list(text.read(path))


def test_a_killed_run_goes_on_to_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = make(tmp_path / "whole.jsonl")
    rounds = 0

    def replace(*_: Any) -> None:
        raise Killed

    real = text.answer

    with monkeypatch.context() as patch:

        def answer(*args: Any) -> list[Conversation]:
            nonlocal rounds
            rounds += 1
            if rounds == 2:  # while its round is written
                patch.setattr(text.os, "replace", replace)
            return real(*args)

        patch.setattr(text, "answer", answer)
        with pytest.raises(Killed):
            make(tmp_path / "killed.jsonl")
    before = list(text.read(tmp_path / "killed.jsonl"))
    assert before == want[: len(before)]
    assert 0 < len(before) < len(want)
    assert make(tmp_path / "killed.jsonl") == want


def test_questions_are_the_models_own_and_some_bring_a_text(tmp_path: Path) -> None:
    found = make(tmp_path / "text.jsonl", 7000)
    llm = tiny_llm.llm()
    opening = asking.opening(llm)
    assert all(list(c.prompt[: len(opening)]) == opening for c in found)
    prompts = [llm.tokenizer.decode(c.prompt) for c in found]
    for patterns in (asking.ON_TEXTS, asking.ON_SUBJECTS):
        known = [pattern.split("{")[0] for pattern in patterns if not pattern.startswith("{")]
        assert any(words in prompt for prompt in prompts for words in known)
    assert len({tuple(c.answer) for c in found}) > len(found) / 2


def test_features_are_recorded_as_the_answers_are_written(tmp_path: Path) -> None:
    """The same shards as computed from the text alone."""
    llm, taps = tiny_llm.llm(), (0, 1)
    target = read_target(str(tiny_llm.target()))
    recorder, reader = Recorder(taps, llm.model.runtime.layers), Reader(target)

    def example(conversation: Conversation) -> features.Example | None:
        rows = recorder.take(conversation)
        return None if rows is None else reader.example(conversation, rows)

    text.make(
        llm,
        tmp_path / "text.jsonl",
        tokens=16_000,
        max_tokens=24,
        seed=5,
        report=lambda _: None,
        answerer=recording(llm, recorder),
        on_round=lambda made: features.keep(made, taps, tmp_path / "kept", example),
        round_size=48,
    )
    conversations = list(text.read(tmp_path / "text.jsonl"))
    list(features.compute(llm, conversations, taps, tmp_path / "computed"))
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert 0 < len(kept) == len(conversations) // 32
    for name in kept:
        have, want = (load_file(tmp_path / folder / name) for folder in ("kept", "computed"))
        for key in want:
            assert torch.equal(have[key], want[key]), key


def test_every_task_is_filled_in() -> None:
    pick = random.Random(0)
    texts = ["The lighthouse keeper slept. Two!", "Three."]
    for pattern in (*asking.ON_TEXTS, *asking.ON_SUBJECTS):
        filled = {
            asking.fill(pattern, "Why?", ("German", f"Ja {n}."), texts, pick) for n in range(20)
        }
        assert len(filled) > 1
        assert not any("{" in words or "}" in words for words in filled)


def answer_all(
    path: Path, questions: Sequence[Any], *, keep: bool = False, **more: Any
) -> list[Conversation]:
    text.answer_all(
        tiny_llm.llm(**more),
        path,
        questions,
        max_tokens=12,
        keep=keep,
        seed=0,
        report=lambda _: None,
        round_size=2,
    )
    return list(text.read(path))


def asked(words: str, answer: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": words}]
    return messages + ([{"role": "assistant", "content": answer}] if answer else [])


def test_answers_that_are_kept_and_those_that_are_not_there(tmp_path: Path) -> None:
    questions = [asked("the fox", "ran"), asked("a bear"), asked("an ode", "to ink")]
    llm = tiny_llm.llm()
    kept = {c.number: c for c in answer_all(tmp_path / "kept.jsonl", questions, keep=True)}
    assert [llm.tokenizer.decode(kept[n].answer) for n in (0, 2)] == ["ran", "to ink"]
    assert len(kept[1].answer) == 11  # 12 without the last, the target's
    again = answer_all(tmp_path / "own.jsonl", questions)
    assert [c.number for c in again] == [0, 1, 2]
    assert all(len(c.answer) == 11 for c in again)


def test_what_is_too_long_is_left_out(tmp_path: Path) -> None:
    questions = [asked("short", "yes"), asked("long " * 40, "no"), asked("short", "no " * 40)]
    found = answer_all(tmp_path / "text.jsonl", questions, keep=True, max_model_len=80)
    assert [c.number for c in found] == [0]


def test_a_conversation_that_the_template_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: Sequence[Any]) -> list[int]:
        if messages[0]["content"] == "bad":
            raise SlipstreamError("the chat template refuses these messages")
        return [1, 2]

    llm = tiny_llm.llm()
    monkeypatch.setattr(llm, "chat_tokens", refuse)
    monkeypatch.setattr(tiny_llm, "llm", lambda: llm)
    with pytest.raises(SlipstreamError, match="conversation 3 of the data"):
        answer_all(tmp_path / "text.jsonl", [asked("a"), asked("b"), asked("bad")])
    assert not (tmp_path / "text.jsonl").exists()


def test_a_model_without_a_template_can_ask_nothing(tmp_path: Path) -> None:
    from slipstream import LLM

    with pytest.raises(SlipstreamError, match="has no chat template"):
        asking.opening(LLM(str(tiny_llm.without_template())))
