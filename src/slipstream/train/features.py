"""What the target thinks of the training text, computed once and kept on disk.

A shard holds some conversations; one that is there is complete, so a run that was killed goes on
with the first that is missing.

Shapes: n tokens of a shard · T tokens of a conversation · F layers tapped · h hidden.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.train.text import Conversation
from slipstream.types import chain_rows

_SHARD = 32  # conversations
_CHUNK = 256  # rows of a step; each asks for logits as wide as the vocabulary
_LARGEST = 65504.0  # of float16
_PARTS = ("tokens", "features", "last", "best")


@dataclass(frozen=True, kw_only=True)
class Example:
    """A conversation and its features.

    tokens: [T]. start: of the answer in them. features: [T, F·h] and last: [T, h], float16, of the
    tapped layers and of the last one before the final norm. best: [T], the target's most probable
    token after each, -1 before the answer is due.
    """

    tokens: Tensor
    start: int
    features: Tensor
    last: Tensor
    best: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def bytes_needed(conversations: Sequence[Conversation], hidden: int, taps: int) -> int:
    """Of disk, for the features of all of them."""
    return sum(map(len, conversations)) * (2 * hidden * (taps + 1) + 8)


def compute(
    llm: Any, conversations: Sequence[Conversation], taps: Sequence[int], folder: Path
) -> Iterator[int]:
    """Write the shards that are missing; yields how many conversations are ready, again and again.

    Raises SlipstreamError where the disk has no room, before anything is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.part"):  # of a run that was killed
        old.unlink()
    groups = list(_groups(conversations))
    missing = [(path, group) for path, group in _named(folder, groups, taps) if not path.is_file()]
    todo = [c for _, group in missing for c in group]
    needed = bytes_needed(todo, llm.model.runtime.hidden_size, len(taps))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SlipstreamError(
            f"the features need {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free: "
            "choose another --out, or fewer --tokens there"
        )
    ready = len(conversations) - len(todo)
    yield ready
    for path, group in missing:
        _write(path, [_example(llm, c, taps) for c in group])
        ready += len(group)
        yield ready


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where an example lies: tokens ``begin`` to ``end`` of a shard."""

    path: Path
    begin: int
    end: int
    start: int

    def __len__(self) -> int:
        return self.end - self.begin

    def load(self) -> Example:
        """Read this conversation's part of the shard alone."""
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            parts = {key: file.get_slice(key)[self.begin : self.end] for key in _PARTS}
        return Example(start=self.start, **parts)


def entries(
    conversations: Sequence[Conversation], taps: Sequence[int], folder: Path
) -> Iterator[Entry]:
    """Of all conversations, in order; ``compute`` came before."""
    for path, group in _named(folder, list(_groups(conversations)), taps):
        begin = 0
        for c in group:
            end = begin + len(c)
            yield Entry(path=path, begin=begin, end=end, start=len(c.prompt))
            begin = end


def _groups(conversations: Sequence[Conversation]) -> Iterator[Sequence[Conversation]]:
    for first in range(0, len(conversations), _SHARD):
        yield conversations[first : first + _SHARD]


def _named(
    folder: Path, groups: Sequence[Sequence[Conversation]], taps: Sequence[int]
) -> Iterator[tuple[Path, Sequence[Conversation]]]:
    for number, group in enumerate(groups):
        yield _path(folder, number, group, taps), group


def _path(folder: Path, number: int, group: Sequence[Conversation], taps: Sequence[int]) -> Path:
    """A shard's name tells its content: other text or other layers are other files."""
    content = json.dumps([list(taps), [[*c.prompt, *c.answer] for c in group]])
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return folder / f"{number:05d}-{digest}.safetensors"


@torch.inference_mode()
def _example(llm: Any, conversation: Conversation, taps: Sequence[int]) -> Example:
    runtime = llm.model.runtime
    tokens = [*conversation.prompt, *conversation.answer]
    first = len(conversation.prompt) - 1  # the row after which the answer is due
    cache = runtime.new_cache(1, len(tokens))
    slot = cache.allocate()
    features, best = [], [torch.full((first,), -1)]
    for begin in range(0, len(tokens), _CHUNK):
        part = tokens[begin : begin + _CHUNK]
        wanted = range(max(first - begin, 0), len(part))
        rows = chain_rows(slot, part, logit_rows=wanted)
        output = runtime.step([rows], cache, [*taps, runtime.layers])
        cache.commit(output, [slot], [range(len(part))])
        features.append(narrow(output.features))
        best.append(output.logits.argmax(-1).cpu())
    both = torch.cat(features)
    return Example(
        tokens=torch.tensor(tokens, dtype=torch.int32),
        start=len(conversation.prompt),
        features=both[:, :-1].flatten(1),
        last=both[:, -1],
        best=torch.cat(best).int(),
    )


def narrow(features: Tensor) -> Tensor:
    """As they are kept: a copy in float16 on the CPU."""
    return features.clamp(-_LARGEST, _LARGEST).half().cpu()


def keep(
    conversations: Sequence[Conversation],
    taps: Sequence[int],
    folder: Path,
    example: Callable[[Conversation], Example | None],
) -> None:
    """Write the whole shards after the last one that is there, if their examples are."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in reversed(range(len(conversations) // _SHARD)):
        group = conversations[number * _SHARD : (number + 1) * _SHARD]
        path = _path(folder, number, group, taps)
        if path.is_file():
            return
        found = [example(c) for c in group]
        if all(found):
            _write(path, [e for e in found if e])


def _write(path: Path, examples: Sequence[Example]) -> None:
    from safetensors.torch import save_file

    parts = {key: torch.cat([getattr(e, key) for e in examples]).contiguous() for key in _PARTS}
    temporary = path.with_suffix(".part")
    try:
        save_file(parts, temporary)
        temporary.rename(path)
    except Exception as error:  # safetensors has its own kinds for a full disk
        temporary.unlink(missing_ok=True)
        raise SlipstreamError(
            f"{path} can't be written ({error}): make room, then run the same command again; what "
            "is there is used"
        ) from error
