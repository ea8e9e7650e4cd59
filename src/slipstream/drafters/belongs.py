"""Whether a head was made for its target: one that wasn't guesses, and always wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError
from slipstream.models.sources import DEFAULT_HUB_ID, DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.drafters import Target


def check_belongs(
    name: str, target: Target, hidden: int, vocab: int, verifier: str, taps: Sequence[int] = ()
) -> None:
    """Raise SlipstreamError naming what differs.

    hidden, vocab: of the head's target. verifier: its name or path, "" if not told; another name is
    said, not refused. taps: layers that the head looks at.
    """
    runtime = target.runtime
    for what, theirs, ours in (
        ("hidden size", hidden, runtime.hidden_size),
        ("vocabulary", vocab, runtime.vocab_size),
    ):
        if theirs != ours:
            raise SlipstreamError(
                f"{name} is a head for another target: its {what} is {theirs}, {target.name} has "
                f"{ours}"
            )
    if max(taps, default=0) > runtime.layers:
        raise SlipstreamError(
            f"{name} is a head for another target: it looks at layer {max(taps)}, {target.name} "
            f"has {runtime.layers}"
        )
    if verifier and _last(verifier) != _last(target.name):
        target.notify(f"{name} was made for {verifier}, the target is {target.name}")


def _last(path: str) -> str:
    path = DEFAULT_HUB_ID if path == DEFAULT_MODEL else path
    return path.rstrip("/").rsplit("/", 1)[-1]
