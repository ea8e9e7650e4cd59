"""Runs one peer under the peer's own interpreter: JSON lines in on stdin, JSON lines out on stdout.

    PYTHON peer_worker.py NAME        with NAME as in peer_NAME.py beside this file

First line in: the settings, the keyword arguments of that file's ``Model``. First line out:
version and method. Every further line in is the keyword arguments of ``Model.generate``, every
line out its result. What goes wrong comes out as ``{"error": sentence}``.

Nothing of slipstream is imported here: the interpreter is another one, with its own packages.
"""

from __future__ import annotations

import sys

# Python puts this file's folder first on the path, and the names in it would hide the peer's own.
HERE = sys.path.pop(0)

import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402


def load(name: str, settings: dict[str, Any]) -> Any:
    """The ``Model`` of peer_NAME.py, which is what takes long."""
    spec = importlib.util.spec_from_file_location(f"peer_{name}", f"{HERE}/peer_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model(**settings)


def sentence(error: Exception) -> dict[str, str]:
    """The error in a line for the other side; the whole of it goes to the log."""
    traceback.print_exc()
    lines = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {lines[0][:500]}"}


def main() -> None:
    # Libraries print as they like; what they print, and what their own children inherit, is the
    # log (stderr), never the two ends of the protocol.
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        model = load(sys.argv[1], json.loads(lines.readline()))
    except Exception as error:
        answer(sentence(error))
        return
    answer({"version": model.version, "method": model.method})
    for line in lines:
        try:
            answer(model.generate(**json.loads(line)))
        except Exception as error:
            answer(sentence(error))


if __name__ == "__main__":
    main()
