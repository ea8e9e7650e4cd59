"""The methods eagle3 and eagle: their options, and the drafter made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.config import require, require_integer, unknown
from slipstream.drafters.belongs import check_belongs
from slipstream.drafters.cost import require_floor
from slipstream.drafters.eagle import EagleDrafter, Head
from slipstream.drafters.paths import read_tree
from slipstream.errors import SlipstreamError
from slipstream.models import eagle1, eagle3
from slipstream.models.head_sources import head_for, resolve_head
from slipstream.runtimes.outer import read_last_norm, read_matrices

if TYPE_CHECKING:
    from slipstream.drafters import Target


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """model: the head: a folder, a hub id or a built-in one, "" for that of the target.

    num_speculative_tokens: the longest path. tree_width: nodes of a level that are gone on from,
    and children of each; 1 drafts a chain. tree_nodes: of the whole tree at most. path_floor: the
    least probability, in the head's eyes, of a path that is drafted; None for what is worth a row
    of the target's step, as measured when the head is loaded. tree: instead
    of those three, always the same paths of ranks: a list as EAGLE-1's authors publish them, or a
    JSON file with one.
    draft_sample_method: "greedy" drafts the most probable paths, also where the request samples;
    "probabilistic" draws a chain from the head's own distribution there.
    """

    model: str = ""
    num_speculative_tokens: int = 6
    tree_width: int = 6
    tree_nodes: int = 16
    path_floor: float | None = None
    tree: Any = None
    draft_sample_method: str = "greedy"

    def __post_init__(self) -> None:
        require(isinstance(self.model, str), "model", self.model, "a name or a path")
        require_integer("tree_width", self.tree_width, 1)
        require_integer("tree_nodes", self.tree_nodes, 1)
        require_floor(self.path_floor)
        if self.tree is not None:
            read_tree(self.tree)
        known = ("greedy", "probabilistic")
        if self.draft_sample_method not in known:
            raise unknown("draft_sample_method", self.draft_sample_method, known)


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(EagleOptions):
    """quantization: of the head on the native runtime; the text is the same with any."""

    quantization: str = "int8"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("none", "int8", "int4")
        if self.quantization not in known:
            raise unknown("quantization", self.quantization, known)

    def build(self, target: Target) -> EagleDrafter:
        name = self.model or head_for(target.name, "eagle3")
        weights = eagle3.read(resolve_head(name), name)
        config = weights.config
        taps = config.taps or eagle3.default_taps(target.runtime.layers)
        check_belongs(name, target, config.target_hidden, config.vocab, config.verifier, taps)
        if config.hidden != config.target_hidden and "embed_tokens.weight" not in weights.tensors:
            raise SlipstreamError(
                f"{name} has a hidden size of {config.hidden}, its target of "
                f"{config.target_hidden}: it needs embed_tokens.weight, which it lacks"
            )
        weights = eagle3.within(weights, target.vocab_size)
        head = _head(weights, target, self.quantization)
        return EagleDrafter(head, taps, weights.target_ids, target, self)


@dataclass(frozen=True, kw_only=True)
class Eagle1Options(EagleOptions):
    """EAGLE-1 and EAGLE-2 heads; they run on PyTorch, beside a native target too."""

    def build(self, target: Target) -> EagleDrafter:
        from slipstream.runtimes.torch_head import eagle1_head

        name = self.model or head_for(target.name, "eagle")
        weights = eagle1.read(resolve_head(name), name)
        shape = weights.shape
        check_belongs(name, target, shape.hidden, shape.vocab, shape.verifier)
        embedding, lm_head = read_matrices(target.name)
        like = getattr(target.runtime, "embedding", embedding)  # device and dtype of torch targets
        lm_head = lm_head[: target.vocab_size]  # the rest is padding
        head = eagle1_head(
            weights, embedding.to(like), lm_head.to(like), read_last_norm(target.name)
        )
        return EagleDrafter(head, (target.runtime.layers,), head.target_ids, target, self)


def _head(weights: eagle3.Eagle3Weights, target: Target, quantization: str) -> Head:
    """On the runtime of the target."""
    from slipstream.runtimes.native import NativeRuntime

    if isinstance(target.runtime, NativeRuntime):
        from slipstream.runtimes.native_head import NativeHead

        return NativeHead(weights, target.runtime, quantization=quantization)
    from slipstream.runtimes.torch_head import eagle3_head

    return eagle3_head(weights, target.runtime.embedding)  # type: ignore[attr-defined]
