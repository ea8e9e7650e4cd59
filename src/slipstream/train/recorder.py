"""Features of text as it is written: what the step that wrote it looked at anyway.

Shapes: n rows · F layers tapped · h hidden · V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.engine import Engine
from slipstream.request import Request
from slipstream.train.features import Example, narrow
from slipstream.train.target import TargetParts
from slipstream.train.text import Conversation
from slipstream.types import Draft

_CANDIDATES = 8


class Recorder:
    """A drafter that drafts nothing, and keeps what it is shown.

    taps: layers whose input is recorded. layers: of the target.
    """

    def __init__(self, taps: Sequence[int], layers: int) -> None:
        self.taps = [*taps, layers]
        self._open: dict[int, list[Tensor]] = {}
        self._done: dict[tuple[int, ...], Tensor] = {}

    def observe(self, request: Request, features: Tensor) -> None:
        """features: [n, F + 1, h] of the rows that follow those seen before."""
        self._open.setdefault(request.request_id, []).append(narrow(features))

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [Draft()] * len(requests)

    def release(self, request: Request) -> None:
        parts = self._open.pop(request.request_id, None)
        if parts:
            rows = torch.cat(parts)
            self._done[tuple(request.tokens[: len(rows)])] = rows

    def take(self, conversation: Conversation) -> Tensor | None:
        """[n, F + 1, h], float16, of all its tokens; None if they weren't seen. Only once."""
        return self._done.pop((*conversation.prompt, *conversation.answer), None)


def recording(llm: Any, recorder: Recorder) -> Any:
    """The same LLM, plain, with its features recorded."""
    other = copy.copy(llm)
    other.engine = Engine(runtime=llm.model.runtime, config=llm.engine.config, drafter=recorder)
    return other


class Reader:
    """Makes examples of what was recorded; the target's most probable tokens are found anew."""

    def __init__(self, target: TargetParts) -> None:
        self._target = target
        self._wide = target.lm_head.bfloat16()

    def example(self, conversation: Conversation, rows: Tensor) -> Example:
        first = len(conversation.prompt) - 1  # the row after which the answer is due
        best = torch.full((len(rows),), -1)
        best[first:] = self._best(self._target.normed(rows[first:, -1]))
        return Example(
            tokens=torch.tensor([*conversation.prompt, *conversation.answer], dtype=torch.int32),
            start=len(conversation.prompt),
            features=rows[:, :-1].flatten(1),
            last=rows[:, -1],
            best=best.int(),
        )

    def _best(self, normed: Tensor) -> Tensor:
        """[n, h] → [n]: argmax over V; bfloat16 finds the candidates, float32 chooses."""
        some = (normed.bfloat16() @ self._wide.T).topk(_CANDIDATES).indices
        logits = (self._target.lm_head[some] @ normed[..., None])[..., 0]
        return some.gather(1, logits.argmax(-1, keepdim=True))[:, 0]
