"""Processors against a plain reference, row by row (``lossless.enumeration.processed``)."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lossless.enumeration import processed

from slipstream import sampling
from slipstream.config import SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.sampling import Context

VOCAB = 12


def logits_of(seed: int, rows: int = 3, vocab: int = VOCAB, dtype: Any = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 2).to(dtype)


def context(
    prompt: Any = (1, 2, 2), output: Any = (3, 4, 3), suffixes: Any = None, stop_ids: Any = (0, 5)
) -> Context:
    suffixes = [(), (4,), (4, 2)] if suffixes is None else suffixes
    return Context(prompt=prompt, output=output, suffixes=suffixes, stop_ids=stop_ids)


def reference(logits: torch.Tensor, params: SamplingParams, ctx: Context) -> torch.Tensor:
    rows = [
        processed(row, params, ctx.prompt, [*ctx.output, *suffix], ctx.stop_ids)
        for row, suffix in zip(logits.double().tolist(), ctx.suffixes, strict=True)
    ]
    return torch.tensor(rows, dtype=logits.dtype)


ONE_AT_A_TIME: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.9},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": -1},
    {"top_k": VOCAB},
    {"top_k": VOCAB + 5},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"presence_penalty": -2},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -1.3},
    {"logit_bias": {0: 3.0, 7: -100.0}},
    {"min_tokens": 4},
    {"min_tokens": 5},
    {"min_tokens": 99, "max_tokens": None},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("params", ONE_AT_A_TIME, ids=str)
def test_each_processor_equals_its_definition(params: dict[str, Any], dtype: torch.dtype) -> None:
    for seed in range(10):
        logits = logits_of(seed, dtype=dtype)
        got = sampling.target_probs(logits, SamplingParams(**params), context())
        want = reference(logits, SamplingParams(**params), context())
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
        assert got.dtype == dtype


@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(-1, VOCAB),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.5),
    repetition=st.floats(0.5, 2),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    min_tokens=st.integers(0, 6),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    suffixes=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=3), min_size=3, max_size=3),
)
def test_all_processors_together(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    min_tokens: int,
    output: list[int],
    suffixes: list[list[int]],
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
    )
    ctx = context(output=output, suffixes=suffixes)
    logits = logits_of(seed)
    got = sampling.target_probs(logits, params, ctx)
    torch.testing.assert_close(got, reference(logits, params, ctx), atol=1e-11, rtol=0)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"min_p": 1.0}, {"top_p": 0.9}])
def test_equal_logits(params: dict[str, Any]) -> None:
    """Top-k and min-p keep every tie of their bound, top-p as few tokens as reach its mass."""
    probs = sampling.target_probs(
        torch.zeros(1, 4), SamplingParams(**params), context(suffixes=[()])
    )
    torch.testing.assert_close(probs, torch.full((1, 4), 0.25))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_a_nucleus_wider_than_the_first_guess(top_p: float, spread: float) -> None:
    """More than 256 tokens: the whole vocabulary is sorted; rows of both kinds in one call."""
    logits = logits_of(3, rows=2, vocab=3000)
    logits[0] *= spread / 2
    ctx = context(suffixes=[(), ()])
    got = sampling.target_probs(logits, SamplingParams(top_p=top_p), ctx)
    want = reference(logits, SamplingParams(top_p=top_p), ctx)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    if spread == 0.01 and top_p > 0.1:
        assert (got[0] > 0).sum() > 256


@pytest.mark.parametrize("size", [255, 256, 257])
def test_a_nucleus_at_the_edge_of_the_first_guess(size: int) -> None:
    logits = torch.full((1, 1000), -30.0, dtype=torch.float64)
    logits[0, :size] = torch.linspace(0, 0.01, size, dtype=torch.float64)
    ctx = context(suffixes=[()])
    params = SamplingParams(top_p=1 - 1e-3 / size)
    got = sampling.target_probs(logits, params, ctx)
    assert int((got > 0).sum()) == size
    torch.testing.assert_close(got, reference(logits, params, ctx), atol=1e-12, rtol=0)


@pytest.mark.parametrize("params", ONE_AT_A_TIME, ids=str)
def test_the_input_stays_as_it_was(params: dict[str, Any]) -> None:
    logits = logits_of(1)
    before = logits.clone()
    sampling.target_probs(logits, SamplingParams(**params), context())
    sampling.choose_greedy(logits, SamplingParams(**params), context())
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", ONE_AT_A_TIME, ids=str)
def test_one_token_at_least_and_rows_add_to_one(params: dict[str, Any]) -> None:
    probs = sampling.target_probs(logits_of(1), SamplingParams(**params), context())
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, dtype=torch.float64))
    assert (probs.amax(-1) > 0).all()


@pytest.mark.parametrize("params", ONE_AT_A_TIME, ids=str)
def test_greedy_takes_the_most_probable_token(params: dict[str, Any]) -> None:
    for seed in range(10):
        logits = logits_of(seed)
        greedy = SamplingParams(**{**params, "temperature": 0})
        want = reference(logits, SamplingParams(**{**params, "temperature": 1.0}), context())
        got = sampling.choose_greedy(logits, greedy, context())
        assert got == want.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-40])
def test_a_very_low_temperature_is_nearly_greedy_and_never_nan(temperature: float) -> None:
    """Where float32 can't hold what comes out, the parameters may be refused instead."""
    logits = logits_of(1, dtype=torch.float32)
    try:
        params = SamplingParams(temperature=temperature)
    except SlipstreamError:
        assert temperature < 1e-6
        return
    probs = sampling.target_probs(logits, params, context())
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    torch.testing.assert_close(probs.amax(-1), torch.ones(3), atol=1e-3, rtol=0)


