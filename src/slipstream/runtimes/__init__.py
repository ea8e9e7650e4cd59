"""A runtime computes the functional step. This is the whole of what the engine asks of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch as _torch  # not as torch: that is the name of the module beside this one

from slipstream.cache import Cache
from slipstream.types import StepOutput, StepRows


class Runtime(Protocol):
    """``step`` is a pure function: it reads committed KV and changes nothing.

    vocab_size: width of the logits. hidden_size: of a feature. layers: how many.
    max_length: tokens of context the model was made for.
    dtype: of its arithmetic. exact: a row's bits depend on nothing but its own path.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    max_length: int
    dtype: _torch.dtype
    exact: bool

    def new_cache(self, slots: int, max_length: int) -> Cache:
        """An empty cache of this model's layers."""
        ...

    def step(self, batch: Sequence[StepRows], cache: Cache, taps: Sequence[int] = ()) -> StepOutput:
        """One forward pass over the rows of every request, each under its own tree mask.

        taps: layers whose input is asked for as ``features``; the number of layers stands for what
        the last one gives, before the last norm.
        """
        ...
