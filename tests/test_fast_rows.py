"""The C++ loops against their references in PyTorch, over every kind of cut and of kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import fast_rows, sampling
from slipstream.config import SamplingParams

_native = pytest.importorskip("slipstream._native")
KERNELS = ["", "avx2", "portable"]
CUTS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-4, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, 500]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    }
)


def _rows(seed: int, width: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, width, generator=generator) * spread
    rows[0, : width // 2] = -torch.inf  # as the minimum length leaves them
    rows[1] = rows[1].round()  # ties
    return rows


def _far_from_edges(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Rows [n] whose set of kept tokens stays when the cuts move by a rounding."""
    kept = []
    for factor in (1 - 1e-5, 1, 1 + 1e-5):
        moved = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=min(params.top_p * factor, 1.0) if params.top_p < 1 else 1.0,
            min_p=min(params.min_p * factor, 1.0),
        )
        kept.append(sampling.truncate(logits, moved).isfinite())
    return (kept[0] == kept[1]).all(-1) & (kept[2] == kept[1]).all(-1)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 700), st.sampled_from([0.1, 3.0, 20.0]), CUTS)
def test_probabilities_are_the_references(
    seed: int, width: int, spread: float, cuts: dict[str, float]
) -> None:
    params = SamplingParams(**cuts)  # type: ignore[arg-type]
    logits = _rows(seed, width, spread)
    expected = sampling.truncate(logits.double(), params).softmax(-1)
    sure = _far_from_edges(logits.double(), params)
    got = fast_rows.target_probs(logits, params)
    assert torch.allclose(got[sure].double(), expected[sure], atol=1e-5, rtol=1e-3)
    assert ((got > 0) == (expected > 1e-37))[sure].all()
    assert torch.allclose(got.sum(-1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_kind_of_kernels_gives_the_same_bits(kernels: str) -> None:
    logits = _rows(5, 1000, 3.0).numpy()
    args = (0.8, 40, 0.9, 0.01)
    try:
        got = _native.probabilities(logits, *args, kernels)
    except ValueError:
        pytest.skip(f"no {kernels} here")
    assert np.array_equal(got, _native.probabilities(logits, *args, "portable"))
    assert _native.argmax(logits, kernels) == _native.argmax(logits, "portable")


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = _rows(6, 900, 3.0).numpy()
    together = _native.probabilities(logits, 0.7, 50, 0.9, 0.0)
    alone = [_native.probabilities(row[None], 0.7, 50, 0.9, 0.0)[0] for row in logits]
    assert np.array_equal(together, np.stack(alone))


def test_ties_with_the_last_token_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert fast_rows.target_probs(logits, SamplingParams(top_k=2)).count_nonzero() == 4
    assert fast_rows.target_probs(logits, SamplingParams(top_p=0.6)).count_nonzero() == 4


def test_a_padded_vocabulary_is_a_view() -> None:
    logits = _rows(7, 300, 3.0)
    params = SamplingParams(top_p=0.9)
    got = fast_rows.target_probs(logits[:, :250], params)
    assert torch.equal(got, fast_rows.target_probs(logits[:, :250].contiguous(), params))
    assert fast_rows.argmax(logits[:, :250]) == logits[:, :250].argmax(-1).tolist()


@given(st.integers(0, 10**6), st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_draws_are_the_first_above(seed: int, width: int, uniform: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(width, generator=generator)
    probs *= torch.rand(width, generator=generator) < 0.3  # many zeros
    probs[int(torch.randint(width, (1,), generator=generator))] = 0.5
    token = fast_rows.inverse_cdf(probs, uniform)
    cumulated = probs.double().cumsum(0)
    target = uniform * cumulated[-1]
    assert probs[token] > 0
    assert cumulated[token] > target - 1e-9
    assert token == 0 or cumulated[token - 1] <= target + 1e-9


def test_the_ends_of_the_unit_interval_give_tokens_that_can_be() -> None:
    probs = torch.zeros(3000)
    probs[1500] = probs[1501] = 0.5
    assert fast_rows.inverse_cdf(probs, 0.0) == 1500
    assert fast_rows.inverse_cdf(probs, 1.0) == 1501
    assert fast_rows.inverse_cdf(torch.zeros(10), 0.5) == 0  # nothing to draw: no crash


def test_log_softmax_and_argmax() -> None:
    logits = _rows(8, 515, 5.0)
    expected = logits.double().log_softmax(-1)
    finite = expected.isfinite()
    got = fast_rows.log_softmax(logits)
    assert torch.allclose(got[finite].double(), expected[finite], atol=1e-4)
    assert torch.equal(got.isfinite(), finite)
    assert fast_rows.argmax(logits) == logits.argmax(-1).tolist()
    assert fast_rows.argmax(torch.full((1, 40), torch.nan)) == [0]


def test_refused() -> None:
    rows = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="one piece"):
        _native.argmax(rows[:, ::2])
    with pytest.raises(ValueError, match="out of range"):
        _native.probabilities(rows, 1.0, 0, 0.0, 0.0)
    with pytest.raises(ValueError, match="temperature"):
        _native.probabilities(rows, float("nan"), 0, 1.0, 0.0)
    with pytest.raises(TypeError):
        _native.argmax(rows[0])
    assert not fast_rows.serves(torch.zeros(1, 8, dtype=torch.float64))
