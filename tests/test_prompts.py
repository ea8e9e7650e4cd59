"""Prompts from files: what is read, and what is said of a line that can't be."""

import json
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.prompts import BUILT_IN, read_prompts


def write(folder: Path, name: str, *lines: object) -> Path:
    path = folder / name
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", "first ", "", "  zweite: ä", '{"prompt": "as it stands"}')
    assert read_prompts(path) == ["first", "zweite: ä", '{"prompt": "as it stands"}']


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
def test_a_jsonl_file_has_prompts_or_turns(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, {"prompt": "one"}, "", {"turns": ["two", "and then"], "id": 3})
    assert read_prompts(path) == ["one", "two"]


def test_prompts_keep_their_line_breaks_in_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", {"prompt": "a\nb\u2028c"})
    assert read_prompts(path) == ["a\nb\u2028c"]


def test_a_line_separator_inside_a_json_string_is_not_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False), encoding="utf-8")
    assert read_prompts(path) == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        '"text"',
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"turns": []}',
        '{"turns": [3]}',
        '{"turns": 3}',
        '{"turns": {"a": 1}}',
    ],
)
def test_an_unusable_line_is_named_with_its_file(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path, "p.jsonl", {"prompt": "fine"}, bad)
    with pytest.raises(SlipstreamError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"none\.txt can't be read"):
        read_prompts(tmp_path / "none.txt")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SlipstreamError, match=r"p\.txt can't be read"):
        read_prompts(path)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_file_without_prompts_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(SlipstreamError, match=f"{name} is empty"):
        read_prompts(write(tmp_path, name, "", "  "))


def test_the_built_in_prompts_are_different_and_not_empty() -> None:
    assert all(BUILT_IN)
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 8
