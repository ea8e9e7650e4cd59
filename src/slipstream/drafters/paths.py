"""Trees of ranks: which of a head's best guesses hang where.

Heads that guess several positions at once, none knowing what the others chose, give each position
a list of tokens from the best down. A tree over them is a tree of ranks; a path (0, 2) is the best
token of head 0 and then the third best of head 1.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.types import ROOT, Draft


@dataclass(frozen=True, kw_only=True)
class RankTree:
    """A node each: parents before children, better siblings before worse.

    parents: indices, ``ROOT`` for children of the newest token. heads: whose guess a node is.
    ranks: which of that head's guesses, 0 for the best.
    """

    parents: Sequence[int]
    heads: Sequence[int]
    ranks: Sequence[int]

    def __len__(self) -> int:
        return len(self.parents)

    def draft(self, tokens: Sequence[Sequence[int]]) -> Draft:
        """tokens: each head's guesses, the best first."""
        picked = [tokens[head][rank] for head, rank in zip(self.heads, self.ranks, strict=True)]
        return Draft(tokens=picked, parents=self.parents)

    def cut(self, depth: int, width: int) -> RankTree:
        """Without what lies deeper, and without ranks from ``width`` on and what hangs on them."""
        index = {ROOT: ROOT}
        for node, parent in enumerate(self.parents):
            if parent in index and self.heads[node] < depth and self.ranks[node] < width:
                index[node] = len(index) - 1
        kept = [node for node in index if node != ROOT]
        return RankTree(
            parents=[index[self.parents[node]] for node in kept],
            heads=[self.heads[node] for node in kept],
            ranks=[self.ranks[node] for node in kept],
        )


def best_tree(log_probs: Sequence[Sequence[float]], nodes: int, least: float) -> RankTree:
    """The ``nodes`` most probable paths, a path's chance being the product of its tokens'.

    log_probs: each head's, falling. least: log-probability below which no path is taken. As a path
    is never more probable than its beginning, they form a tree, and no other tree of as many nodes
    has more tokens accepted on average, if the chances are right and the positions independent
    (OPT-Tree, Wang et al. 2024, arXiv 2406.17276). Of equals the one found first.
    """
    tree: list[tuple[int, int, int]] = []  # parent, head, rank
    waiting: list[tuple[float, int, int, int, int, float]] = []
    found = 0

    def offer(parent: int, head: int, rank: int, above: float) -> None:
        nonlocal found
        if head < len(log_probs) and rank < len(log_probs[head]):
            score = above + log_probs[head][rank]
            if score >= least:
                heapq.heappush(waiting, (-score, found, parent, head, rank, above))
                found += 1

    offer(ROOT, 0, 0, 0.0)
    while waiting and len(tree) < nodes:
        minus, _, parent, head, rank, above = heapq.heappop(waiting)
        tree.append((parent, head, rank))
        offer(len(tree) - 1, head + 1, 0, -minus)
        offer(parent, head, rank + 1, above)
    parents, heads, ranks = ([node[i] for node in tree] for i in range(3))
    return RankTree(parents=parents, heads=heads, ranks=ranks)


def read_tree(tree: Any) -> RankTree:
    """``tree_of`` a list, or of the list in a JSON file of that name."""
    if isinstance(tree, str):
        try:
            tree = json.loads(Path(tree).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SlipstreamError(f"tree: {tree} can't be read: {error}") from error
    return tree_of(tree)


def tree_of(paths: Sequence[Sequence[int]]) -> RankTree:
    """From a list of paths, each a list of ranks, as Medusa's authors publish them.

    Raises SlipstreamError where a path's beginning is not itself a path, or one comes twice.
    """
    if not isinstance(paths, Sequence) or isinstance(paths, str) or not paths:
        raise SlipstreamError("a tree is a list of paths, such as [[0], [1], [0, 0]]")
    for path in paths:
        listed = isinstance(path, Sequence) and not isinstance(path, str) and len(path) > 0
        if not listed or not all(type(rank) is int and rank >= 0 for rank in path):
            raise SlipstreamError(f"a path of a tree is a list of ranks from 0 up, got {path!r}")
    ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
    index: dict[tuple[int, ...], int] = {(): ROOT}
    for path in ordered:
        if path in index:
            raise SlipstreamError(f"the tree has the path {list(path)} twice")
        if path[:-1] not in index:
            raise SlipstreamError(f"the tree has {list(path)}, but not {list(path[:-1])} before it")
        index[path] = len(index) - 1
    return RankTree(
        parents=[index[path[:-1]] for path in ordered],
        heads=[len(path) - 1 for path in ordered],
        ranks=[path[-1] for path in ordered],
    )
