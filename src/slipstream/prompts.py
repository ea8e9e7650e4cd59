"""Prompts to measure and prove with: a few built in, or a user's file."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.errors import SlipstreamError

BUILT_IN = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it line by line.",
    "List the planets of the solar system, one per line, each with one fact.",
    "Rewrite in the past tense: The train leaves the station, the rain stops, and a dog barks.",
    "A shop sells pens at 3 for 2 euros. How much do 12 pens cost? Show the steps.",
    "Write a short letter asking a neighbour to water the plants during the holidays.",
    "Repeat this list twice: apple, river, stone, lantern, winter, copper.",
    "Summarise: The committee met on Monday. It approved the budget, postponed the vote on the "
    "new bridge, and asked the engineers for a second report. The engineers will report in May.",
)


def read_prompts(path: Path) -> list[str]:
    """A text file (a prompt a line) or JSONL with ``prompt`` or ``turns`` (the first turn counts).

    Raises SlipstreamError naming the file and the line that can't be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SlipstreamError(f"prompts file {path} can't be read: {error}") from error
    read = _json_prompt if path.suffix in (".jsonl", ".json") else _text_prompt
    prompts = [read(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise SlipstreamError(f"prompts file {path} is empty: put one prompt on each line")
    return prompts


def _text_prompt(line: str, where: str) -> str:
    return line.strip()


def _json_prompt(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SlipstreamError(f"{where}: not a JSON object: {error.msg}") from None
    found, turns = None, None
    if isinstance(record, dict):
        found, turns = record.get("prompt"), record.get("turns")
    if found is None and isinstance(turns, list) and turns:
        found = turns[0]
    if not isinstance(found, str) or not found:
        raise SlipstreamError(f'{where}: no text under "prompt" or "turns"')
    return found
