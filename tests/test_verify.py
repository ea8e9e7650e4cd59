"""Verification rules by themselves, every outcome counted."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from lossless.enumeration import TOLERANCE, Branches, Enumerator, distance
from torch import Tensor

from slipstream.types import ROOT, Draft, Verdict, chain
from slipstream.verify import (
    block_verify,
    follow,
    rejection_sample,
    residual,
    typical_acceptance,
)

Verify = Callable[[Draft, Tensor, Enumerator, int], Verdict]
THIRDS = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)


class Model:
    """A distribution for each text, float64; some probabilities are exactly zero."""

    def __init__(self, vocab_size: int, seed: int, zeros: float = 0.0) -> None:
        self._vocab, self._seed, self._zeros = vocab_size, seed, zeros

    def __call__(self, text: Sequence[int]) -> Tensor:
        rng = np.random.default_rng([self._seed, len(text), *text])
        weights = rng.exponential(size=self._vocab) ** 2
        weights[rng.random(self._vocab) < self._zeros] = 0
        weights[rng.integers(self._vocab)] += 0.1  # never all zero
        return torch.tensor(weights / weights.sum(), dtype=torch.float64)


def always(probs: Tensor) -> Callable[[Sequence[int]], Tensor]:
    return lambda _: probs


def draw(model: Callable, parents: Sequence[int], noise: Enumerator, replace: bool) -> Draft:
    """Draw a tree of tokens; siblings with or without replacement."""
    tokens: list[int] = []
    rows: list[Tensor] = []
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        path = () if parent == ROOT else paths[parent]
        row = model(path).clone()
        if not replace:
            row[[tokens[i] for i in range(node) if parents[i] == parent]] = 0
        if row.sum() == 0:  # nothing left to draw; known before anything is drawn
            row = torch.full_like(row, 1 / len(row))
        rows.append(row / row.sum())
        tokens.append(noise.sample_draft(rows[-1], node))
        paths.append((*path, tokens[-1]))
    return Draft(tokens=tokens, parents=parents, draft_probs=torch.stack(rows))


def rows_of(model: Callable, draft: Draft) -> Tensor:
    return torch.stack([model(draft.suffix(node)) for node in range(ROOT, len(draft))])


def outcomes(
    verify: Verify, target: Callable, model: Callable, parents: Sequence[int], replace: bool = False
) -> tuple[dict, float]:
    """The joint distribution of depth + 1 tokens, and the expected number of accepted ones.

    A verdict that is shorter is completed by the target, token by token.
    """
    deepest = max(
        len(Draft(tokens=parents, parents=parents).suffix(n)) for n in range(len(parents))
    )
    spread: dict = defaultdict(float)
    accepted = 0.0
    branches = Branches()
    for _ in branches.all():
        noise = Enumerator(branches)
        draft = draw(model, parents, noise, replace)
        verdict = verify(draft, rows_of(target, draft), noise, 0)
        text = [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
        while len(text) < deepest + 1:
            text.append(noise.sample(target(tuple(text)), len(text)))
        spread[tuple(text)] += branches.probability
        accepted += branches.probability * len(verdict.path)
    return dict(spread), accepted


def wanted(target: Callable, vocab: int, length: int) -> dict:
    spread = {(): 1.0}
    for _ in range(length):
        spread = {
            (*text, token): p * float(target(text)[token])
            for text, p in spread.items()
            for token in range(vocab)
        }
    return spread


def test_hand_check_of_block_verification() -> None:
    """Sun et al., section 1: 10/9 expected accepted token by token, 11/9 by block."""
    target, model = always(THIRDS), always(THIRDS.flip(0))
    chains, by_token = outcomes(rejection_sample, target, model, [-1, 0])
    blocks, by_block = outcomes(block_verify, target, model, [-1, 0])
    assert by_token == pytest.approx(10 / 9, abs=TOLERANCE)
    assert by_block == pytest.approx(11 / 9, abs=TOLERANCE)
    for got in (chains, blocks):
        assert distance(got, wanted(target, 2, 3)) < TOLERANCE


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_is_exact_and_accepts_at_least_as_much(k: int, zeros: float) -> None:
    parents = range(-1, k - 1)
    gained = 0.0
    for seed in range(8 if k < 3 else 3):
        target, model = Model(3, seed, zeros), Model(3, seed + 100, zeros)
        chains, by_token = outcomes(rejection_sample, target, model, parents)
        blocks, by_block = outcomes(block_verify, target, model, parents)
        want = wanted(target, 3, k + 1)
        assert distance(chains, want) < TOLERANCE
        assert distance(blocks, want) < TOLERANCE
        assert by_block >= by_token - TOLERANCE
        gained += by_block - by_token
    assert k == 1 or gained > 1e-3


def test_rejection_accepts_one_minus_total_variation() -> None:
    for seed in range(20):
        target, model = Model(4, seed), Model(4, seed + 100)
        _, accepted = outcomes(rejection_sample, target, model, [-1])
        overlap = float(torch.minimum(target(()), model(())).sum())
        assert accepted == pytest.approx(overlap, abs=TOLERANCE)


TREES = [[-1, -1], [-1, -1, -1], [-1, -1, 0], [-1, -1, 1], [-1, 0, 0], [-1, 0, -1], [-1, 0, 0, -1]]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_sampled_trees_are_exact(parents: list[int], replace: bool) -> None:
    for seed in range(3):
        target, model = Model(3, seed), Model(3, seed + 100, zeros=0.2)
        got, _ = outcomes(rejection_sample, target, model, parents, replace)
        depth = max(len(text) for text in got)
        assert distance(got, wanted(target, 3, depth)) < TOLERANCE


def test_siblings_raise_acceptance() -> None:
    target, model = Model(4, 1), Model(4, 101)
    one, two, three = (
        outcomes(rejection_sample, target, model, [-1] * count)[1] for count in (1, 2, 3)
    )
    assert one < two < three


def test_equal_distributions_are_always_accepted() -> None:
    model = Model(3, 1)
    for verify in (rejection_sample, block_verify):
        assert outcomes(verify, model, model, [-1, 0, 1])[1] == pytest.approx(3, abs=1e-9)


def test_disjoint_distributions_are_never_accepted() -> None:
    low = torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64)
    for verify in (rejection_sample, block_verify):
        got, accepted = outcomes(verify, always(low.flip(0)), always(low), [-1, 0])
        assert accepted == 0
        assert distance(got, wanted(always(low.flip(0)), 4, 3)) < TOLERANCE


@pytest.mark.parametrize("parents", [[], [-1], [-1, 0, 1], *TREES], ids=str)
def test_following_a_deterministic_draft_is_exact(parents: list[int]) -> None:
    """Also when siblings are the same token twice."""
    target = Model(3, 3)
    rng = np.random.default_rng(1)
    for _ in range(5):
        tokens = rng.integers(3, size=len(parents)).tolist()
        draft = Draft(tokens=tokens, parents=parents)
        probs = rows_of(target, draft)
        spread: dict = defaultdict(float)
        branches = Branches()
        for _ in branches.all():
            noise = Enumerator(branches)
            verdict = follow(draft, lambda row, n=noise, p=probs: n.sample(p[row], row))
            text = [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
            while len(text) < 4:
                text.append(noise.sample(target(tuple(text)), 100 + len(text)))
            spread[tuple(text)] += branches.probability
        assert distance(dict(spread), wanted(target, 3, 4)) < TOLERANCE


def test_follow_takes_the_first_of_two_equal_siblings_and_asks_once_a_row() -> None:
    draft = Draft(tokens=[5, 5, 6], parents=[-1, -1, 0])
    asked: list[int] = []

    def choose(row: int) -> int:
        asked.append(row)
        return {0: 5, 1: 6, 3: 7}[row]

    verdict = follow(draft, choose)
    assert (list(verdict.path), verdict.next_token, verdict.origin) == ([0, 2], 7, "bonus")
    assert asked == [0, 1, 3]


@pytest.mark.parametrize("verify", [rejection_sample, block_verify])
def test_origins(verify: Verify) -> None:
    """All accepted: bonus; stopped before the end: recovered; nothing drafted: plain."""

    class Fixed(Enumerator):
        def __init__(self, answer: bool) -> None:
            self.answer = answer

        def accept(self, probability: float, position: int, sibling: int = 0) -> bool:
            return self.answer

        def sample(self, probs: Tensor, position: int) -> int:
            return int(probs.argmax())

    row = torch.tensor([0.25, 0.75])
    draft = chain([0, 0], torch.stack([row.flip(0)] * 2))
    probs = torch.stack([row] * 3)
    assert verify(draft, probs, Fixed(True), 0).origin == "bonus"
    assert list(verify(draft, probs, Fixed(True), 0).path) == [0, 1]
    assert verify(draft, probs, Fixed(False), 0).origin == "recovered"
    nothing = Draft(draft_probs=torch.zeros(0, 2))
    assert verify(nothing, probs[:1], Fixed(True), 0).origin == "plain"


def test_residual_is_what_the_draft_did_not_cover() -> None:
    target = torch.tensor([0.5, 0.3, 0.2, 0.0])
    draft = torch.tensor([0.1, 0.3, 0.4, 0.2])
    torch.testing.assert_close(residual(target, draft), torch.tensor([1.0, 0, 0, 0]))
    assert torch.equal(residual(target, target), target)  # nothing left: the target's own


@pytest.mark.parametrize("verify", [rejection_sample, block_verify])
def test_float32_rounding_never_gives_a_token_without_probability(verify: Verify) -> None:
    """Two float32 distributions equal up to rounding; tokens of probability zero in both."""
    from slipstream.noise import Noise

    probs = torch.tensor([1 / 3, 1 / 3, 0, 1 / 3, 0])
    near = torch.nextafter(probs, torch.where(probs > 0, 1.0, 0.0))
    for seed in range(300):
        noise = Noise(seed)
        tokens = [noise.sample_draft(near, i) for i in range(3)]
        verdict = verify(chain(tokens, torch.stack([near] * 3)), probs.expand(4, -1), noise, 0)
        assert probs[verdict.next_token] > 0
        assert math.isclose(float(near.sum()), 1, rel_tol=1e-5)


def test_block_verification_needs_a_chain() -> None:
    row = torch.tensor([0.5, 0.5])
    tree = Draft(tokens=[0, 1], parents=[-1, -1], draft_probs=torch.stack([row, row]))
    with pytest.raises(AssertionError):
        block_verify(tree, row.expand(3, -1), Enumerator(Branches()), 0)  # type: ignore[arg-type]


# Typical acceptance: lossy, by the rule of its paper


@pytest.mark.parametrize(
    ("probs", "token", "accepted"),
    [
        ([0.6, 0.32, 0.08], 2, False),  # H = 0.87: 0.09 decides
        ([0.95, 0.03, 0.02], 1, False),  # H = 0.23: 0.09 decides
        ([0.85, 0.1, 0.05], 1, True),
        ([0.85, 0.1, 0.05], 2, False),
        ([0.05] * 20, 7, True),  # H = log 20: 0.3 / 20 decides, below 0.09
        ([1.0, 0.0], 1, False),
        ([1.0, 0.0], 0, True),
    ],
)
def test_what_is_typical(probs: list[float], token: int, accepted: bool) -> None:
    row = torch.tensor(probs, dtype=torch.float64)
    entropy = -sum(p * math.log(p) for p in probs if p)
    assert accepted is (probs[token] > min(0.09, 0.3 * math.exp(-entropy)))
    noise = Enumerator(Branches())
    verdict = typical_acceptance(chain([token]), row.expand(2, -1), noise, 0)  # type: ignore[arg-type]
    assert list(verdict.path) == ([0] if accepted else [])
    assert verdict.origin == ("bonus" if accepted else "recovered")


def test_the_longest_typical_path_counts_and_of_equals_the_most_probable() -> None:
    rows = [
        [0.6, 0.3, 0.1, 0.0],  # after the newest token
        [0.0, 0.0, 0.0, 1.0],  # after node 0: 0, its child 1 is refused
        [0.25, 0.25, 0.25, 0.25],
        [0.5, 0.3, 0.2, 0.0],  # after node 2: 1, both its children stand
        [0.1, 0.9, 0.0, 0.0],
        [0.2, 0.8, 0.0, 0.0],
    ]
    draft = Draft(tokens=[0, 1, 1, 1, 0], parents=[ROOT, 0, ROOT, 2, 2])
    noise = Enumerator(Branches())
    probs = torch.tensor(rows, dtype=torch.float64)
    verdict = typical_acceptance(draft, probs, noise, 5)  # type: ignore[arg-type]
    assert list(verdict.path) == [2, 4]
    assert verdict.next_token == 0  # the first branch of a sample of the last row


def test_an_empty_draft_leaves_a_plain_sample() -> None:
    spread: dict = defaultdict(float)
    branches = Branches()
    for _ in branches.all():
        verdict = typical_acceptance(Draft(), THIRDS[None], Enumerator(branches), 0)  # type: ignore[arg-type]
        spread[verdict.next_token] += branches.probability
        assert verdict.origin == "plain"
    assert spread == pytest.approx({0: 1 / 3, 1: 2 / 3})