def test_each_row_is_processed_along_its_own_path() -> None:
    """Penalties count the drafted tokens of the row's path, and no other row's."""
    logits = torch.zeros(3, VOCAB, dtype=torch.float64)
    params = SamplingParams(frequency_penalty=1.0)
    ctx = context(prompt=(), output=(6,), suffixes=[(), (7,), (7, 7)])
    adjusted = sampling.adjust(logits, params, ctx)
    assert adjusted[:, 6].tolist() == [-1, -1, -1]
    assert adjusted[:, 7].tolist() == [0, -1, -2]


def test_minimum_length_counts_the_drafted_tokens() -> None:
    logits = torch.zeros(3, VOCAB)
    ctx = context(output=(6,), suffixes=[(), (7,), (7, 7)], stop_ids=(5,))
    adjusted = sampling.adjust(logits, SamplingParams(min_tokens=3), ctx)
    assert adjusted[:, 5].isinf().tolist() == [True, True, False]
    assert sampling.adjust(logits, SamplingParams(min_tokens=1), ctx) is logits


def test_logprobs_are_those_of_the_logits_with_ranks() -> None:
    logits = logits_of(4)
    rows = sampling.logprobs_of(logits, [0, 1, 2], 3)
    for row, want, token in zip(rows, logits.log_softmax(-1), (0, 1, 2), strict=True):
        order = want.argsort(descending=True).tolist()
        assert list(row)[:3] == order[:3]
        assert set(row) == {*order[:3], token}
        for id_, entry in row.items():
            assert entry.logprob == pytest.approx(float(want[id_]))
            assert entry.rank == order.index(id_) + 1


def test_no_most_probable_tokens_asked_for_gives_the_chosen_one_alone() -> None:
    (row,) = sampling.logprobs_of(logits_of(4, rows=1), [7], 0)
    assert list(row) == [7]


def test_rank_counts_the_more_probable_tokens_only() -> None:
    (row,) = sampling.logprobs_of(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], 0)
    assert row[2].rank == 1


def test_a_rows_nucleus_does_not_depend_on_other_rows() -> None:
    """Coarse logits tie often; a flat row makes top-p look at the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(20, 2000, generator=generator) * 8).round() / 4
    flat = torch.zeros(1, 2000)
    params = SamplingParams(top_p=0.5)
    alone = sampling.truncate(logits, params)
    beside = sampling.truncate(torch.cat([logits, flat]), params)[:-1]
    assert torch.equal(alone, beside)
    for row, kept in zip(logits, alone, strict=True):
        assert torch.equal(sampling.truncate(row[None], params)[0], kept)
