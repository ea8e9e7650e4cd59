"""Several drafters at once: who is asked, and one tree of what they say."""

from collections.abc import Sequence
from typing import Any

import pytest
import tiny_eagle
import tiny_llm
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import request_of

from slipstream import SamplingParams, SlipstreamError
from slipstream.drafters import parse
from slipstream.drafters.together import Together, merged
from slipstream.types import ROOT, Draft, chain


@st.composite
def trees(draw: Any) -> Draft:
    """No two siblings say the same, as in what drafters make."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 6))):
        token, parent = draw(st.integers(0, 3)), draw(st.integers(ROOT, node - 1))
        if parent < len(tokens) and (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Draft(tokens=tokens, parents=parents)


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {draft.suffix(node) for node in range(len(draft))}


@given(first=trees(), second=trees())
def test_a_merged_tree_has_the_paths_of_both_and_each_once(first: Draft, second: Draft) -> None:
    both = merged(first, second)
    assert paths(both) == paths(first) | paths(second)
    assert len(both) == len(paths(both))
    assert list(both.tokens[: len(first)]) == list(first.tokens)


class Fixed:
    """Drafts the same chain each time, as far as it may, and remembers what was asked of it."""

    def __init__(self, tokens: Sequence[int], taps: Sequence[int] = ()) -> None:
        self.tokens = tokens
        self.asked: list[list[int]] = []
        self.seen: list[Any] = []
        if taps:
            self.taps = taps

    def propose(self, requests: Sequence[Any], budgets: Sequence[int]) -> list[Draft]:
        self.asked.append([r.request_id for r in requests])
        return [chain(self.tokens[:budget]) for budget in budgets]

    def observe(self, request: Any, features: torch.Tensor) -> None:
        self.seen.append(features)

    def release(self, request: Any) -> None:
        self.seen.append("released")


def test_a_long_draft_goes_alone() -> None:
    sure, other = Fixed([1, 2, 3, 4, 5, 6, 7]), Fixed([9, 9])
    both = Together([(sure, 7), (other, 2)])
    requests = [request_of([0]), request_of([0])]
    requests[1].request_id = 1
    drafts = both.propose(requests, [7, 3])
    assert drafts[0].tokens == [1, 2, 3, 4, 5, 6, 7]
    assert other.asked == [[1]]
    assert paths(drafts[1]) == {(1,), (1, 2), (1, 2, 3), (9,), (9, 9)}


def test_a_longer_one_asked_later_goes_alone_too() -> None:
    both = Together([(Fixed([9, 9]), 2), (Fixed([1, 2, 3, 4, 5, 6]), 6)])
    (draft,) = both.propose([request_of([0])], [8])
    assert draft.tokens == [1, 2, 3, 4, 5, 6]


def test_each_part_drafts_as_far_as_its_own_option_says() -> None:
    both = Together([(Fixed([1, 2, 3]), 1), (Fixed([4, 5, 6]), 2)])
    (draft,) = both.propose([request_of([0])], [5])
    assert paths(draft) == {(1,), (4,), (4, 5)}


def test_each_head_sees_the_features_of_its_own_layers() -> None:
    first, blind, second = Fixed([1], taps=(0, 3)), Fixed([2]), Fixed([3], taps=(3,))
    both = Together([(first, 1), (blind, 1), (second, 1)])
    assert both.taps == [0, 3, 3]
    features = torch.arange(12.0).view(2, 3, 2)
    both.observe(request_of([0]), features)
    assert torch.equal(first.seen[0], features[:, :2])
    assert torch.equal(second.seen[0], features[:, 2:])
    assert not blind.seen
    both.release(request_of([0]))
    assert first.seen[-1] == blind.seen[-1] == second.seen[-1] == "released"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_plain_decoding(temperature: float) -> None:
    llm = tiny_llm.llm()
    head, _ = tiny_eagle.trained()
    both = [
        {"method": "ngram", "prompt_lookup_min": 2},
        {"method": "eagle3", "model": str(head), "path_floor": 0.05},
    ]
    fast = llm.with_speculation(both)
    prompts = ["the fox and the bear, the fox and", "on and on and on and on", "hide it in a den"]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    want = [run.outputs[0].token_ids for run in llm.generate(prompts, params)]
    found = [run.outputs[0].token_ids for run in fast.generate(prompts, params)]
    assert found == want
    assert fast.engine.metrics.mean_tokens_per_step > 1.3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "takes a method with its options, or a list"),
        ("ngram", "takes a method with its options, or a list"),
        (["ngram"], "takes a method with its options, or a list"),
        ([{"method": "ngram"}, {"method": "draft_model", "model": "x"}], "give draft_model"),
        (
            [{"method": "ngram"}, {"method": "eagle3", "draft_sample_method": "probabilistic"}],
            "give eagle3",
        ),
        ([{"method": "ngram"}, {"method": "medusa", "acceptance": "typical"}], "drafts alone"),
        ([{"method": "ngram", "rejection_sample_method": "block"}, {"method": "eagle3"}], "alone"),
        ([{"method": "ngram"}, {"method": "eagel3"}], "did you mean 'eagle3'"),
    ],
)
def test_what_can_not_be_a_list_is_said(config: Any, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        parse(config)


def test_a_list_of_one_is_that_one() -> None:
    assert parse([{"method": "ngram", "num_speculative_tokens": 3}]) == parse(
        {"method": "ngram", "num_speculative_tokens": 3}
    )
    assert parse([{"method": "ngram"}, {"method": "eagle3"}]).method == "ngram+eagle3"
