"""Draft trees as arrays: who may see whom, and how deep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """Tree mask [Q, Q]: row q sees row k if k is q itself or one of its ancestors.

    parents: Q row indices, each before its child; -1 for a row that follows the committed tokens.
    """
    if is_chain(parents):
        return np.tri(len(parents), dtype=bool)
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def depths(parents: Sequence[int]) -> np.ndarray:
    """[Q] int64: 0 for a row that follows the committed tokens, else one more than its parent."""
    if is_chain(parents):
        return np.arange(len(parents))
    depth = np.zeros(len(parents), dtype=np.int64)
    for row, parent in enumerate(parents):
        depth[row] = depth[parent] + 1 if parent >= 0 else 0
    return depth


def is_chain(parents: Sequence[int]) -> bool:
    """True if each row follows the one before."""
    return list(parents) == list(range(-1, len(parents) - 1))
