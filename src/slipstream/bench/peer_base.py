"""What every peer is to the harness, and the child process that each of them runs in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from slipstream.errors import SlipstreamError

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class PeerAnswer:
    """A peer's text.

    token_ids: None where the peer gives text alone. seconds: of prompt and text together, taken as
    near to the peer as it can be. ttft_seconds: until the first token, None if it isn't known.
    """

    token_ids: list[int] | None
    text: str
    output_tokens: int
    seconds: float
    ttft_seconds: float | None


class Peer(ABC):
    """An engine with its model loaded. method: "plain", or the name of its speculation."""

    method: str
    version: str

    @abstractmethod
    def generate(self, token_ids: list[int], max_tokens: int) -> PeerAnswer:
        """Continue a prompt greedily; an end-of-sequence token doesn't end the text."""

    @abstractmethod
    def close(self) -> None:
        """End the process. More than once does no harm."""

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Child:
    """A process and all that it starts, with stderr kept for the day that it fails."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pipes: bool = False,
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        ends = subprocess.PIPE if pipes else subprocess.DEVNULL
        try:
            self.process = subprocess.Popen(
                command,
                stdin=ends,
                stdout=ends,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
                text=True,
                encoding="utf-8",
                start_new_session=True,  # a group of its own, so that close ends its children too
            )
        except OSError as error:
            self._log.close()
            raise SlipstreamError(f"peer {name}: {command[0]} can't be started: {error}") from error

    @property
    def stdin(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def failure(self, what: str) -> SlipstreamError:
        """The error that says what happened, with the last lines of stderr."""
        log = self._log.fileno()  # read in place: a seek would move the child's own writing
        kept = os.pread(log, 4000, max(0, os.fstat(log).st_size - 4000))
        lines = kept.decode("utf-8", "replace").split("\n")
        last = "\n".join([line.strip()[-300:] for line in lines if line.strip()][-4:])
        return SlipstreamError(
            f"peer {self.name} {what}" + (f"; its last lines:\n{last}" if last else "")
        )

    def close(self) -> None:
        """Let it end by itself when its stdin does, then end it and what it started."""
        if self._log.closed:
            return
        if self.process.stdin is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.process.stdin.close()
                self.process.wait(CLOSE_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):  # the group is gone already
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_SECONDS)
                break
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
