"""Counters of one request or of a whole engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.types import ROOT, Draft, Verdict


@dataclass(kw_only=True)
class Metrics:
    """What speculation did.

    steps: verifications, drafts of length 0 included. emitted: output tokens.
    drafted, accepted: draft tokens. tried_at, accepted_at: by position in the draft, how often a
    position was reached with a token to try there, and how often one was accepted.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def observe(self, draft: Draft, verdict: Verdict, emitted: int) -> None:
        self.steps += 1
        self.emitted += emitted
        self.drafted += len(draft)
        self.accepted += len(verdict.path)
        for depth, node in enumerate((ROOT, *verdict.path)):
            if depth < len(verdict.path) or draft.children(node):
                while len(self.tried_at) <= depth:
                    self.tried_at.append(0)
                    self.accepted_at.append(0)
                self.tried_at[depth] += 1
                self.accepted_at[depth] += depth < len(verdict.path)

    @property
    def mean_tokens_per_step(self) -> float:
        """τ: tokens emitted per step, recovered or bonus included; plain decoding has 1."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """α_1, α_2, …: chance that a token at this position is accepted once all before it were."""
        return [a / t for a, t in zip(self.accepted_at, self.tried_at, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "mean_tokens_per_step": round(self.mean_tokens_per_step, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "acceptance_by_position": [round(a, 4) for a in self.acceptance_by_position],
            "steps": self.steps,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
        }


@dataclass(kw_only=True)
class Clock:
    """Seconds of an engine's steps: drafting, the target's forward pass, and all the rest.

    On a GPU the forward pass is only launched in its share; waiting for it falls to the rest.
    """

    draft: float = 0.0
    forward: float = 0.0
    other: float = 0.0

    def add(self, draft: float, forward: float, other: float) -> None:
        self.draft += draft
        self.forward += forward
        self.other += other
