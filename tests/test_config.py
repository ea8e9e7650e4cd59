import dataclasses
import math
from typing import Any

import pytest

from slipstream import drafters
from slipstream.config import SamplingParams, from_dict
from slipstream.drafters.draft_model import DraftModelConfig
from slipstream.drafters.ngram import NgramConfig
from slipstream.errors import SlipstreamError

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", "5"),
    ("top_k", None),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_p", "0.9"),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 3),
    ("frequency_penalty", [1]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", "16"),
    ("min_tokens", -1),
    ("min_tokens", 17),  # max_tokens is 16
    ("min_tokens", None),
    ("seed", -1),
    ("seed", 0.5),
    ("seed", "x"),
    ("logprobs", -1),
    ("logprobs", True),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", 5),
    ("stop", [5]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["eos"]),
    ("stop_token_ids", 5),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {5: "high"}),
    ("logit_bias", {5: math.inf}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", [1, 2]),
    ("ignore_eos", "no"),
]
SAID = {"stop_token_ids": "token id|stop_token_ids", "logit_bias": "token id|logit_bias"}


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: repr(x))
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(SlipstreamError, match=SAID.get(name, name)):
        SamplingParams(**{name: value})


GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 1},
    {"top_k": -1},
    {"min_p": 1},
    {"max_tokens": None, "min_tokens": 500},
    {"min_tokens": 16},
    {"seed": 2**64 - 1},
    {"stop": "end"},
    {"stop": ["a", "b"]},
    {"stop": None},
    {"stop_token_ids": None},
    {"logit_bias": None},
    {"logprobs": 0},
    {"stop_token_ids": [3], "logit_bias": {3: -100}},
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_a_good_value_is_taken(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_stop_becomes_a_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_parameters_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]


def test_an_unknown_key_comes_with_the_nearest_known_one() -> None:
    with pytest.raises(SlipstreamError, match=r"'temprature'.*did you mean 'temperature'"):
        from_dict(SamplingParams, {"temprature": 1}, "sampling")
    assert from_dict(SamplingParams, {"top_k": 3}, "sampling").top_k == 3


@pytest.mark.parametrize(
    "values", [{"stop_token_ids": [9]}, {"logit_bias": {9: 1.0}}, {"logprobs": 10}]
)
def test_ids_and_counts_beyond_the_vocabulary(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    params.check_vocabulary(10)
    with pytest.raises(SlipstreamError, match="vocabulary size 9"):
        params.check_vocabulary(9)


SPECULATION: list[tuple[dict[str, Any], str]] = [
    ({}, "needs a method.*ngram.*draft_model"),
    ({"method": "ngrm"}, "'ngrm'.*did you mean 'ngram'"),
    ({"method": "eagle9000"}, "eagle9000"),
    ({"method": None}, "method"),
    ({"method": ["ngram"]}, "method"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens.*at least 1"),
    ({"method": "ngram", "num_speculative_tokens": -3}, "num_speculative_tokens"),
    ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens"),
    ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens"),
    ({"method": "ngram", "num_speculative_tokens": None}, "num_speculative_tokens"),
    ({"method": "ngram", "num_speculative_token": 4}, "did you mean 'num_speculative_tokens'"),
    ({"method": "ngram", "model": "x"}, "unknown ngram option.*model"),
    ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min"),
    ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_max"),
    ({"method": "ngram", "prompt_lookup_max": "4"}, "prompt_lookup_max"),
    ({"method": "ngram", "rejection_sample_method": "blok"}, "'blok'.*did you mean 'block'"),
    ({"method": "ngram", "rejection_sample_method": ["block"]}, "rejection_sample_method"),
    ({"method": "draft_model"}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": "x", "num_speculative_tokens": 0}, "num_speculative_tokens"),
    ({"model": "x", "draft_sample_method": "greed"}, "did you mean 'greedy'"),
]


@pytest.mark.parametrize(("values", "message"), SPECULATION, ids=lambda x: repr(x))
def test_a_bad_speculative_config_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        drafters.parse(values)


def test_a_good_speculative_config() -> None:
    parsed = drafters.parse({"method": "ngram", "num_speculative_tokens": 3})
    assert parsed == drafters.Speculation(
        method="ngram", drafter=NgramConfig(num_speculative_tokens=3)
    )
    parsed = drafters.parse({"model": "some/model", "rejection_sample_method": "block"})
    assert parsed.method == "draft_model"
    assert parsed.rejection_sample_method == "block"
    assert parsed.drafter == DraftModelConfig(model="some/model")


def test_parsing_leaves_the_users_dictionary_as_it_was() -> None:
    values = {"method": "ngram", "rejection_sample_method": "block"}
    drafters.parse(values)
    assert values == {"method": "ngram", "rejection_sample_method": "block"}


def test_every_method_of_the_table_can_be_imported() -> None:
    assert set(drafters.METHODS) == set(drafters._METHODS)
    for path in drafters._METHODS.values():
        module, name = path.split(":")
        config = getattr(__import__(module, fromlist=[name]), name)
        assert "num_speculative_tokens" in {f.name for f in dataclasses.fields(config)}
