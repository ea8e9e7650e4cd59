"""What is kept beside a trained head: a card, and the curves of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from slipstream.train.target import TargetParts
from slipstream.train.text import Conversation


def write_card(
    target: TargetParts,
    what: str,
    conversations: Sequence[Conversation],
    tau: Mapping[str, float],
    command: str,
) -> str:
    """README.md of a head. what: it is, in a sentence."""
    tokens, answers = sum(map(len, conversations)), sum(len(c.answer) for c in conversations)
    rows = "\n".join(f"| {name} | {value:.2f} |" for name, value in tau.items())
    return f"""# A draft head for {target.name}

{what}
Trained on {len(conversations)} conversations: {tokens:,} tokens, {answers:,} of them answers.

| on held-out prompts of the training text | tokens per step (τ) |
| --- | --- |
{rows}

A chain is of one guess a position; the tree holds paths that the head gives 5 % and more.
Acceptance by position while it was trained: log.csv, curves.png.

    {command}
"""


def draw(path: Path, log: Sequence[Mapping[str, float]]) -> None:
    """Loss and held-out acceptance over the steps, as a PNG; nothing without matplotlib."""
    if find_spec("matplotlib") is None or not log:
        return
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = [row["step"] for row in log]
    left.plot(steps, [row["loss"] for row in log])
    left.set(xlabel="step", ylabel="loss")
    for name in (key for key in log[0] if key.startswith("position_")):
        right.plot(steps, [row[name] for row in log], label=name.replace("_", " "))
    right.set(xlabel="step", ylabel="share of held-out drafts that get there", ylim=(0, 1))
    right.legend()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
