"""What a training run is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config import require, require_integer, unknown
from slipstream.errors import SlipstreamError
from slipstream.models.head_sources import find_head
from slipstream.train.questions import read_questions

SELF = "self"
LOSSES = {"ce": 0.0, "ce+l1": 0.9}  # the share of the second term
DRAFT_VOCAB = 4096  # where nothing else is asked for
METHODS = ("eagle3", "medusa")
_OF_ONE = {"passes": "eagle3", "taps": "eagle3", "heads": "medusa"}
_OF_THE_HEAD = ("draft_vocab", "taps", "heads")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Of the loop. tokens_per_step: of a batch. learning_rate: its peak, after ``warmup`` of all
    steps; a cosine leads down to a tenth. save_minutes: between two saved states. evaluate_every:
    steps between two evaluations."""

    epochs: int = 3
    tokens_per_step: int = 2048
    learning_rate: float = 1e-3
    warmup: float = 0.05
    clip: float = 0.5
    seed: int = 0
    save_minutes: float = 1.0
    evaluate_every: int = 200

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("tokens_per_step", 64), ("seed", 0)):
            require_integer(name, getattr(self, name), least)
        require(0 < self.learning_rate < 1, "learning_rate", self.learning_rate, "in (0, 1)")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """method: "eagle3" or "medusa". out: folder of the head and of everything that a resumed run
    needs. init: a head to train on instead of a new one, with its sizes: a folder, a hub id or a
    built-in one. data: "self" or a JSONL file. tokens: of the training text where it is the
    target's own. keep_answers: those of the file. draft_vocab: tokens (None: ``DRAFT_VOCAB``).
    Of EAGLE-3 alone: passes of the training-time test (None: 3); taps, layers to look at (None:
    those of ``train.eagle3``). Of Medusa alone: heads, one a drafted position (None: 4)."""

    method: str
    out: Path
    init: str = ""
    data: str = SELF
    tokens: int = 1_000_000
    max_answer: int = 192
    keep_answers: bool = False
    draft_vocab: int | None = None
    passes: int | None = None
    taps: Sequence[int] | None = None
    heads: int | None = None
    loss: str = "ce"
    options: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        for name, method in _OF_ONE.items():
            if getattr(self, name) is not None and method != self.method:
                raise SlipstreamError(f"{name} is an option of {method}, not of {self.method}")
        for name, least in (("draft_vocab", 2), ("passes", 1), ("heads", 1)):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), least)
        for name, least in (("tokens", 1), ("max_answer", 8)):
            require_integer(name, getattr(self, name), least)
        if self.init:
            find_head(self.init)
            given = [name for name in _OF_THE_HEAD if getattr(self, name) is not None]
            if given:
                raise SlipstreamError(f"--init {self.init} has its own {given[0]}: leave it out")
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, tuple(LOSSES))
        if self.keep_answers and self.data == SELF:
            raise SlipstreamError("--keep-answers is of a file: name it with --data")
        if self.data != SELF:
            read_questions(Path(self.data))

    def as_dict(self) -> dict[str, Any]:
        """What decides the head, for JSON; a file by what is in it."""
        words = asdict(self) | asdict(self.options)
        if self.data != SELF:
            words["data"] = hashlib.sha256(Path(self.data).read_bytes()).hexdigest()
        return {key: value for key, value in words.items() if key not in ("out", "options")}
