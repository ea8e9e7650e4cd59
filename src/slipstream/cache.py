"""KV of committed tokens, and of nothing else.

A step computes the KV of its own tokens and gives it back; ``commit`` appends the rows that
verification kept. There is no rollback: what is not committed was never here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.types import StepOutput

_FIRST_CAPACITY = 256  # tokens; doubled when needed, never above the model's context


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """KV of one token in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class TensorKV:
    """KV of a step's tokens: a layer each, [B, kv_heads, Q, D], padded to the longest request."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class Cache(ABC):
    """Slots of committed KV. slots: requests held at once. max_length: tokens a slot may hold."""

    def __init__(self, *, slots: int, max_length: int) -> None:
        self.max_length = max_length
        self.lengths = [0] * slots
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Of the storage held now."""

    def allocate(self) -> int:
        """The lowest free slot, empty; low slots side by side can be read without a copy."""
        assert self._free, "no free slot: the scheduler admits no more requests than slots"
        slot = min(self._free)
        self._free.remove(slot)
        self.lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        assert slot not in self._free
        self._clear(slot)
        self._free.append(slot)
        self.lengths[slot] = 0

    def commit(
        self, output: StepOutput, slots: Sequence[int], kept: Sequence[Sequence[int]]
    ) -> None:
        """Append the kept rows of a step, each request's in order.

        slots: the step's B slots. kept: for each the row indices, possibly none.
        """
        lengths = [self.lengths[slot] + len(rows) for slot, rows in zip(slots, kept, strict=True)]
        assert max(lengths) <= self.max_length
        self._append(output.new_kv, slots, kept)
        for slot, length in zip(slots, lengths, strict=True):
            self.lengths[slot] = length

    def check(self) -> None:
        """Assert what must always hold (tests and health checks)."""
        assert len(set(self._free)) == len(self._free)
        for slot, length in enumerate(self.lengths):
            assert 0 <= length <= self.max_length
            assert length == 0 or slot not in self._free

    @abstractmethod
    def _clear(self, slot: int) -> None:
        """The slot's tokens are not needed any more; ``lengths`` still tells how many."""

    @abstractmethod
    def _append(self, new_kv: Any, slots: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Store the kept rows after ``lengths``; of an error nothing may be left to see."""


class TorchCache(Cache):
    """A layer each, keys and values [slots, kv_heads, capacity, D].

    layers: the shapes, a layer each. All storage grows together, by doubling.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(slots=slots, max_length=max_length)
        self._capacity = min(_FIRST_CAPACITY, max_length)

        def room(layer: LayerShape, dim: int) -> Tensor:
            shape = (slots, layer.kv_heads, self._capacity, dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        self._keys = [room(layer, layer.key_dim) for layer in layers]
        self._values = [room(layer, layer.value_dim) for layer in layers]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    def check(self) -> None:
        super().check()
        assert max(self.lengths) <= self._capacity

    def view(self, slots: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Committed keys and values of the slots: a layer each, [B, kv_heads, T, D].

        T is the longest length among them; rows past a slot's own length are to be masked.
        """
        longest = max(self.lengths[slot] for slot in slots)
        first = slots[0]
        if list(slots) == list(range(first, first + len(slots))):
            window: slice | Tensor = slice(first, first + len(slots))
        else:
            window = torch.tensor(list(slots), device=self._keys[0].device)
        keys = [layer[window, :, :longest] for layer in self._keys]
        return keys, [layer[window, :, :longest] for layer in self._values]

    def _clear(self, slot: int) -> None:
        """A masked row counts nothing times its value, and that is not nothing if an overflow left
        a NaN there."""
        for layer in (*self._keys, *self._values):
            layer[slot, :, : self.lengths[slot]] = 0

    def _append(
        self, new_kv: TensorKV, slots: Sequence[int], kept: Sequence[Sequence[int]]
    ) -> None:
        self._grow(max(self.lengths[s] + len(rows) for s, rows in zip(slots, kept, strict=True)))
        if len(slots) == 1 and list(kept[0]) == list(range(len(kept[0]))):
            self._extend(new_kv, slots[0], len(kept[0]))
        else:
            self._scatter(new_kv, slots, kept)

    def _extend(self, new_kv: TensorKV, slot: int, count: int) -> None:
        start = self.lengths[slot]
        for stores, news in ((self._keys, new_kv.keys), (self._values, new_kv.values)):
            for store, new in zip(stores, news, strict=True):
                store[slot, :, start : start + count] = new[0, :, :count]

    def _scatter(
        self, new_kv: TensorKV, slots: Sequence[int], kept: Sequence[Sequence[int]]
    ) -> None:
        picks = [
            (slot, self.lengths[slot] + i, b, row)
            for b, (slot, rows) in enumerate(zip(slots, kept, strict=True))
            for i, row in enumerate(rows)
        ]
        if not picks:
            return
        slot, place, b, row = torch.tensor(picks, device=self._keys[0].device).T
        for stores, news in ((self._keys, new_kv.keys), (self._values, new_kv.values)):
            for store, new in zip(stores, news, strict=True):
                store[slot, :, place] = new[b, :, row]

    def _grow(self, length: int) -> None:
        if length <= self._capacity:
            return
        grown = min(max(length, 2 * self._capacity), self.max_length)

        def larger(old: Tensor) -> Tensor:
            new = old.new_zeros((*old.shape[:2], grown, old.shape[3]))
            new[:, :, : self._capacity] = old
            return new

        keys, values = [larger(k) for k in self._keys], [larger(v) for v in self._values]
        self._keys, self._values, self._capacity = keys, values, grown
