"""The main gate: whatever drafts and whatever verifies, the output has the target's distribution.

Every probability is exact (float64 rounding apart): there is no sampling here.
"""

from functools import partial
from typing import Any

import pytest
from lossless import cases
from lossless.enumeration import (
    TOLERANCE,
    distance,
    enumerate_output,
    enumerate_without_merging,
    expected_output,
    gap,
    product,
)
from toys import ToyRuntime


@pytest.mark.parametrize("processors", cases.PROCESSORS)
@pytest.mark.parametrize("combination", cases.COMBINATIONS)
def test_output_has_the_distribution_of_the_target(combination: str, processors: str) -> None:
    target = ToyRuntime(cases.VOCAB, seed=2, padding=1)
    params = cases.params(processors, max_tokens=3)
    make = partial(cases.engine, combination, target, 2)
    assert gap(make, target, cases.PROMPT, params) < TOLERANCE


@pytest.mark.parametrize("processors", ["plain", "all"])
@pytest.mark.parametrize("combination", cases.COMBINATIONS)
@pytest.mark.parametrize("k", [1, 3])
def test_short_and_long_drafts_change_nothing(k: int, combination: str, processors: str) -> None:
    target = ToyRuntime(cases.VOCAB, seed=9)
    params = cases.params(processors, max_tokens=k + 1)
    make = partial(cases.engine, combination, target, k)
    assert gap(make, target, cases.PROMPT, params) < TOLERANCE


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("combination", cases.COMBINATIONS)
def test_ties_at_the_bound_of_top_k(combination: str, top_k: int) -> None:
    target = ToyRuntime(cases.VOCAB, seed=3, grid=1.0)
    params = cases.params("plain", top_k=top_k, max_tokens=3)
    make = partial(cases.engine, combination, target, 2)
    assert gap(make, target, cases.PROMPT, params) < TOLERANCE


ENDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one token": ({"max_tokens": 1}, {}),
    "end of context": ({"max_tokens": None}, {"max_model_len": len(cases.PROMPT) + 3}),
    "no end of sequence": ({"max_tokens": 3, "ignore_eos": True}, {}),
    "two ends of sequence": ({"max_tokens": 3}, {"eos_token_ids": [0, 3]}),
    "stop token": ({"max_tokens": 3, "stop_token_ids": [1]}, {}),
    "stop token held back": ({"max_tokens": 3, "stop_token_ids": [1], "min_tokens": 2}, {}),
    "stop token, not the end of sequence": (
        {"max_tokens": 3, "stop_token_ids": [1], "min_tokens": 1, "ignore_eos": True},
        {},
    ),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("combination", cases.COMBINATIONS)
def test_every_way_to_end(combination: str, end: str) -> None:
    target = ToyRuntime(cases.VOCAB, seed=8)
    params, config = ENDS[end]
    make = partial(cases.engine, combination, target, 2, **config)
    assert gap(make, target, cases.PROMPT, cases.params("plain", **params)) < TOLERANCE


@pytest.mark.parametrize("combination", cases.COMBINATIONS)
def test_two_requests_in_a_batch_are_independent(combination: str) -> None:
    """Different prompts, lengths and parameters; the joint distribution is a product."""
    target = ToyRuntime(cases.VOCAB, seed=5)
    prompts = [
        (cases.PROMPT, cases.params("top-k", max_tokens=2)),
        ((2, 0), cases.params("all", max_tokens=2)),
    ]
    want = product([expected_output(target, *prompt, eos=[cases.EOS]) for prompt in prompts])
    got = enumerate_output(partial(cases.engine, combination, target, 1), prompts)
    assert distance(got, want) < TOLERANCE


@pytest.mark.parametrize("combination", cases.COMBINATIONS)
def test_a_greedy_neighbour_changes_nothing(combination: str) -> None:
    target = ToyRuntime(cases.VOCAB, seed=6)
    greedy = cases.params("plain", temperature=0, max_tokens=4)
    sampling = cases.params("cold", max_tokens=2)
    make = partial(cases.engine, combination, target, 2)
    (alone,) = enumerate_output(make, [(cases.PROMPT, greedy)])
    want = product([{alone: 1.0}, expected_output(target, (2, 0), sampling, eos=[cases.EOS])])
    got = enumerate_output(make, [(cases.PROMPT, greedy), ((2, 0), sampling)])
    assert distance(got, want) < TOLERANCE


@pytest.mark.parametrize("combination", cases.COMBINATIONS)
def test_greedy_text_is_that_of_plain_decoding(combination: str) -> None:
    for seed in range(4):
        target = ToyRuntime(cases.VOCAB, seed=seed)
        params = cases.params("frequency", temperature=0, max_tokens=5)
        texts = [
            enumerate_output(partial(cases.engine, name, target, 3), [(cases.PROMPT, params)])
            for name in (combination, "no drafter")
        ]
        assert list(texts[0]) == list(texts[1])
        assert len(texts[0]) == 1


@pytest.mark.parametrize(
    "combination", ["draft model, rejection", "reduced vocabulary, block", "toy tree, follow"]
)
def test_merging(combination: str) -> None:
    """Merging equal states on the way changes nothing against whole runs from the start."""
    target = ToyRuntime(cases.VOCAB, seed=2)
    make = partial(cases.engine, combination, target, 1)
    prompts = [(cases.PROMPT, cases.params("all", max_tokens=3))]
    whole = enumerate_without_merging(make, prompts)
    assert distance(enumerate_output(make, prompts), whole) < TOLERANCE
    assert sum(whole.values()) == pytest.approx(1, abs=TOLERANCE)
