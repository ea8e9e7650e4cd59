from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import request_of

from slipstream.drafters.ngram import NgramConfig, NgramDrafter, lookup

TEXTS = st.lists(st.integers(0, 2), max_size=25)


def naive(tokens: Sequence[int], min_n: int, max_n: int, count: int) -> list[int]:
    """Longest first; of these the commonest next token, of these the most recent; 2 n tokens."""
    tokens = list(tokens)
    for n in range(max_n, min_n - 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]]
        if ends:
            following = [tokens[end] for end in ends]
            place = max(ends, key=lambda end: (following.count(tokens[end]), end))
            text = list(tokens)
            for _ in range(min(count, 2 * n)):
                text.append(text[place])
                place += 1
            return text[len(tokens) :]
    return []


@given(
    tokens=TEXTS,
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    count=st.integers(0, 7),
)
def test_equals_the_naive_lookup(tokens: list[int], lengths: list[int], count: int) -> None:
    assert lookup(tokens, *lengths, count) == naive(tokens, *lengths, count)


def test_the_longest_match_wins() -> None:
    assert lookup([7, 1, 2, 8, 0, 2, 9, 7, 1, 2], 1, 3, 1) == [8]
    assert lookup([7, 1, 2, 8, 0, 2, 9, 7, 1, 2], 1, 1, 1) == [9]


def test_the_most_recent_of_equal_matches_wins() -> None:
    assert lookup([1, 2, 5, 1, 2, 6, 1, 2], 2, 2, 1) == [6]


def test_the_commonest_continuation_wins() -> None:
    assert lookup([1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 1, 2], 2, 2, 2) == [5, 8]


def test_a_longer_match_is_trusted_further() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert lookup([*text, 3], 1, 4, 8) == [4, 5]
    assert lookup([*text, 2, 3], 1, 4, 8) == [4, 5, 6, 7]
    assert lookup([*text, 1, 2, 3], 1, 4, 8) == [4, 5, 6, 7, 8, 9]
    assert lookup([*text, 1, 2, 3], 1, 4, 3) == [4, 5, 6]


def test_a_short_period_is_drafted_to_full_length() -> None:
    assert lookup([9, 1, 2, 3, 1, 2, 3], 2, 3, 8) == [1, 2, 3, 1, 2, 3]
    assert lookup([4, 4, 4, 4, 4], 1, 4, 7) == [4] * 7


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 1]])
def test_no_match_no_draft(tokens: list[int]) -> None:
    assert lookup(tokens, 2, 4, 5) == []


def test_drafts_for_each_request_within_its_budget() -> None:
    drafter = NgramDrafter(1, 3)
    requests = [request_of(t, i) for i, t in enumerate([[1, 2, 1], [1, 2, 3], [5, 5], [5, 5]])]
    drafts = drafter.propose(requests, [3, 3, 2, 0])
    assert [list(d.tokens) for d in drafts] == [[2, 1], [], [5, 5], []]
    assert all(d.is_chain and d.draft_probs is None for d in drafts)
    drafter.release(requests[0])


@given(text=TEXTS.filter(len), news=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6))
def test_a_text_that_grows_is_drafted_like_a_new_one(
    text: list[int], news: list[list[int]]
) -> None:
    drafter, request = NgramDrafter(1, 4), request_of(text)
    for more in news:
        request.tokens += more
        (draft,) = drafter.propose([request], [8])
        assert list(draft.tokens) == naive(request.tokens, 1, 4, 8)
    drafter.release(request)
    drafter.release(request)


def test_built_from_its_config() -> None:
    drafter = NgramConfig(prompt_lookup_min=1, prompt_lookup_max=1).build(None)  # type: ignore[arg-type]
    (draft,) = drafter.propose([request_of([3, 4, 3])], [2])
    assert list(draft.tokens) == [4, 3]
