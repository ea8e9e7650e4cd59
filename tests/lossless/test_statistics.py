"""The real ``Noise``: frequencies over many seeds. Each assertion fails by chance once in 1e9."""

import math
from functools import cache

import pytest
import torch
from lossless import cases
from lossless.enumeration import expected_output, first_tokens, processed
from lossless.goodness import FALSE_ALARM, agrees
from scipy.stats import binom
from toys import ToyRuntime, drain

from slipstream.noise import Noise

PROBS = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.0999, 0.0001, 0.0])
EXPECTED = dict(enumerate(PROBS.double().tolist()))
SEEDS = 6000
RUNS = 1000


def test_target_samples_follow_their_distribution() -> None:
    assert agrees((Noise(seed).sample(PROBS, 7) for seed in range(SEEDS)), EXPECTED)
    noise = Noise(1)
    assert agrees((noise.sample(PROBS, position) for position in range(SEEDS)), EXPECTED)


def test_draft_samples_follow_their_distribution() -> None:
    assert agrees((Noise(seed).sample_draft(PROBS, 7) for seed in range(SEEDS)), EXPECTED)
    noise = Noise(1)
    samples = []
    for noise.step in range(SEEDS):
        samples.append(noise.sample_draft(PROBS, 7))
    assert agrees(samples, EXPECTED)


@pytest.mark.parametrize("chance", [0.0, 0.03, 0.5, 0.9, 1.0, 2.5])
def test_accepts_with_the_probability_asked_for(chance: float) -> None:
    want = {True: min(chance, 1.0), False: 1 - min(chance, 1.0)}
    assert agrees((Noise(seed).accept(chance, 7) for seed in range(SEEDS)), want)
    noise = Noise(1)
    answers = (noise.accept(chance, p, sibling) for p in range(SEEDS // 4) for sibling in range(4))
    assert agrees(answers, want)


def test_the_test_itself_raises_the_alarm() -> None:
    """Negative control: a distribution that is off by 0.05 here and there does not pass."""
    shifted = EXPECTED | {0: 0.35, 2: 0.35}
    assert not agrees((Noise(seed).sample(PROBS, 7) for seed in range(SEEDS)), shifted)
    impossible = EXPECTED | {0: 0.0, 1: 0.4}
    assert not agrees((Noise(seed).sample(PROBS, 7) for seed in range(SEEDS)), impossible)


KEYS = {
    "position": lambda noise: (noise.sample(FOUR, 3), noise.sample(FOUR, 4)),
    "purpose": lambda noise: (noise.sample(FOUR, 3), noise.sample_draft(FOUR, 3)),
    "sibling": lambda noise: (
        sum(noise.accept(c, 3, 0) for c in (0.25, 0.5, 0.75)),
        sum(noise.accept(c, 3, 1) for c in (0.25, 0.5, 0.75)),
    ),
    "accept and draft": lambda noise: (
        noise.sample_draft(FOUR, 3),
        sum(noise.accept(c, 3) for c in (0.25, 0.5, 0.75)),
    ),
    "step": lambda noise: (noise.sample_draft(FOUR, 3), _later(noise).sample_draft(FOUR, 3)),
    "seed": lambda noise: (noise.sample(FOUR, 3), Noise(noise.seed + SEEDS).sample(FOUR, 3)),
}
FOUR = torch.full((4,), 0.25)


def _later(noise: Noise) -> Noise:
    noise.step += 1
    return noise


@pytest.mark.parametrize("key", KEYS)
def test_draws_of_different_keys_are_independent(key: str) -> None:
    pairs = [KEYS[key](Noise(seed)) for seed in range(SEEDS)]
    assert agrees(pairs, {(a, b): 1 / 16 for a in range(4) for b in range(4)})


COMBINATIONS = [
    "draft model, rejection",
    "draft model, block",
    "two siblings, rejection",
    "toy tree, follow",
    "no drafter",
]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_whole_engine(combination: str) -> None:
    """First token, and all three jointly, over one request a seed."""
    target = ToyRuntime(cases.VOCAB, seed=2)
    want = expected_output(target, cases.PROMPT, cases.params("cold", max_tokens=3), eos=[3])
    texts = sample_texts(combination)
    assert agrees([text for text, _ in texts], want)
    assert agrees([text[0][0] for text, _ in texts], first_tokens(want))
    other = ToyRuntime(cases.VOCAB, seed=1)
    wrong = expected_output(other, cases.PROMPT, cases.params("cold", max_tokens=3), eos=[3])
    assert not agrees([text for text, _ in texts], wrong)  # negative control


@cache
def sample_texts(combination: str) -> list:
    """(outcome, request) a seed, many requests at once."""
    engine = cases.engine(combination, ToyRuntime(cases.VOCAB, seed=2), 2, max_num_seqs=25)
    done = []
    for first in range(0, RUNS, 25):
        requests = [
            engine.add(cases.PROMPT, cases.params("cold", max_tokens=3, seed=seed))
            for seed in range(first, first + 25)
        ]
        drain(engine)
        done += [((tuple(r.output), r.finish_reason), r) for r in requests]
    return done


def test_siblings_drawn_with_the_same_noise_raise_the_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: recursive rejection sampling needs independent draws."""
    draw = Noise.sample_draft
    monkeypatch.setattr(Noise, "sample_draft", lambda *args: draw(*args[:3]))
    want = expected_output(
        ToyRuntime(cases.VOCAB, seed=2), cases.PROMPT, cases.params("cold", max_tokens=3), eos=[3]
    )
    texts = sample_texts.__wrapped__("two siblings, rejection")
    assert not agrees([text for text, _ in texts], want)


def test_acceptance_by_position_is_one_minus_total_variation() -> None:
    """In the first step after the prompt; exact expectations, one and two tokens deep."""
    target, model = ToyRuntime(cases.VOCAB, seed=2), ToyRuntime(cases.VOCAB, seed=7)

    def overlaps(text: tuple[int, ...]) -> list[float]:
        rows = [
            processed(
                m.logits((*cases.PROMPT, *text)), cases.params("cold"), cases.PROMPT, text, ()
            )
            for m in (target, model)
        ]
        return [min(p, q) for p, q in zip(*rows, strict=True)]

    first = overlaps(())
    second = [
        chance * math.fsum(overlaps((x,))) for x, chance in enumerate(first) if x != cases.EOS
    ]
    origins = [r.origins for _, r in sample_texts("draft model, rejection")]
    for depth, chance in ((1, math.fsum(first)), (2, math.fsum(second))):
        count = sum(each[:depth] == ["accepted"] * depth for each in origins)
        tail = min(binom.cdf(count, RUNS, chance), binom.sf(count - 1, RUNS, chance))
        assert tail > FALSE_ALARM / 2  # two-sided
