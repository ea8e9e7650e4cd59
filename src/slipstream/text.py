"""From token ids to text, a token at a time, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.types import Origin

_CONTEXT = 4  # prompt tokens decoded along with the first output: some tokenizers eat a first space
_BROKEN = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


@dataclass(frozen=True)
class Piece:
    """Text that one token completed, and where that token came from."""

    text: str
    origin: Origin


class TextStream:
    """The growing text of one request.

    ``push`` takes the tokens in order; ``pieces`` is the text that is certain: what may turn out
    to be the beginning of a stop string, or half a character, waits.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        self._start = 0  # decoding starts here …
        self._done = len(self._tokens)  # … and what lies before this is text already
        self._stop = stop
        self._waiting: list[Piece] = []
        self.text = ""
        self.length = 0  # tokens taken
        self.stopped_by: str | None = None
        self._origin: Origin = "plain"  # of the newest token

    def push(self, token: int, origin: Origin, *, may_stop: bool = True) -> list[Piece]:
        """The pieces that became certain. may_stop: False while stop strings don't count yet."""
        self._tokens.append(token)
        self.length += 1
        self._origin = origin
        new = self._decode_new()
        if new:
            self._waiting.append(Piece(new, origin))
        pending = "".join(piece.text for piece in self._waiting)
        found = [(at, s) for s in self._stop if (at := pending.find(s)) >= 0] if may_stop else []
        if found:
            at, self.stopped_by = min(found)
            pieces = self._take(at)
            self._waiting = []
            return pieces
        return self._take(len(pending) - _overlap(pending, self._stop))

    def finish(self) -> list[Piece]:
        """The rest, once no token is to come."""
        if self.stopped_by is not None:
            return []
        rest = self._decode_new(final=True)
        if rest:
            self._waiting.append(Piece(rest, self._origin))
        return self._take(sum(len(piece.text) for piece in self._waiting))

    def _decode_new(self, final: bool = False) -> str:
        before = self._decode(self._tokens[self._start : self._done])
        now = self._decode(self._tokens[self._start :])
        if len(now) <= len(before) or (now.endswith(_BROKEN) and not final):
            return ""
        self._start, self._done = self._done, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _take(self, count: int) -> list[Piece]:
        """Move ``count`` characters from the waiting pieces to the text."""
        taken: list[Piece] = []
        while count > 0:
            piece = self._waiting.pop(0)
            head, tail = piece.text[:count], piece.text[count:]
            taken.append(Piece(head, piece.origin))
            if tail:
                self._waiting.insert(0, Piece(tail, piece.origin))
            count -= len(head)
        self.text += "".join(piece.text for piece in taken)
        return taken


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = 0
    for string in stop:
        for size in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:size]):
                longest = size
                break
    return longest
