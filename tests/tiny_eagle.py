"""A head trained for the tiny target, once for the whole session."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tiny_llm

from slipstream.train.config import TrainConfig, TrainOptions
from slipstream.train.run import train

_root = tempfile.TemporaryDirectory(prefix="tiny_eagle_")
WORDS = ["the fox", "a bear, in the den", "on and on", "the thin one", "hide it", "an ode on ink"]


def questions(path: Path, count: int = 40) -> Path:
    lines = [{"prompt": f"{WORDS[i % len(WORDS)]} {WORDS[i // 7]}"} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(out: Path, **changes: Any) -> TrainConfig:
    options = {"epochs": 4, "tokens_per_step": 512, "learning_rate": 2e-3, "evaluate_every": 10}
    given = {name: changes.pop(name) for name in list(changes) if name in options | {"seed": 0}}
    settings: dict[str, Any] = {
        "method": "eagle3",
        "data": str(questions(out.with_suffix(".jsonl"))),
        "max_answer": 64,
        "draft_vocab": 40,
    }
    if changes.get("method", "eagle3") == "eagle3":
        settings |= {"passes": 3, "taps": (0, 1, 2)}
    return TrainConfig(
        out=out,
        **(settings | changes),
        options=TrainOptions(**(options | given)),  # type: ignore[arg-type]
    )


@contextmanager
def no_bar(what: str, total: int) -> Iterator[Any]:
    yield lambda done, word: None


def run(settings: TrainConfig) -> dict[str, Any]:
    return train(tiny_llm.llm(), settings, "the command", no_bar, lambda line: None)


@functools.cache
def trained() -> tuple[Path, dict[str, float]]:
    """The head's folder, and its τ as training measured it."""
    found = run(config(Path(_root.name) / "first"))
    return Path(found["head"]), found["mean_tokens_per_step"]
