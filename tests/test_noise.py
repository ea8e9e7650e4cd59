import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.noise import Noise, inverse_cdf

WIDE = torch.full((1000,), 1e-3)


def test_a_draw_depends_on_its_key_and_not_on_the_draws_before() -> None:
    a, b = Noise(5), Noise(5)
    late = a.sample(WIDE, 9)
    for position in range(9):
        b.sample(WIDE, position)
        b.accept(0.5, position)
    assert b.sample(WIDE, 9) == late


def test_different_keys_give_different_draws() -> None:
    """64 draws of 1000 tokens each; two equal pairs in a row would be a fault of the key."""
    noise = Noise(5)
    draws = [[noise.sample(WIDE, p) for p in range(64)]]
    draws += [[noise.sample_draft(WIDE, p) for p in range(64)]]
    noise.step = 1
    draws += [[noise.sample_draft(WIDE, p) for p in range(64)]]
    draws += [[Noise(6).sample(WIDE, p) for p in range(64)]]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert sum(x == y for x, y in zip(a, b, strict=True)) < 5


def test_target_samples_do_not_depend_on_the_step() -> None:
    noise = Noise(5)
    before = [noise.sample(WIDE, p) for p in range(20)]
    noise.step = 3
    assert [noise.sample(WIDE, p) for p in range(20)] == before


def test_siblings_are_drawn_with_noise_of_their_own() -> None:
    """Rejection sampling of siblings needs independent draws at one position."""
    noise = Noise(5)
    draws = [noise.sample_draft(WIDE, 3, sibling) for sibling in range(20)]
    assert len(set(draws)) > 15


def test_no_seed_is_a_fresh_one() -> None:
    assert Noise(None).seed != Noise(None).seed
    assert 0 <= Noise(None).seed < 2**64


def test_large_seeds_and_positions() -> None:
    for seed in (0, 2**63, 2**64 - 1):
        assert 0 <= Noise(seed).sample(WIDE, 2**31) < 1000
    assert Noise(2**64 - 1).sample(WIDE, 1) != Noise(0).sample(WIDE, 1)


def test_certain_and_impossible() -> None:
    assert all(Noise(seed).accept(1.0, 0) for seed in range(200))
    assert all(Noise(seed).accept(float("inf"), 0) for seed in range(200))
    assert not any(Noise(seed).accept(0.0, 0) for seed in range(200))
    assert not any(Noise(seed).accept(float("nan"), 0) for seed in range(200))


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e3)), min_size=1, max_size=12),
    uniform=st.floats(0, 1, exclude_max=True),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_inverse_cdf_is_the_first_token_beyond(
    weights: list[float], uniform: float, dtype: torch.dtype
) -> None:
    probs = torch.tensor(weights, dtype=dtype)
    if not probs.sum():
        return
    token = inverse_cdf(probs, uniform)
    assert probs[token] > 0
    cumulated = probs.double().cumsum(0).tolist()
    goal = uniform * cumulated[-1]
    assert goal <= cumulated[token]
    assert token == 0 or cumulated[token - 1] <= goal


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_inverse_cdf_skips_zeros_at_both_ends(uniform: float) -> None:
    probs = torch.tensor([0, 0, 1 / 3, 2 / 3, 0, 0])
    assert inverse_cdf(probs, uniform) in (2, 3)
