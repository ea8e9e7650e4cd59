"""Several drafters at once: a long draft goes alone, shorter ones make one tree.

Prompt lookup is nearly free and seldom wrong about long matches; a head always has a guess. Their
drafts are deterministic, so one tree of both is verified without loss like that of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.types import ROOT, Draft

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.drafters import Drafter, DrafterConfig, Target
    from slipstream.request import Request

_ENOUGH = 6  # tokens of a path: prompt lookup drafts as many where three tokens match


@dataclass(frozen=True, kw_only=True)
class TogetherConfig:
    """parts: of each drafter, in the order in which they are asked."""

    parts: Sequence[DrafterConfig]

    @property
    def num_speculative_tokens(self) -> int:
        return max(part.num_speculative_tokens for part in self.parts)

    def build(self, target: Target) -> Together:
        return Together([(part.build(target), part.num_speculative_tokens) for part in self.parts])


class Together:
    """Asks one drafter after the other, up to the first that drafts ``_ENOUGH`` tokens.

    parts: drafters of deterministic drafts, each with its own longest draft.
    """

    def __init__(self, parts: Sequence[tuple[Drafter, int]]) -> None:
        self._parts = parts
        self._looking = [drafter for drafter, _ in parts if hasattr(drafter, "taps")]
        self.taps = [layer for drafter in self._looking for layer in drafter.taps]

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft()] * len(requests)
        asked = list(range(len(requests)))
        for drafter, longest in self._parts:
            of = [min(budgets[i], longest) for i in asked]
            made = drafter.propose([requests[i] for i in asked], of)
            for i, draft in zip(asked, made, strict=True):
                drafts[i] = draft if draft.depth >= _ENOUGH else merged(drafts[i], draft)
            asked = [i for i in asked if drafts[i].depth < _ENOUGH]
        return drafts

    def observe(self, request: Request, features: Tensor) -> None:
        counts = [len(drafter.taps) for drafter in self._looking]
        for drafter, part in zip(self._looking, features.split(counts, dim=1), strict=True):
            drafter.observe(request, part)  # type: ignore[attr-defined]

    def release(self, request: Request) -> None:
        for drafter, _ in self._parts:
            drafter.release(request)


def merged(first: Draft, second: Draft) -> Draft:
    """One tree of both, paths that they share once; the first one's nodes come first."""
    if not len(first) or not len(second):
        return second if len(second) else first
    tokens, parents = list(first.tokens), list(first.parents)
    known = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    at = {ROOT: ROOT}
    for node, (token, parent) in enumerate(zip(second.tokens, second.parents, strict=True)):
        edge = at[parent], token
        if edge not in known:
            known[edge] = len(tokens)
            parents.append(edge[0])
            tokens.append(token)
        at[node] = known[edge]
    return Draft(tokens=tokens, parents=parents)
