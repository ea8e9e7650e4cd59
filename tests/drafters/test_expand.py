"""The expansion of a tree against its definition, on heads that are a function of the path."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.drafters.expand import Expanded, TreeRows, TreeShape, expand_by_steps
from slipstream.drafters.paths import tree_of
from slipstream.types import ROOT

IDS = torch.tensor([2, 3, 5, 7, 11, 13, 17])  # the target's, of 7 draft tokens
Path = tuple[int, ...]


class Head:
    """Logits of a path of target ids are random, in steps of ``grain``: a coarse one makes ties.
    The hidden state of a row is its path, so that a wrong parent's is seen."""

    def __init__(self, seed: int, grain: float = 0.0) -> None:
        self._seed, self._grain = seed, grain
        self.seen: list[Path] = []

    def logits(self, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, *path)) % 2**63)
        logits = 2 * torch.randn(len(IDS), generator=generator)
        return (logits / self._grain).round() * self._grain if self._grain else logits

    def state(self, path: Path) -> Tensor:
        return torch.tensor([len(path), *path, *[0] * (9 - len(path))], dtype=torch.float32)

    def row(self, rows: TreeRows, row: int) -> Path:
        """The path to a row, as its hidden state and its parents tell it."""
        length, *before = rows.hidden[row].int().tolist()
        path = (*before[:length], rows.tokens[row])
        parent = rows.parents[row]
        assert before[:length] == list(self.row(rows, parent) if parent != ROOT else ())
        return path


def run(heads: Sequence[Head], batch: Sequence[TreeRows]) -> tuple[Tensor, Tensor]:
    logits, hidden = [], []
    for head, rows in zip(heads, batch, strict=True):
        assert len(rows.tokens) == len(rows.parents) == len(rows.hidden)
        for row in range(len(rows.tokens) - rows.new, len(rows.tokens)):
            path = head.row(rows, row)
            head.seen.append(path)
            logits.append(head.logits(path))
            hidden.append(head.state(path))
    return torch.stack(logits), torch.stack(hidden)


def expand(heads: Sequence[Head], shapes: Sequence[TreeShape]) -> list[Expanded]:
    logits = torch.stack([head.logits(()) for head in heads])
    hidden = torch.stack([head.state(()) for head in heads])
    return expand_by_steps(lambda batch: run(heads, batch), logits, hidden, shapes, IDS)


def by_definition(head: Head, shape: TreeShape) -> list[tuple[Path, float]]:
    """Level by level, nothing left out before the end."""
    level, all_nodes = [((), 0.0)], []
    for _ in range(shape.depth):
        best = sorted(level, key=lambda node: -node[1])[: shape.width]
        level = []
        for path, score in best:
            probs = head.logits(path).log_softmax(-1)
            order = sorted(range(len(IDS)), key=lambda i: -head.logits(path)[i])
            for i in order[: shape.width]:
                node = ((*path, int(IDS[i])), float(probs[i] + score))
                if math.exp(node[1]) >= shape.floor:
                    level.append(node)
        all_nodes += level
    kept = sorted(range(len(all_nodes)), key=lambda i: -all_nodes[i][1])[: shape.nodes]
    return [all_nodes[i] for i in sorted(kept)]


def paths(tree: Expanded) -> list[Path]:
    found: list[Path] = []
    for token, parent in zip(tree[0], tree[1], strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


SHAPES = st.builds(
    TreeShape,
    depth=st.integers(0, 5),
    width=st.integers(1, 9),
    nodes=st.integers(0, 30),
    floor=st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    grain=st.sampled_from([0.0, 2.0]),
)
def test_the_tree_is_the_one_defined(shapes: list[TreeShape], seed: int, grain: float) -> None:
    heads = [Head(seed + i, grain) for i in range(len(shapes))]
    for head, shape, tree in zip(heads, shapes, expand(heads, shapes), strict=True):
        want = by_definition(head, shape)
        assert paths(tree) == [path for path, _ in want]
        assert tree[2] == pytest.approx([score for _, score in want], abs=1e-5)
        assert len(set(head.seen)) == len(head.seen) <= shape.width * max(shape.depth - 1, 0)
        assert all(len(path) < shape.depth for path in head.seen)


def test_a_chain_follows_the_most_probable_token() -> None:
    head = Head(3)
    ((tokens, parents, _),) = expand([head], [TreeShape(depth=4, width=1, nodes=9)])
    assert list(parents) == [-1, 0, 1, 2]
    for i, token in enumerate(tokens):
        assert token == IDS[head.logits(tuple(tokens[:i])).argmax()]


def test_nothing_is_run_that_can_not_be_kept() -> None:
    head = Head(3)
    expand([head], [TreeShape(depth=9, width=3, nodes=3)])
    assert len(head.seen) < 3 * 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_end_a_branch(bad: float) -> None:
    logits = torch.stack([Head(1).logits(()), Head(2).logits(())])
    logits[0, 4] = bad
    shapes = [TreeShape(depth=1, width=2, nodes=5)] * 2
    hidden = torch.zeros(2, 10)
    empty, tree = expand_by_steps(lambda batch: run([], batch), logits, hidden, shapes, IDS)
    assert empty == ([], [], [])
    assert len(tree[0]) == 2


FIXED = [[0], [2], [0, 1], [0, 0], [2, 0], [2, 9], [0, 1, 0], [2, 9, 0]]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_fixed_paths_are_ranks_along_themselves(depth: int) -> None:
    """Rank 9 is none of seven tokens: it is left out, and what hangs on it."""
    head = Head(4)
    (tree,) = expand([head], [TreeShape(depth=depth, fixed=tree_of(FIXED))])
    want = set()
    for ranks in FIXED:
        path: Path = ()
        for rank in ranks:
            order = sorted(range(len(IDS)), key=lambda i: -head.logits(path)[i])
            path = (*path, *(int(IDS[i]) for i in order[rank : rank + 1]))
        if len(path) == len(ranks) <= depth and 9 not in ranks:
            want.add(path)
    assert set(paths(tree)) == want
    assert len(tree[0]) == len(want)
    assert not any(len(path) == depth for path in head.seen)  # the last level needs no row
    for path, score in zip(paths(tree), tree[2], strict=True):
        steps = [head.logits(path[:i]).log_softmax(-1) for i in range(len(path))]
        ids = [IDS.tolist().index(token) for token in path]
        assert score == pytest.approx(
            sum(float(s[i]) for s, i in zip(steps, ids, strict=True)), abs=1e-5
        )


def test_fixed_and_grown_trees_in_one_batch() -> None:
    shapes = [
        TreeShape(depth=3, fixed=tree_of([[0], [0, 0], [1]])),
        TreeShape(depth=2, width=2, nodes=4),
    ]
    alone = [expand([Head(seed)], [shape])[0] for seed, shape in zip((1, 2), shapes, strict=True)]
    assert expand([Head(1), Head(2)], shapes) == alone
