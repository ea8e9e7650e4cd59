"""Evidence against "nothing changed" that is valid at any sample size.

A bet against the claim: each observation multiplies the stake by a factor whose mean is 1 if the
claim holds. The product is then a martingale, and the chance that it ever reaches 1/p is at most p
(Ville's inequality): no normal approximation, no bins, nothing to assume of how observations hang
together. Several bets of different strength are averaged, which keeps the mean.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_TOKEN_BETS = np.array([-2.0, -1.0, -0.5, -0.25, 0.25, 0.5])  # powers of 1 / probability
_EVENT_BETS = np.array([-4.0, -2.0, -1.0, -0.4, 0.4, 1.0, 2.0, 4.0])  # log odds
_ROUNDING = 1e-4  # chances are known up to rounding: every bet is made against the worst of them


class TokenBets:
    """Were these tokens drawn from these distributions?

    ``statistic``: Σ(-log p(x_t) - H_t) / √ΣVar_t, nearly standard normal in large samples.
    """

    def __init__(self) -> None:
        self.count = 0
        self._logs = np.zeros(len(_TOKEN_BETS))
        self._excess = 0.0
        self._variance = 0.0

    def add(self, probs: Tensor, token: int) -> None:
        """probs: [V], adding to 1."""
        self.count += 1
        support = probs[probs > 0].double()
        chosen = float(probs[token])
        if chosen <= 0:  # a token that can't occur settles it
            self._logs += math.inf
            self._excess = math.inf
            return
        logs = support.log()
        powers = torch.tensor(_TOKEN_BETS, device=probs.device)[:, None]
        means = torch.logsumexp((1 - powers) * logs, -1)  # log Σ p · p^-λ
        self._logs += -_TOKEN_BETS * math.log(chosen) - means.cpu().numpy()
        entropy = float(-(support * logs).sum())
        self._excess += -math.log(chosen) - entropy
        self._variance += float((support * logs**2).sum()) - entropy**2

    @property
    def statistic(self) -> float:
        return self._excess / math.sqrt(max(self._variance, 1e-9)) if self.count else 0.0

    @property
    def p_value(self) -> float:
        return _p_value(self._logs)


class EventBets:
    """Did these events happen as often as their chances say?

    ``statistic``: Σ(happened - chance) / √Σ chance·(1 - chance).
    """

    def __init__(self) -> None:
        self.count = 0
        self._logs = np.zeros(len(_EVENT_BETS))
        self._excess = 0.0
        self._variance = 0.0

    def add(self, happened: bool, chance: float) -> None:
        self.count += 1
        worst = np.clip(chance + np.sign(_EVENT_BETS) * _ROUNDING, 0, 1)
        self._logs += _EVENT_BETS * happened - np.log1p(worst * np.expm1(_EVENT_BETS))
        self._excess += happened - chance
        self._variance += max(chance * (1 - chance), _ROUNDING)

    @property
    def statistic(self) -> float:
        return self._excess / math.sqrt(self._variance) if self.count else 0.0

    @property
    def p_value(self) -> float:
        return _p_value(self._logs)


def _p_value(logs: np.ndarray) -> float:
    """1 / the mean stake, at most 1."""
    best = float(logs.max())
    if math.isinf(best):
        return 0.0
    mean = best + math.log(float(np.exp(logs - best).mean()))
    return min(1.0, math.exp(-mean))
