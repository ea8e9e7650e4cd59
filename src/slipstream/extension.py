"""The C++ extension (``native/``), where it was built."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MISSING: str | None = None
"""Why it isn't there."""

native: Any = None
try:
    native = import_module("slipstream._native")
except ImportError as error:  # installed without a C++ compiler
    MISSING = f"the native step isn't built ({error}): install slipstream with a C++ compiler"
