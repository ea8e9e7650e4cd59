"""The training loop of any head: batches, steps, held-out acceptance, log, going on after a kill.

The batches and the learning rate depend on the seed and the step alone, so a run that was killed
and resumed ends with the weights of one that was not.
"""

from __future__ import annotations

import csv
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.train.config import TrainOptions
from slipstream.train.features import Entry, Example

_STATE = "state.pt"
_MUON_RATE = 10  # times the learning rate
LOG = "log.csv"


class Task(Protocol):
    """What is trained: a module, its loss, and what it reaches on text that it did not see."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def outputs(self) -> Sequence[nn.Module]:
        """Its output layers, a row a token."""
        ...

    def loss(self, examples: Sequence[Example], done: float) -> Tensor:
        """done: share of the training, in [0, 1)."""
        ...

    def held_out(self) -> list[float]:
        """The share of drafts that reach position 1, 2, …; their sum and one is τ."""
        ...


Report = Callable[[int, str], None]
"""Is told the steps done, and how it goes in a few words."""


def steps_of(entries: Sequence[Entry], options: TrainOptions) -> int:
    return sum(len(list(_epoch(entries, options, epoch))) for epoch in range(options.epochs))


def fit(
    task: Task,
    entries: Sequence[Entry],
    folder: Path,
    options: TrainOptions,
    report: Report,
    *,
    device: torch.device,
) -> None:
    """Train to the end, from the saved state in ``folder`` if there is one.

    Raises SlipstreamError where the loss is no number, before that spoils the state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    batches = [b for epoch in range(options.epochs) for b in _epoch(entries, options, epoch)]
    parameters = [p for p in task.module.parameters() if p.requires_grad]
    optimizers = _optimizers(task, parameters, options.learning_rate)
    first, seconds = _resume(folder, task.module, optimizers)
    log = _Log(folder / LOG, first)
    saved = started = time.monotonic()
    losses: list[float] = []
    tau = ""
    for step in range(first, len(batches)):
        rate = _schedule(step, len(batches), options.warmup)
        loss = task.loss([entry.load() for entry in batches[step]], step / len(batches))
        if not bool(loss.isfinite()):
            raise SlipstreamError(
                f"the loss of step {step + 1} is no number: try a lower --learning-rate, in "
                f"another --out; {folder / _STATE} is of an earlier step"
            )
        task.module.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, options.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate
            optimizer.step()
        losses.append(loss.item())
        done, last = step + 1, step + 1 == len(batches)
        if last or done % options.evaluate_every == 0:
            acceptance = task.held_out()
            spent = seconds + time.monotonic() - started
            log.add(done, spent, sum(losses) / len(losses), acceptance)
            tau = f", τ of a chain {1 + sum(acceptance):.2f}"
            losses.clear()
        report(done, f"loss {loss.item():.2f}{tau}")
        if last or time.monotonic() - saved > 60 * options.save_minutes:
            _save(folder, task.module, optimizers, done, seconds + time.monotonic() - started)
            saved = time.monotonic()


def _optimizers(
    task: Task, parameters: Sequence[nn.Parameter], learning_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices between hidden states, AdamW for the rest."""
    rows = {id(p) for layer in task.outputs for p in layer.parameters()}
    inner = [p for p in parameters if p.ndim == 2 and id(p) not in rows]
    others = [p for p in parameters if p.ndim != 2 or id(p) in rows]
    muon = torch.optim.Muon(
        inner,
        lr=_MUON_RATE * learning_rate,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return [muon, adam]


def _schedule(step: int, steps: int, warmup: float) -> float:
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _epoch(entries: Sequence[Entry], options: TrainOptions, epoch: int) -> Iterator[list[Entry]]:
    """Batches of about as many tokens each, padding included, of conversations about as long."""
    order = random.Random(f"{options.seed} {epoch}")
    shuffled = sorted(entries, key=lambda e: (len(e) // 32, order.random()))
    batches: list[list[Entry]] = []
    for entry in shuffled:
        room = options.tokens_per_step // len(entry)
        if not batches or len(batches[-1]) >= max(1, room):
            batches.append([])
        batches[-1].append(entry)
    order.shuffle(batches)
    yield from batches


def _save(
    folder: Path, module: nn.Module, optimizers: Sequence[Any], step: int, seconds: float
) -> None:
    temporary = folder / (_STATE + ".part")
    state = {"module": module.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save(state | {"step": step, "seconds": seconds}, temporary)
    os.replace(temporary, folder / _STATE)


def _resume(folder: Path, module: nn.Module, optimizers: Sequence[Any]) -> tuple[int, float]:
    """(steps done, seconds spent) of the saved state, loaded; (0, 0) if there is none."""
    path = folder / _STATE
    if not path.is_file():
        return 0, 0.0
    state = torch.load(path, map_location="cpu", weights_only=True)
    module.load_state_dict(state["module"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["seconds"]


class _Log:
    """A CSV file, a row an evaluation; rows after the step that is resumed at are dropped."""

    def __init__(self, path: Path, first: int) -> None:
        self._path = path
        rows = read_log(path) if path.is_file() else []
        self._rows = [row for row in rows if row["step"] <= first]

    def add(self, step: int, seconds: float, loss: float, acceptance: Sequence[float]) -> None:
        row: dict[str, float] = {"step": step, "seconds": round(seconds, 1), "loss": round(loss, 4)}
        row |= {f"position_{i}": round(share, 4) for i, share in enumerate(acceptance, 1)}
        row["tau"] = round(1 + sum(acceptance), 4)
        self._rows.append(row)
        temporary = self._path.with_suffix(".part")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(self._rows)
        os.replace(temporary, self._path)


def read_log(path: Path) -> list[dict[str, float]]:
    """step, seconds, loss (mean since the row before), position_i (share of drafts that get there),
    tau (of a chain)."""
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
