"""Text to train a head on: conversations whose answers are the target's own.

A head learns what its target will say, so each answer is the target's, whoever asked. Questions come
from a file, or from the target too: an instruct model goes on writing where its template opens the
user's turn (Xu et al. 2024, "Magpie", arXiv 2406.08464).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.config import SamplingParams
from slipstream.errors import SlipstreamError

_MARK = "@@@slipstream@@@"
_LONGEST_QUESTION = 512  # tokens
_SAME_SHARE = 0.5  # of a question's words: one that says a few over and over teaches nothing


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """prompt: token ids up to the assistant's turn. answer: what the target wrote there."""

    prompt: Sequence[int]
    answer: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def read(path: Path) -> Iterator[Conversation]:
    """Conversations of a file that ``append`` wrote; a last line cut short is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                words = json.loads(line)
                yield Conversation(prompt=words["prompt"], answer=words["answer"])
            except (ValueError, KeyError, TypeError) as error:
                raise SlipstreamError(f"{path}, line {number}: no conversation ({error})") from None


def append(path: Path, conversations: Sequence[Conversation]) -> None:
    """Whole lines at the end of the file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(c)) + "\n" for c in conversations)


def opening(llm: Any) -> list[int]:
    """Token ids up to where a user's first words stand."""
    text = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
    )
    return list(llm.tokenizer(text.split(_MARK)[0], add_special_tokens=False)["input_ids"])


def own_questions(llm: Any, count: int, seed: int) -> list[list[dict[str, str]]]:
    """Conversations of one question each, sampled from the target's empty user turn.

    Fewer than ``count`` where what it wrote is empty, cut off or says one thing over and over.
    """
    head = {"prompt_token_ids": opening(llm)}
    params = [
        SamplingParams(temperature=1.0, max_tokens=_LONGEST_QUESTION, seed=seed + i)
        for i in range(count)
    ]
    runs = llm.generate([head] * count, params)
    return [
        [{"role": "user", "content": run.outputs[0].text.strip()}]
        for run in runs
        if run.outputs[0].finish_reason == "stop" and _worth_asking(run.outputs[0].text)
    ]


def _worth_asking(text: str) -> bool:
    words = text.split()
    return len(words) >= 3 and len(set(words)) >= _SAME_SHARE * min(len(words), 50)


def answer(
    llm: Any, questions: Sequence[Any], params: Sequence[SamplingParams]
) -> list[Conversation]:
    """The target's answers; questions that are too long for its context are left out."""
    room = llm.engine.config.max_model_len
    prompts = [llm.chat_tokens(messages) for messages in questions]
    pairs = [(p, s) for p, s in zip(prompts, params, strict=True) if len(p) + s.max_tokens <= room]
    runs = llm.generate([{"prompt_token_ids": p} for p, _ in pairs], [s for _, s in pairs])
    return [
        Conversation(prompt=prompt, answer=list(run.outputs[0].token_ids))
        for (prompt, _), run in zip(pairs, runs, strict=True)
    ]


def make(
    llm: Any,
    path: Path,
    *,
    tokens: int,
    max_tokens: int,
    seed: int,
    report: Callable[[int], None],
    round_size: int = 64,
) -> None:
    """Let the target ask and answer until the file holds ``tokens`` tokens; goes on where it was.

    Every second answer is greedy, the others are sampled at temperature 1: a head is used for both.
    report: is told the tokens so far.
    """
    there = list(read(path))
    done, number = sum(map(len, there)), len(there)
    report(done)
    while done < tokens:
        first = seed + (number << 20)
        questions = own_questions(llm, round_size, first)
        params = [
            SamplingParams(temperature=i % 2, max_tokens=max_tokens, seed=first + i)
            for i in range(len(questions))
        ]
        made = answer(llm, questions, params)
        if not made:
            raise SlipstreamError("the model wrote no question of its own: give some with --data")
        append(path, made)
        done, number = done + sum(map(len, made)), number + len(made)
        report(done)
