"""A peer without an engine behind it."""

from __future__ import annotations

from types import TracebackType

from slipstream import SlipstreamError
from slipstream.bench.peers import Peer, PeerAnswer


class FakePeer(Peer):
    """Takes ``seconds`` a token and answers 0, 1, 2 …; fails on prompts that begin with a token of
    ``fails``. log: what was asked of it, with its method."""

    version = "7.1"

    def __init__(
        self,
        method: str = "plain",
        seconds: float = 1.0,
        fails: tuple[int, ...] = (),
        log: list[object] | None = None,
    ) -> None:
        self.method = method
        self.closed = False
        self._seconds = seconds
        self._fails = fails
        self._log = [] if log is None else log

    def generate(self, token_ids: list[int], max_tokens: int) -> PeerAnswer:
        self._log.append((f"peer {self.method}", token_ids, max_tokens))
        if token_ids[0] in self._fails:
            raise SlipstreamError("the peer stumbled")
        return PeerAnswer(
            token_ids=list(range(max_tokens)),
            text="",
            output_tokens=max_tokens,
            seconds=self._seconds * max_tokens,
            ttft_seconds=self._seconds,
        )

    def close(self) -> None:
        self.closed = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
