"""Text to train a head on: conversations whose answers are the target's own.

A head learns what its target will say, so each answer is the target's, whoever asked. Questions
come from a file, or from the target too: an instruct model goes on writing where its template opens
the user's turn (Xu et al. 2024, "Magpie", arXiv 2406.08464). Such questions are short, and people
also bring texts to work on: some of its earlier answers come back inside a task.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.config import SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.train.questions import Messages, split_answer

_MARK = "@@@slipstream@@@"
_LONGEST_QUESTION = 512  # tokens
_TASK_SHARE = 3  # one question of so many brings a text
_TASKS = (
    "Summarize: {text}",
    "Summarize this text in a few sentences.\n\n{text}",
    "{text}\n\nWhat are the main points of the text above?",
    "Translate into {language}: {sentence}",
    "Translate the following sentence from {language} to English: {sentence}",
    "Answer the question with the help of the passage.\nPassage: {text}\nQuestion: {question}",
    "Here are some notes.\n\n{text}\n\n{other}\n\nWith them, answer this: {question}",
    "Rewrite in plain words:\n\n{text}",
    "Correct any mistakes in this text and say what you changed:\n\n{text}",
    "Continue this text: {sentence}",
)
_LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese")
_SAME_SHARE = 0.5  # of a question's words: one that says a few over and over teaches nothing


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


def opening(llm: Any) -> list[int]:
    """Token ids up to where a user's first words stand."""
    llm.chat_tokens([{"role": "user", "content": _MARK}])  # says what is wrong with the template
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


def with_text(question: str, texts: Sequence[str], pick: random.Random) -> str:
    """A task on some of the texts, which may be to answer the question."""
    text, other = pick.choice(texts).strip(), pick.choice(texts).strip()
    words = {
        "question": question,
        "text": text,
        "other": other,
        "sentence": pick.choice(re.split(r"(?<=[.!?])\s+", text)),
        "language": pick.choice(_LANGUAGES),
    }
    return pick.choice(_TASKS).format(**words)


def _worth_asking(text: str) -> bool:
    words = text.split()
    return len(words) >= 3 and len(set(words)) >= _SAME_SHARE * min(len(words), 50)


def answer(
    llm: Any,
    questions: Sequence[Messages],
    params: Sequence[SamplingParams],
    numbers: Sequence[int],
) -> list[Conversation]:
    """The target's answers; questions that are too long for its context are left out."""
    room = llm.engine.config.max_model_len
    asked = [
        (number, llm.chat_tokens(messages), p)
        for number, messages, p in zip(numbers, questions, params, strict=True)
    ]
    asked = [(n, prompt, p) for n, prompt, p in asked if len(prompt) + (p.max_tokens or 0) <= room]
    prompts = [{"prompt_token_ids": prompt} for _, prompt, _ in asked]
    runs = llm.generate(prompts, [p for _, _, p in asked]) if prompts else []
    return [
        Conversation(prompt=prompt, answer=list(run.outputs[0].token_ids), number=number)
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
    round_size: int = 64,
) -> None:
    """Let the target ask and answer until the file holds ``tokens`` tokens; goes on where it was.

    report: is told the tokens so far.
    """
    there = list(read(path))
    done, number = sum(map(len, there)), len(there)
    report(done)
    while done < tokens:
        first = seed + (number << 20)
        questions = own_questions(llm, round_size, first)
        pick = random.Random(first)
        some = pick.sample(there, min(len(there), round_size))
        earlier = [llm.tokenizer.decode(c.answer, skip_special_tokens=True) for c in some]
        for messages in questions[::_TASK_SHARE] if there else ():
            messages[0]["content"] = with_text(messages[0]["content"], earlier, pick)
        params = _params(range(len(questions)), max_tokens, first)
        made = answer(llm, questions, params, range(number, number + len(questions)))
        if not made:
            raise SlipstreamError("the model wrote no question of its own: give some with --data")
        append(path, made)
        there += made
        done, number = done + sum(map(len, made)), number + len(made)
        report(done)
