"""A user's training data: JSONL of prompts or conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError

Messages = list[dict[str, str]]
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's words


def read_questions(path: Path) -> list[Messages]:
    """A conversation a line: ``messages`` as of the OpenAI API, ``conversations`` as of ShareGPT,
    ``turns`` (the user's first) or ``prompt``.

    Raises SlipstreamError naming the file and the line that can't be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SlipstreamError(f"training data {path} can't be read: {error}") from error
    found = [_conversation(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise SlipstreamError(f"training data {path} is empty: put one JSON object on each line")
    return found


def _conversation(line: str, where: str) -> Messages:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SlipstreamError(f"{where}: not a JSON object: {error.msg}") from None
    messages = _messages(record) if isinstance(record, dict) else None
    if not messages or not all(m["content"].strip() for m in messages):
        raise SlipstreamError(
            f'{where}: no text under "messages", "conversations", "turns" or "prompt"'
        )
    if not any(m["role"] == "user" for m in messages):
        raise SlipstreamError(f"{where}: nobody asks anything: give a message of the user")
    return messages


def _messages(record: dict[str, Any]) -> Messages | None:
    """None where the record has none of the forms."""
    turns = record.get("turns")
    first = record.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if isinstance(first, str):
        return [{"role": "user", "content": first}]
    listed = record.get("messages") or record.get("conversations")
    if not isinstance(listed, list):
        return None
    found = []
    for item in listed:
        if not isinstance(item, dict):
            return None
        role = item.get("role") or item.get("from")
        content = item.get("content") or item.get("value")
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        found.append({"role": _ROLES.get(role, role), "content": content})
    return found


def split_answer(messages: Messages) -> tuple[Messages, str | None]:
    """What comes before the last answer, and that answer; None if the user has the last word."""
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"]
    return messages, None
