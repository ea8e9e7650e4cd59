"""Text to train a head on: conversations whose answers are the target's own.

A head learns what its target will say, so each answer is the target's, whoever asked. Questions
come from a file, or are made here (``asking``).
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.config import SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.train import asking
from slipstream.train.questions import Messages, split_answer


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """prompt: token ids up to the assistant's turn. answer: what stands there, the target's own
    words as a rule. number: of the question in the user's file."""

    prompt: Sequence[int]
    answer: Sequence[int]
    number: int = 0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def read(path: Path) -> Iterator[Conversation]:
    """Conversations of a file that ``append`` wrote."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield Conversation(**json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise SlipstreamError(f"{path}, line {number}: no conversation ({error})") from None


def append(path: Path, conversations: Sequence[Conversation]) -> None:
    """All of them at the end of the file, or none if this is interrupted."""
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    temporary = path.with_suffix(".part")
    lines = "".join(json.dumps(asdict(c)) + "\n" for c in conversations)
    temporary.write_text(before + lines, encoding="utf-8")
    os.replace(temporary, path)


def draft_vocabulary(conversations: Sequence[Conversation], size: int) -> list[int]:
    """The commonest tokens of the answers, ascending."""
    counts = Counter(token for c in conversations for token in c.answer)
    common = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    return sorted(common)


def answer(
    llm: Any,
    questions: Sequence[Messages],
    params: Sequence[SamplingParams],
    numbers: Sequence[int],
    on_finish: Callable[[Any], None] | None = None,
) -> list[Conversation]:
    """The target's answers; questions that are too long for its context are left out."""
    room = llm.engine.config.max_model_len
    asked = [
        (number, llm.chat_tokens(messages), p)
        for number, messages, p in zip(numbers, questions, params, strict=True)
    ]
    asked = [(n, prompt, p) for n, prompt, p in asked if len(prompt) + (p.max_tokens or 0) <= room]
    prompts = [{"prompt_token_ids": prompt} for _, prompt, _ in asked]
    params = [p for _, _, p in asked]
    runs = llm.generate(prompts, params, on_finish=on_finish) if prompts else []
    # without the last token, which no step has read: the rows before it learn to guess it
    return [
        Conversation(prompt=prompt, answer=list(run.outputs[0].token_ids[:-1]), number=number)
        for (number, prompt, _), run in zip(asked, runs, strict=True)
    ]


def answer_all(
    llm: Any,
    path: Path,
    questions: Sequence[Messages],
    *,
    max_tokens: int,
    keep: bool,
    seed: int,
    report: Callable[[int], None],
    round_size: int = 64,
) -> None:
    """Answer a user's questions into the file, from the first that isn't answered there.

    keep: where a conversation ends in an answer, learn that one instead of asking the target. What
    is too long for the target's context is left out.
    """
    for number, messages in enumerate(questions, 1):
        try:
            llm.chat_tokens(split_answer(messages)[0])
        except SlipstreamError as error:
            raise SlipstreamError(f"conversation {number} of the data: {error}") from error
    done = max((c.number + 1 for c in read(path)), default=0)
    report(done)
    for first in range(done, len(questions), round_size):
        part = [split_answer(messages) for messages in questions[first : first + round_size]]
        kept = [(i, m, text) for i, (m, text) in enumerate(part, first) if keep and text]
        asked = [(i, m) for i, (m, text) in enumerate(part, first) if not (keep and text)]
        numbers = [i for i, _ in asked]
        params = _params(numbers, max_tokens, seed)
        made = answer(llm, [messages for _, messages in asked], params, numbers)
        append(path, made + _kept(llm, kept))
        report(min(first + round_size, len(questions)))


def _kept(llm: Any, given: Sequence[tuple[int, Messages, str]]) -> list[Conversation]:
    found = []
    for number, messages, text in given:
        ids = list(llm.tokenizer(text, add_special_tokens=False)["input_ids"])
        prompt = llm.chat_tokens(messages)
        found.append(Conversation(prompt=prompt, answer=ids, number=number))
    return [c for c in found if len(c) <= llm.engine.config.max_model_len]


def _params(numbers: Sequence[int], max_tokens: int, seed: int) -> list[SamplingParams]:
    """Every second answer is greedy, the others are sampled at temperature 1: a head is used for
    both."""
    return [
        SamplingParams(temperature=n % 2, max_tokens=max_tokens, seed=seed + n) for n in numbers
    ]


def make(
    llm: Any,
    path: Path,
    *,
    tokens: int,
    max_tokens: int,
    seed: int,
    report: Callable[[int], None],
    answerer: Any = None,
    on_round: Callable[[Sequence[Conversation]], None] = lambda _: None,
    round_size: int = 256,
) -> None:
    """Let the target ask and answer until the file holds ``tokens`` tokens; goes on where it was.

    report: is told the tokens so far. answerer: the same model where what answers is recorded.
    on_round: is shown all conversations, again and again.
    """
    there = list(read(path))
    done, number = sum(map(len, there)), len(there)
    report(done)
    while done < tokens:
        first = seed + (number << 20)
        pick = random.Random(first)
        some = pick.sample(there, min(len(there), round_size))
        earlier = [llm.tokenizer.decode(c.answer, skip_special_tokens=True) for c in some]
        questions = asking.questions(llm, round_size, first, earlier)
        params = _params(range(len(questions)), max_tokens, first)
        numbers, ready = range(number, number + len(questions)), [done]

        def finished(run: Any, ready: list[int] = ready) -> None:
            ready[0] += len(run.prompt_token_ids) + len(run.outputs[0].token_ids)
            report(ready[0])

        made = answer(answerer or llm, questions, params, numbers, finished)
        if not made:
            raise SlipstreamError("the model wrote no question of its own: give some with --data")
        append(path, made)
        there += made
        on_round(there)
        done, number = done + sum(map(len, made)), number + len(made)
        report(done)
