"""The questions: read, refused with the line at fault, cut evenly, turned into prompts."""

import json
from collections import Counter
from pathlib import Path

import pytest
import tiny_llm

from slipstream import SamplingParams, SlipstreamError
from slipstream.bench.suite import Question, choose, prompts_of, read_suite


def write(folder: Path, *lines: object) -> Path:
    path = folder / "suite.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def of_categories(names: str) -> list[Question]:
    """A question a letter, numbered in its text."""
    return [Question(category=name, turns=[f"{name}{n}"]) for n, name in enumerate(names)]


def texts(questions: list[Question]) -> list[str]:
    return [question.turns[0] for question in questions]


def test_both_forms_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"question_id": 1, "category": "qa", "turns": ["one", "two"]},
        "",
        {"prompt": "three"},
    )
    assert read_suite(path) == [
        Question(category="qa", turns=["one", "two"]),
        Question(category="other", turns=["three"]),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "not a JSON object"),
        ([1], "no text"),
        ({}, "no text"),
        ({"category": "qa"}, "no text"),
        ({"turns": []}, "no text"),
        ({"turns": "text"}, "no text"),
        ({"turns": ["a", 3]}, "no text"),
        ({"prompt": "  "}, "no text"),
        ({"prompt": "a", "category": 3}, "category"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(SlipstreamError, match=rf"suite\.jsonl:2: .*{said}"):
        read_suite(path)


def test_a_missing_an_empty_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="can't be read"):
        read_suite(tmp_path / "none.jsonl")
    with pytest.raises(SlipstreamError, match="is empty"):
        read_suite(write(tmp_path, "", " "))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SlipstreamError, match="can't be read"):
        read_suite(tmp_path / "binary.jsonl")


def test_a_cut_is_even_over_the_categories_and_keeps_the_order() -> None:
    questions = of_categories("aaaaabbbcc")
    assert texts(choose(questions, None, 6)) == ["a0", "a1", "b5", "b6", "c8", "c9"]
    assert texts(choose(questions, None, 4)) == ["a0", "a1", "b5", "c8"]
    assert texts(choose(questions, None, 9)) == [
        "a0",
        "a1",
        "a2",
        "a3",
        "b5",
        "b6",
        "b7",
        "c8",
        "c9",
    ]
    assert choose(questions, None, 99) == choose(questions, None, None) == questions


def test_categories_are_picked_before_the_cut() -> None:
    questions = of_categories("aaabbbccc")
    assert texts(choose(questions, ["c", "a"], 4)) == ["a0", "a1", "c6", "c7"]
    with pytest.raises(SlipstreamError, match=r"unknown category 'aa'.*known are a, b, c"):
        choose(questions, ["aa"], None)
    with pytest.raises(SlipstreamError, match="--num-prompts"):
        choose(questions, None, 0)


def test_spec_bench_is_cut_evenly() -> None:
    path = Path("/work/shared/spec_bench/questions.jsonl")
    if not path.is_file():
        pytest.skip("Spec-Bench's questions are not here")
    questions = read_suite(path)
    assert len(questions) == 240
    assert set(Counter(q.category for q in choose(questions, None, 26)).values()) == {2}


def test_the_first_turn_alone_or_all_behind_plain_answers() -> None:
    llm = tiny_llm.llm()
    questions = [Question(category="x", turns=["the train", "in on"])]
    talk = [{"role": "user", "content": "the train"}]
    first = llm.chat_tokens(talk)
    found = prompts_of(llm, questions, all_turns=False, max_tokens=6)
    assert [prompt.token_ids for prompt in found] == [first]
    answer = llm.chat(talk, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].text
    talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "in on"}]
    found = prompts_of(llm, questions, all_turns=True, max_tokens=6)
    assert [prompt.token_ids for prompt in found] == [first, llm.chat_tokens(talk)]
    assert [prompt.category for prompt in found] == ["x", "x"]
