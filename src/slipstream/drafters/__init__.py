"""Drafters: one file a method, each with its config; this table is the only list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.config import from_dict, require_integer, unknown
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:  # options are checked before torch is there
    from torch import Tensor

    from slipstream.request import Request
    from slipstream.runtimes import Runtime
    from slipstream.types import Draft


class Drafter(Protocol):
    """Guesses; what it keeps per request follows the target's commit rule."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """A draft each, at most ``budgets[i]`` tokens deep (0: none wanted); may be shorter.

        A draft depends on the request's tokens, its parameters and its noise alone, never on the
        other requests. Called again without news it gives the same drafts.
        """
        ...

    def release(self, request: Request) -> None:
        """The request is over; called once or more, also for requests never seen."""
        ...


class FeatureDrafter(Drafter, Protocol):
    """A drafter that looks at what the target computed. taps: the layers it looks at, as in
    ``Runtime.step``."""

    taps: Sequence[int]

    def observe(self, request: Request, features: Tensor) -> None:
        """The next tokens of the request were committed; features: [n, taps, hidden] of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a drafter may know of the model it drafts for.

    load: a second model of the user's naming → (runtime, tokenizer). notify: is told in a line what
    the user should know.
    """

    name: str
    runtime: Runtime
    tokenizer: Any
    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    load: Callable[[str], tuple[Runtime, Any]]
    notify: Callable[[str], None] = print


class DrafterConfig(Protocol):
    """A method's own options: a frozen dataclass whose ``build`` makes the drafter."""

    @property
    def num_speculative_tokens(self) -> int: ...

    def build(self, target: Target) -> Drafter: ...


_METHODS = {
    "ngram": "slipstream.drafters.ngram:NgramConfig",
    "draft_model": "slipstream.drafters.draft_model:DraftModelConfig",
    "eagle3": "slipstream.drafters.eagle_config:Eagle3Options",
    "eagle": "slipstream.drafters.eagle_config:Eagle1Options",
    "medusa": "slipstream.drafters.medusa:MedusaConfig",
}
METHODS = tuple(_METHODS)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """A parsed ``speculative_config``. rejection_sample_method: of sampled drafts, a key of
    ``verify.REJECTION_SAMPLERS``; or of all drafts, one of ``verify.LOSSY_SAMPLERS``, where the
    drafter's own option ``acceptance`` asks for it."""

    method: str
    drafter: DrafterConfig
    rejection_sample_method: str = "standard"


SpeculativeConfig = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Of the user: a drafter's method and options, or a list of several that draft together."""


def parse(values: SpeculativeConfig) -> Speculation:
    """Check a ``speculative_config`` before anything is loaded.

    Raises SlipstreamError for an unknown method or key, a value out of range, or drafters that
    can't draft together.
    """
    if isinstance(values, Mapping):
        return _parse_one(values)
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if not listed or not values or not all(isinstance(one, Mapping) for one in values):
        raise SlipstreamError(
            f"speculative_config takes a method with its options, or a list of such, got {values!r}"
        )
    parts = [_parse_one(one) for one in values]
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        if getattr(part.drafter, "draft_sample_method", "greedy") != "greedy":
            raise SlipstreamError(
                f"several drafters make one tree of their likeliest tokens: give {part.method} "
                'draft_sample_method "greedy" there'
            )
        if part.rejection_sample_method != "standard":
            raise SlipstreamError(
                f"{part.method} with {part.rejection_sample_method!r} acceptance drafts alone, "
                "not in a list"
            )
    from slipstream.drafters.together import TogetherConfig

    together = TogetherConfig(parts=[part.drafter for part in parts])
    return Speculation(method="+".join(part.method for part in parts), drafter=together)


def _parse_one(values: Mapping[str, Any]) -> Speculation:
    options = dict(values)
    method = options.pop("method", "draft_model" if "model" in options else None)
    if method is None:
        raise SlipstreamError(f"speculative_config needs a method: one of {', '.join(METHODS)}")
    if not isinstance(method, str) or method not in _METHODS:
        raise unknown("speculative method", method, METHODS)
    sampler = options.pop("rejection_sample_method", "standard")
    if sampler != "standard":
        from slipstream.verify import REJECTION_SAMPLERS  # brings torch in

        if not isinstance(sampler, str) or sampler not in REJECTION_SAMPLERS:
            raise unknown("rejection_sample_method", sampler, tuple(REJECTION_SAMPLERS))
    module, name = _METHODS[method].split(":")
    config = from_dict(getattr(import_module(module), name), options, f"{method} option")
    require_integer("num_speculative_tokens", config.num_speculative_tokens, 1)
    acceptance = getattr(config, "acceptance", "lossless")
    if acceptance != "lossless" and sampler != "standard":
        raise SlipstreamError(
            f"acceptance {acceptance!r} and rejection_sample_method {sampler!r}: give one of them"
        )
    sampler = sampler if acceptance == "lossless" else acceptance
    return Speculation(method=method, drafter=config, rejection_sample_method=sampler)
