"""The tree that a head drafts: the most probable paths, level by level (EAGLE-2, Li et al. 2024,
arXiv 2406.16858). Here over any head that runs rows; ``NativeHead.expand`` does the same in one
call and is held against this.

Shapes: B requests · n rows of one of them · N rows of all · h hidden · d draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream import fast_rows
from slipstream.cache import Cache
from slipstream.drafters.paths import RankTree
from slipstream.types import ROOT, StepOutput, StepRows

Expanded = tuple[list[int], list[int], list[float]]
"""Tokens (target ids), parents (indices into the tokens, ``ROOT`` for children of the root) and
scores (log-probability of the path down to each token)."""


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """depth: levels at most. width: nodes expanded a level, and children of each; 1 makes a chain.
    nodes: of the whole tree at most. floor: the least probability of a path that is drafted.
    fixed: instead of the last three, always the same paths of ranks.
    """

    depth: int
    width: int = 1
    nodes: int = 1
    floor: float = 0.0
    fixed: RankTree | None = None

    def __post_init__(self) -> None:
        assert self.depth >= 0
        assert self.width >= 1
        assert self.nodes >= 0
        assert 0 <= self.floor <= 1

    @property
    def least(self) -> float:
        """``floor`` as a score."""
        return math.log(self.floor) if self.floor > 0 else -math.inf


@dataclass(frozen=True, kw_only=True)
class TreeRows:
    """A request's rows below its root row, all so far: a head without a memory runs them again.

    tokens: n target ids. parents: n indices into ``tokens``, ``ROOT`` for children of the root row.
    hidden: [n, h], what each row takes in: its parent's hidden state. new: how many of the last
    rows did not run before.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    hidden: Tensor
    new: int


Run = Callable[[Sequence[TreeRows]], tuple[Tensor, Tensor]]
"""Rows of B requests → logits [N, d] and hidden states [N, h] of their N new rows in order. A
request may have no new rows, or none at all."""


class SteppingHead(Protocol):
    """Shapes as in ``runtimes/torch_head.py``."""

    target_ids: Tensor

    def fuse(self, features: Tensor) -> Tensor: ...

    def step(self, batch: Sequence[StepRows], cache: Cache, hidden: Tensor) -> StepOutput: ...


def expand_below(
    head: SteppingHead,
    batch: Sequence[StepRows],
    cache: Cache,
    features: Tensor,
    shapes: Sequence[TreeShape],
) -> tuple[StepOutput, list[Expanded]]:
    """A tree below the last of each request's known rows; features: [R, F·h] of the target, of the
    position before each of the R known rows. Returns the known rows' KV and B trees."""
    hidden = head.fuse(features)
    output = head.step(batch, cache, hidden)
    assert output.features is not None
    counts = [len(rows.tokens) for rows in batch]
    known = list(hidden.split(counts))
    roots = torch.stack([part[-1, 0] for part in output.features.split(counts)])

    def run(trees: Sequence[TreeRows]) -> tuple[Tensor, Tensor]:
        joined = [_below(*pair) for pair in zip(batch, trees, strict=True)]
        parts = [torch.cat([k, t.hidden]) for k, t in zip(known, trees, strict=True)]
        made = head.step(joined, cache, torch.cat(parts))
        assert made.features is not None
        rows = made.features[:, 0].split([len(r.tokens) for r in joined])
        new = [part[len(part) - t.new :] for part, t in zip(rows, trees, strict=True)]
        return made.logits, torch.cat(new)

    return output, expand_by_steps(run, output.logits, roots, shapes, head.target_ids)


def _below(rows: StepRows, drafted: TreeRows) -> StepRows:
    """Known rows and the tree under the last of them; the logits of its new rows are asked for."""
    count = len(rows.tokens)
    parents = [count - 1 if p == ROOT else count + p for p in drafted.parents]
    total = count + len(parents)
    return StepRows(
        slot=rows.slot,
        tokens=[*rows.tokens, *drafted.tokens],
        parents=[*rows.parents, *parents],
        logit_rows=range(total - drafted.new, total),
    )


def expand_by_steps(
    run: Run, logits: Tensor, hidden: Tensor, shapes: Sequence[TreeShape], target_ids: Tensor
) -> list[Expanded]:
    """A tree for each request, all together level by level.

    logits: [B, d], at least float32, and hidden: [B, h], of the root rows. target_ids: [d].

    Level 1 holds the ``width`` most probable tokens after the root; of each level the ``width``
    best nodes get as many children. Of all nodes the ``nodes`` best stay, in order of creation: a
    parent before its children, siblings by falling probability. Ties: the lower draft id, the
    earlier node. A row of logits with NaN or infinity in it gives no children.
    """
    trees = [(_FixedTree if s.fixed else _Tree)(s, target_ids) for s in shapes]
    while True:
        counts = [len(tree.front) for tree in trees]
        for tree, *level in zip(trees, logits.split(counts), hidden.split(counts), strict=True):
            tree.grow(*level)
        if not any(tree.front for tree in trees):
            return [tree.kept() for tree in trees]
        logits, hidden = run([tree.rows() for tree in trees])


