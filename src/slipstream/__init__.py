"""Slipstream: speculative decoding that proves it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import SamplingParams
    from slipstream.errors import SlipstreamError
    from slipstream.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "SlipstreamError"]
_HOMES = {"LLM": "llm", "SamplingParams": "config", "SlipstreamError": "errors"}


def __getattr__(name: str) -> Any:
    """Import on first use: ``slipstream --help`` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"slipstream.{_HOMES[name]}"), name)
