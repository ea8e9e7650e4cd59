"""Where, and with what, a measurement was made."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from slipstream import __version__
from slipstream.runtimes import Runtime


def machine(device: torch.device) -> dict[str, Any]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found: dict[str, Any] = {
        "cpu": _entry("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gb": round(memory / 1e9, 2),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def runtime_facts(runtime: Runtime) -> dict[str, Any]:
    """The runtime's name, and its kernel set and threads where it tells them."""
    told = {name: getattr(runtime, name, None) for name in ("kernels", "threads")}
    facts = {name: value for name, value in told.items() if value is not None}
    return {"runtime": type(runtime).__name__} | facts


def provenance() -> dict[str, Any]:
    import transformers

    return {
        "commit": commit(),
        "versions": {
            "slipstream": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "command": shlex.join(["slipstream", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Of the checkout that this file belongs to, with "-dirty" if something in it is changed; None
    for an installed package, even where that lies within somebody else's checkout."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def reset_peak_memory() -> None:
    """So that each precision has a peak of its own. Linux can; elsewhere it is the peak so far."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_gb() -> float:
    """The largest resident set, the loading of the model included."""
    kilobytes = _entry("/proc/self/status", "VmHWM")
    if kilobytes is not None:
        size = int(kilobytes.split()[0]) * 1024
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return round(size / 1e9, 3)


def _entry(path: str, name: str) -> str | None:
    """The first ``name: value`` of a file of /proc."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None
