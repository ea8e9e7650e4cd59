"""The records that travel through a decode step.

Shape legend, used in every docstring of the package:
B requests in a step · Q rows of one request · N rows asked for, over all requests ·
V vocabulary · T committed tokens · D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slipstream import tree

if TYPE_CHECKING:  # the options of a drafter are checked before torch is there
    from torch import Tensor

ROOT = -1
"""Parent of a draft's first tokens: the newest token of the request, row 0 of a decode step."""

Origin = Literal["plain", "accepted", "recovered", "bonus"]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Guessed continuations of a request as a tree; a chain is a tree, no guess an empty one.

    tokens: n guessed token ids.
    parents: n indices into ``tokens``, ``ROOT`` for children of the newest token; a parent comes
        before its children, siblings stand in the order in which they were drawn.
    draft_probs: [n, V], row i the distribution that token i was really drawn from, earlier
        siblings already removed where the drawing was without replacement; None if the draft is
        deterministic.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    draft_probs: Tensor | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        assert all(ROOT <= parent < node for node, parent in enumerate(self.parents))
        assert self.draft_probs is None or len(self.draft_probs) == len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return tree.is_chain(self.parents)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return int(tree.depths(self.parents).max(initial=-1)) + 1

    def children(self, node: int) -> list[int]:
        """Children of a node (or of ``ROOT``), in the order in which they were drawn."""
        return [child for child in range(node + 1, len(self)) if self.parents[child] == node]

    def suffix(self, node: int) -> tuple[int, ...]:
        """The guessed tokens from the newest token (excluded) down to a node."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(path))


def chain(tokens: Sequence[int], draft_probs: Tensor | None = None) -> Draft:
    """A draft in which each token follows the one before."""
    return Draft(tokens=tokens, parents=range(ROOT, len(tokens) - 1), draft_probs=draft_probs)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the target makes of a draft.

    path: accepted nodes of the draft, from the top down.
    next_token: the token after them: *recovered* from the residual at the first rejection, or the
        *bonus* after a path that was accepted to its end.
    """

    path: Sequence[int]
    next_token: int
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """One request's part of a step.

    tokens: Q ids: known tokens that are not committed yet (a chain), then the draft.
    parents: Q row indices, -1 for the child of the newest committed token.
    logit_rows: the rows whose logits are asked for.
    """

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int]
    logit_rows: Sequence[int]


def chain_rows(slot: int, tokens: Sequence[int], logit_rows: Sequence[int] = ()) -> StepRows:
    """Rows that follow each other."""
    parents = range(-1, len(tokens) - 1)
    return StepRows(slot=slot, tokens=tokens, parents=parents, logit_rows=logit_rows)


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step computes; the step itself changes nothing.

    logits: [N, V], at least float32: the rows asked for, request after request.
    new_kv: KV of the step's tokens, as the runtime's own cache takes it.
    features: [R, taps, hidden] of all R rows, request after request; None without taps.
    """

    logits: Tensor
    new_kv: Any
    features: Tensor | None = None


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token and its rank (1 = most probable) among all tokens."""

    logprob: float
    rank: int
    decoded_token: str | None = None