class _Tree:
    """front: the nodes whose rows run next; at first the root, whose row did run."""

    def __init__(self, shape: TreeShape, target_ids: Tensor) -> None:
        self.front = [ROOT]
        self._shape = shape
        self._target_ids = target_ids
        self._level = 0
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._states: dict[int, Tensor] = {}  # of nodes that ran
        self._rows: list[int] = []  # nodes that ran, or run next

    def grow(self, logits: Tensor, hidden: Tensor) -> None:
        """The next level, from the rows of the front. logits: [n, d]. hidden: [n, h]."""
        first = len(self._tokens)
        if self._level < self._shape.depth and self.front:
            fast = fast_rows.serves(logits)
            log_probs = fast_rows.log_softmax(logits) if fast else logits.log_softmax(-1)
            for node, *row in zip(self.front, logits, log_probs, strict=True):
                self._add_children(node, *row)
        self._states |= zip(self.front, hidden, strict=True)
        self._level += 1
        self.front = self._next(first) if self._level < self._shape.depth else []
        self._rows += self.front

    def rows(self) -> TreeRows:
        row_of = {ROOT: ROOT} | {node: row for row, node in enumerate(self._rows)}
        parents = [self._parents[node] for node in self._rows]
        return TreeRows(
            tokens=[self._tokens[node] for node in self._rows],
            parents=[row_of[parent] for parent in parents],
            hidden=torch.stack([self._states[p] for p in parents or [ROOT]])[: len(parents)],
            new=len(self.front),
        )

    def kept(self) -> Expanded:
        nodes = sorted(self._best())
        index = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
        return (
            [self._tokens[node] for node in nodes],
            [index[self._parents[node]] for node in nodes],
            [self._scores[node] for node in nodes],
        )

    def _add_children(self, node: int, logits: Tensor, log_probs: Tensor) -> None:
        if not bool(logits.isfinite().all()):
            return
        ids = _most_probable(logits, self._shape.width)
        scores = log_probs[ids] + (self._scores[node] if node != ROOT else 0.0)
        tokens = self._target_ids[ids.to(self._target_ids.device)]
        for token, score in zip(tokens.tolist(), scores.tolist(), strict=True):
            if score >= self._shape.least:
                self._tokens.append(token)
                self._parents.append(node)
                self._scores.append(score)

    def _next(self, first: int) -> list[int]:
        """The nodes of the newest level, from ``first`` on, that are gone on from: what is not
        among the best now will never be, nor what comes below it."""
        return [node for node in self._best() if node >= first][: self._shape.width]

    def _best(self) -> list[int]:
        """The best nodes, the best first; a parent is never below its child."""
        order = sorted(range(len(self._scores)), key=lambda node: -self._scores[node])
        return order[: self._shape.nodes]


class _FixedTree(_Tree):
    """Ranks that the draft vocabulary doesn't have are left out, and what hangs on them."""

    def __init__(self, shape: TreeShape, target_ids: Tensor) -> None:
        super().__init__(shape, target_ids)
        assert shape.fixed is not None
        self._fixed = shape.fixed
        self._place = {ROOT: ROOT}  # own node → node of the fixed tree

    def _add_children(self, node: int, logits: Tensor, log_probs: Tensor) -> None:
        children = self._children(node)
        if not children or not bool(logits.isfinite().all()):
            return
        ranks = [self._fixed.ranks[child] for child in children]
        ids = _most_probable(logits, 1 + max(ranks))
        above = self._scores[node] if node != ROOT else 0.0
        for child, rank in zip(children, ranks, strict=True):
            if rank < len(ids):
                self._place[len(self._tokens)] = child
                self._tokens.append(int(self._target_ids[ids[rank]]))
                self._parents.append(node)
                self._scores.append(above + float(log_probs[ids[rank]]))

    def _next(self, first: int) -> list[int]:
        return [node for node in range(first, len(self._tokens)) if self._children(node)]

    def _best(self) -> list[int]:
        return list(range(len(self._tokens)))

    def _children(self, node: int) -> list[int]:
        return [c for c, parent in enumerate(self._fixed.parents) if parent == self._place[node]]


def _most_probable(logits: Tensor, count: int) -> Tensor:
    """[d] → the indices of the greatest, the greatest first, of equals the lower first."""
    least = logits.topk(min(count, len(logits))).values[-1]
    ids = (logits >= least).nonzero()[:, 0]
    order = logits[ids].sort(descending=True, stable=True).indices
    return ids[order[:count]]
