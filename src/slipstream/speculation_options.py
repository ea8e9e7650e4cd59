"""The command line's options on speculation, and the ``speculative_config`` that they make."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slipstream.drafters import SpeculativeConfig, parse
from slipstream.errors import SlipstreamError
from slipstream.models.head_sources import HEAD_METHODS, default_config, find_head, head_for
from slipstream.models.sources import find


def speculative_config(args: Namespace) -> SpeculativeConfig | None:
    """The options as one ``speculative_config``; None for plain decoding."""
    words = {
        "method": args.method,
        "model": args.draft_model,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    words = {key: value for key, value in words.items() if value is not None}
    given = {} if args.speculative_config is None else args.speculative_config
    if isinstance(given, list):
        if words:
            raise SlipstreamError(
                f"--speculative-config lists several drafters: put {', '.join(words)} into them"
            )
        config: SpeculativeConfig = given
    else:
        config = _with_method(_joined(given, words), args.model)
    if config == {"method": "none"}:
        return None
    for part in [config] if isinstance(config, Mapping) else config:
        if isinstance(part, Mapping):
            _find_drafter(part, args.model)
    parse(config)
    return config


def method_of(config: SpeculativeConfig | None) -> str:
    """What results are shown under."""
    return parse(config).method if config else "none"


def _joined(given: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    for key, value in words.items():
        if given.get(key, value) != value:
            raise SlipstreamError(
                f"--speculative-config says {key} {given[key]!r}, another option {value!r}: "
                "give one of them"
            )
    return given | words


def _with_method(config: dict[str, Any], model: str) -> SpeculativeConfig:
    """A model alone is a draft model; nothing that tells a method is the default one."""
    if config.get("method") == "none" and len(config) > 1:
        raise SlipstreamError("--method none takes no other speculation option: leave them out")
    if "method" in config:
        return config
    if "model" in config:
        return config | {"method": "draft_model"}
    default = default_config(model)
    if len(default) == 1:
        return default[0] | config
    if config.keys() - {"num_speculative_tokens"}:
        raise SlipstreamError(f"--speculative-config needs a method beside {', '.join(config)}")
    return [part | config for part in default]


def _find_drafter(part: Mapping[str, Any], model: str) -> None:
    """Refuse a draft model or head that isn't there before torch is."""
    method, name = part.get("method"), part.get("model")
    if method == "draft_model" and name is None:
        raise SlipstreamError("--method draft_model needs a model: name it with --draft-model")
    if method == "draft_model" and isinstance(name, str):
        find(name)
    if method in HEAD_METHODS:
        find_head(str(name or head_for(model, method)))
