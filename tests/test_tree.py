import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import tree
from slipstream.types import ROOT, Draft, chain

PARENTS = st.integers(0, 8).flatmap(
    lambda n: st.tuples(*(st.integers(-1, node - 1) for node in range(n)))
)


def walk(parents: tuple[int, ...], row: int) -> list[int]:
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


@given(PARENTS)
def test_a_row_sees_itself_and_its_ancestors(parents: tuple[int, ...]) -> None:
    mask = tree.ancestors(parents)
    assert mask.shape == (len(parents), len(parents))
    for row in range(len(parents)):
        assert np.flatnonzero(mask[row]).tolist() == sorted(walk(parents, row))


@given(PARENTS)
def test_depth_is_the_number_of_ancestors(parents: tuple[int, ...]) -> None:
    want = [len(walk(parents, row)) - 1 for row in range(len(parents))]
    assert tree.depths(parents).tolist() == want


@given(PARENTS)
def test_a_chain_is_recognised(parents: tuple[int, ...]) -> None:
    assert tree.is_chain(parents) == all(p == i - 1 for i, p in enumerate(parents))


@given(PARENTS)
def test_draft_paths(parents: tuple[int, ...]) -> None:
    draft = Draft(tokens=[10 + i for i in range(len(parents))], parents=parents)
    for node in range(len(parents)):
        assert draft.suffix(node) == tuple(10 + i for i in reversed(walk(parents, node)))
        assert node in draft.children(parents[node])
    children = [child for node in range(ROOT, len(parents)) for child in draft.children(node)]
    assert sorted(children) == list(range(len(parents)))
    assert draft.is_chain == tree.is_chain(parents)


def test_chain() -> None:
    draft = chain([4, 5, 6])
    assert draft.is_chain
    assert draft.suffix(1) == (4, 5)
    assert draft.suffix(ROOT) == ()
    assert len(chain([])) == 0


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1]])
def test_a_draft_keeps_its_promises(parents: list[int]) -> None:
    """A parent comes first, none is below the root, one parent a token."""
    with pytest.raises(AssertionError):
        Draft(tokens=[1] * (2 if parents == [-1] else len(parents)), parents=parents)
