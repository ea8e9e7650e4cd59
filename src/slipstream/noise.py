"""Randomness by counter: every draw is a function of (seed, what it is for, where).

No draw depends on how many were made before it, so a request's text does not depend on its
neighbours. Tokens sampled from the target are keyed by their position alone; with a deterministic
drafter the text therefore depends on the seed only: the same for any drafter, any K, or none.
Draws that a rejected draft may discard are keyed by the step too, so that none is seen twice.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from torch import Tensor

from slipstream import fast_rows

TARGET, ACCEPT, DRAFT = range(3)


class Noise:
    """The random choices of one request.

    seed: an integer in [0, 2**64), or None for a fresh one.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed % 2**64
        self.step = 0  # counted by the engine, once for each verification of this request

    def accept(self, probability: float, position: int, sibling: int = 0) -> bool:
        """True with the given probability (anything from 1 up is certain)."""
        return self._uniform(ACCEPT, position, sibling) < probability

    def sample(self, probs: Tensor, position: int) -> int:
        """A token of the target's (or the residual) distribution ``probs`` [V]."""
        return inverse_cdf(probs, self._uniform(TARGET, position))

    def sample_draft(self, probs: Tensor, position: int, sibling: int = 0) -> int:
        """A token of a drafter's distribution ``probs`` [V]; sibling counts draws at a place."""
        return inverse_cdf(probs, self.draft_number(position, sibling))

    def draft_number(self, position: int, sibling: int = 0) -> float:
        """The number in [0, 1) that ``sample_draft`` draws with."""
        return self._uniform(DRAFT, position, sibling)

    def _uniform(self, purpose: int, position: int, sibling: int = 0) -> float:
        step = 0 if purpose == TARGET else self.step
        counter = np.array([0, position, step, purpose + (sibling << 8)], dtype=np.uint64)
        philox = np.random.Philox(counter=counter, key=np.array([self.seed, 0], dtype=np.uint64))
        return float(np.random.Generator(philox).random())


def inverse_cdf(probs: Tensor, uniform: float) -> int:
    """The first token whose cumulated probability exceeds ``uniform`` · Σ probs; [V] → id.

    A token of probability zero is never returned.
    """
    if fast_rows.serves(probs):
        return fast_rows.inverse_cdf(probs, uniform)
    cumulated = probs.double().cumsum(0)
    target = torch.tensor(uniform, dtype=torch.float64, device=probs.device) * cumulated[-1]
    index = int(torch.searchsorted(cumulated, target, right=True))
    if index == len(probs):  # uniform · Σ rounded up to Σ
        return int(probs.nonzero()[-1])
    return index
