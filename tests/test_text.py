"""From tokens to text: nothing lost, nothing early, nothing twice."""

from collections.abc import Sequence

import pytest
import tiny_llm
from hypothesis import given
from hypothesis import strategies as st

from slipstream.text import Piece, TextStream

TOKENIZER = tiny_llm.tokenizer_of()
ids_of = TOKENIZER.encode

# ASCII, two, three and four bytes a character, joiners, and what incomplete characters decode to
CHARACTERS = st.sampled_from("abthe .,é߷€한\u200d\ufe0f😀👩🇫\ufffd\n")
TEXTS = st.text(CHARACTERS | st.characters(codec="utf-8"), max_size=12)
TOKENS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=24)


def run(
    tokens: Sequence[int], stop: Sequence[str] = (), prompt: Sequence[int] = (), min_tokens: int = 0
) -> tuple[TextStream, list[Piece]]:
    """Push until a stop string is found, then finish."""
    stream = TextStream(TOKENIZER, prompt, stop)
    pieces: list[Piece] = []
    for at, token in enumerate(tokens):
        pieces += stream.push(token, "plain", may_stop=at >= min_tokens)
        if stream.stopped_by is not None:
            break
    return stream, [*pieces, *stream.finish()]


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(TEXTS, TEXTS)
def test_the_pieces_of_a_text_add_up_to_it(prompt: str, text: str) -> None:
    stream, pieces = run(ids_of(text), prompt=ids_of(prompt))
    assert joined(pieces) == stream.text == text


@given(TOKENS)
def test_the_pieces_of_any_tokens_add_up_to_what_the_tokenizer_says(tokens: list[int]) -> None:
    stream, pieces = run(tokens)
    assert joined(pieces) == stream.text == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(TEXTS)
def test_half_a_character_is_never_shown(text: str) -> None:
    stream = TextStream(TOKENIZER, [], ())
    shown = ""
    for token in ids_of(text):
        shown += joined(stream.push(token, "plain"))
        assert text.startswith(shown)


def test_a_character_comes_with_its_last_token() -> None:
    stream = TextStream(TOKENIZER, [], ())
    tokens = ids_of("😀")
    assert len(tokens) == 4
    assert [joined(stream.push(token, "plain")) for token in tokens] == ["", "", "", "😀"]


def test_an_incomplete_character_at_the_end_is_shown_as_broken() -> None:
    stream = TextStream(TOKENIZER, [], ())
    for token in ids_of("a😀")[:-1]:
        stream.push(token, "plain")
    assert stream.text == "a"
    assert joined(stream.finish()) == "\ufffd"
    assert stream.finish() == []


def test_special_tokens_are_no_text() -> None:
    _, pieces = run([*ids_of("a"), tiny_llm.EOS, *ids_of("b")])
    assert joined(pieces) == "ab"


def test_a_piece_carries_the_origin_of_the_token_that_completed_it() -> None:
    stream = TextStream(TOKENIZER, [], ("bcd",))
    assert stream.push(*ids_of("a"), "plain") == [Piece("a", "plain")]
    assert stream.push(*ids_of("b"), "accepted") == []
    assert stream.push(*ids_of("c"), "recovered") == []
    assert stream.push(*ids_of("x"), "bonus") == [
        Piece("b", "accepted"),
        Piece("c", "recovered"),
        Piece("x", "bonus"),
    ]


@given(
    st.text("ab", max_size=16),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    found = [text.find(string) for string in stop if string in text]
    stream, pieces = run(ids_of(text), stop)
    if not found:
        assert (joined(pieces), stream.stopped_by) == (text, None)
        return
    assert stream.stopped_by in stop
    # the first to be complete ends the text: none of them is whole in what was shown
    assert text.startswith(joined(pieces) + stream.stopped_by)
    assert not any(string in joined(pieces) for string in stop)
    assert joined(pieces) == stream.text


@given(st.text("ab", max_size=16), st.text("ab", min_size=1, max_size=4))
def test_nothing_of_a_stop_string_is_shown_before_it_is_certain(text: str, stop: str) -> None:
    stream = TextStream(TOKENIZER, [], (stop,))
    end = text.find(stop)
    shown = ""
    for token in ids_of(text):
        shown += joined(stream.push(token, "plain"))
        assert end < 0 or len(shown) <= end
        if stream.stopped_by:
            break


def test_a_stop_string_may_end_inside_a_token() -> None:
    the = ids_of("the")
    assert len(the) == 1
    stream, pieces = run([*ids_of("a"), *the], ["h"])
    assert (joined(pieces), stream.stopped_by, stream.length) == ("at", "h", 2)


def test_text_held_back_for_a_stop_string_is_flushed_at_the_end() -> None:
    stream = TextStream(TOKENIZER, [], ("END",))
    shown = "".join(joined(stream.push(token, "plain")) for token in ids_of("xEN"))
    assert shown == "x"
    assert joined(stream.finish()) == "EN"
    assert stream.stopped_by is None


def test_a_self_overlapping_stop_string_is_found() -> None:
    stream, pieces = run(ids_of("aaab"), ["aab"])
    assert (joined(pieces), stream.stopped_by) == ("a", "aab")


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, ""), (2, "ab"), (4, "abab"), (9, "ababab")]
)
def test_stop_strings_complete_before_min_tokens_do_not_count(
    min_tokens: int, expected: str
) -> None:
    """Tokens 2, 4 and 6 complete an "ab" each; only one after min_tokens counts."""
    _, pieces = run(ids_of("ababab"), ["ab"], min_tokens=min_tokens)
    assert joined(pieces) == expected


def test_a_first_space_survives_behind_a_prompt() -> None:
    _, pieces = run(ids_of(" the"), prompt=ids_of("in"))
    assert joined(pieces) == " the"


@given(TEXTS, st.integers(0, 40))
def test_a_prompt_cut_inside_a_character_disturbs_nothing_after_it(text: str, cut: int) -> None:
    tokens = ids_of("😀" * 3 + "a")
    _, pieces = run(ids_of(text), prompt=[*tokens[cut % 12 :]])
    assert joined(pieces) == text
