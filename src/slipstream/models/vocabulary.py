"""Do two models speak of the same tokens? Asked of the tokenizers, not of the matrix sizes."""

from __future__ import annotations

from typing import Any

from slipstream.errors import SlipstreamError


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the highest token id; matrices may be padded beyond it."""
    return max(tokenizer.get_vocab().values()) + 1


def check_same_vocabulary(target: Any, draft: Any, draft_name: str) -> None:
    """Raise SlipstreamError naming the first token id at which two tokenizers differ."""
    ours = {id_: token for token, id_ in target.get_vocab().items()}
    theirs = {id_: token for token, id_ in draft.get_vocab().items()}
    if ours == theirs:
        return
    for id_ in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(id_), theirs.get(id_)
        if a != b:
            raise SlipstreamError(
                f"draft model {draft_name} has another tokenizer: token {id_} is {a!r} for the "
                f"target and {b!r} for the draft model; choose one of the target's family"
            )
