"""What is measured: Spec-Bench's questions, or a user's own prompts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import SamplingParams, require_integer, unknown
from slipstream.errors import SlipstreamError
from slipstream.llm import LLM
from slipstream.prompts import BUILT_IN
from slipstream.proof.identity import prompt_ids

NO_CATEGORY = "other"


@dataclass(frozen=True, kw_only=True)
class Question:
    """turns: what the user says, one after the other."""

    category: str
    turns: Sequence[str]


def built_in() -> list[Question]:
    return [Question(category="built-in", turns=[text]) for text in BUILT_IN]


def read_suite(path: Path) -> list[Question]:
    """JSONL: ``turns`` (a list of texts) or ``prompt`` (a text), and a ``category`` if wanted.

    Raises SlipstreamError naming the file and the line that can't be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SlipstreamError(f"suite {path} can't be read: {error}") from error
    found = [_question(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise SlipstreamError(f"suite {path} is empty: put one JSON object on each line")
    return found


def _question(line: str, where: str) -> Question:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SlipstreamError(f"{where}: not a JSON object: {error.msg}") from None
    fields: dict[str, Any] = record if isinstance(record, dict) else {}
    turns = fields.get("turns", [fields.get("prompt")])
    if not isinstance(turns, list) or not turns or not all(_is_text(turn) for turn in turns):
        raise SlipstreamError(f'{where}: no text under "prompt", no list of texts under "turns"')
    category = fields.get("category", NO_CATEGORY)
    if not _is_text(category):
        raise SlipstreamError(f'{where}: "category" must be a text, got {category!r}')
    return Question(category=category, turns=turns)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def choose(
    questions: Sequence[Question], categories: Sequence[str] | None, count: int | None
) -> list[Question]:
    """The questions of some categories, and of those ``count``, evenly over the categories.

    The order stays the file's. None for all.
    """
    known = tuple(dict.fromkeys(question.category for question in questions))
    for name in categories or ():
        if name not in known:
            raise unknown("category", name, known)
    kept = [q for q in questions if categories is None or q.category in categories]
    if count is None:
        return kept
    require_integer("--num-prompts", count, 1)
    seen: dict[str, int] = defaultdict(int)
    turn = []  # which of its category a question is: the first ones of all come before the second
    for question in kept:
        turn.append(seen[question.category])
        seen[question.category] += 1
    order = sorted(range(len(kept)), key=lambda i: (turn[i], i))
    return [kept[i] for i in sorted(order[:count])]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    category: str
    token_ids: Sequence[int]


def prompts_of(
    llm: LLM, questions: Sequence[Question], all_turns: bool, max_tokens: int
) -> list[Prompt]:
    """Token ids of every question's first turn, or of each of its turns.

    A later turn stands behind greedy plain answers to the earlier ones, written here, before the
    clock runs: every method then gets the same prompts.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    found = []
    for question in questions:
        turns = question.turns if all_turns else question.turns[:1]
        talk: list[dict[str, str]] = []
        for number, text in enumerate(turns, 1):
            talk.append({"role": "user", "content": text})
            found.append(Prompt(category=question.category, token_ids=prompt_ids(llm, talk)))
            if number < len(turns):
                answer = llm.chat(talk, params)[0].outputs[0].text
                talk.append({"role": "assistant", "content": answer})
    return found
