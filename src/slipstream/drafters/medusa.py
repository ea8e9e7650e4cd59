"""Medusa heads draft: a small head a position, all on the target's last hidden state (Cai et al.
2024, arXiv 2401.10774).

Head i at token t guesses token t + 2 + i: the target's own LM head gave t + 1, the newest token. So
all that is kept of a request is the last layer's output for the last committed token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.config import require, require_integer, unknown
from slipstream.drafters.belongs import check_belongs
from slipstream.drafters.cost import floor_of, require_floor
from slipstream.drafters.paths import RankTree, best_tree, read_tree
from slipstream.models import medusa
from slipstream.models.head_sources import head_for, resolve_head
from slipstream.request import Request
from slipstream.runtimes.medusa_heads import Guesses, PackedHeads
from slipstream.runtimes.outer import read_last_norm
from slipstream.types import Draft

if TYPE_CHECKING:
    from slipstream.drafters import Target

_LOSSY_FLOOR = 0.05  # a measured one would let timings decide the text
LOSSY = "lossy: with acceptance 'typical' sampled output does not have the target's distribution"


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """model: the heads: a folder, a hub id or built-in ones, "" for those of the target.

    num_speculative_tokens: the longest path; no longer than there are heads. tree_nodes: of the
    whole tree at most, the most probable paths in the heads' eyes, anew each step. path_floor: the
    least probability of a path that is drafted; None for what is worth a row of the target's step,
    as measured when the heads are loaded. tree: instead of those, always the
    same paths of ranks: a list as Medusa's authors publish them, or a JSON file with one.
    acceptance: "lossless", or "typical", which is lossy: a sampled request takes any draft that its
    target finds probable enough (``verify.typical_acceptance``).
    quantization: of the heads on CPUs; lossless text is the same with any.
    """

    model: str = ""
    num_speculative_tokens: int = 5
    tree_nodes: int = 16
    path_floor: float | None = None
    tree: Any = None
    acceptance: str = "lossless"
    quantization: str = "int8"

    def __post_init__(self) -> None:
        require(isinstance(self.model, str), "model", self.model, "a name or a path")
        require_integer("tree_nodes", self.tree_nodes, 1)
        require_floor(self.path_floor)
        if self.tree is not None:
            read_tree(self.tree)
        for name, known in (
            ("acceptance", ("lossless", "typical")),
            ("quantization", ("none", "int8")),
        ):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)

    @property
    def lossy(self) -> bool:
        return self.acceptance != "lossless"

    def build(self, target: Target) -> MedusaDrafter:
        tree = None if self.tree is None else read_tree(self.tree)
        name = self.model or head_for(target.name, "medusa")
        heads = medusa.read(resolve_head(name), name)
        shape = heads.shape
        check_belongs(name, target, shape.hidden, shape.vocab, shape.verifier)
        if self.lossy:
            target.notify(LOSSY)
        return MedusaDrafter(heads, read_last_norm(target.name), target, self, tree)


class MedusaDrafter:
    """Drafts a deterministic tree: ``follow`` verifies it without loss at any temperature.

    normed: the target's final norm. tree: None for the most probable paths of each step.
    """

    def __init__(
        self,
        heads: medusa.MedusaHeads,
        normed: Callable[[Tensor], Tensor],
        target: Target,
        config: MedusaConfig,
        tree: RankTree | None = None,
    ) -> None:
        self.taps = (target.runtime.layers,)
        self._heads, self._target, self._config = heads, target, config
        self._normed, self._tree = normed, tree
        width = config.tree_nodes if tree is None else 1 + max(tree.ranks)
        self._width = min(width, heads.shape.draft_vocab)
        given = _LOSSY_FLOOR if config.lossy and config.path_floor is None else config.path_floor
        floor = floor_of(given, target.runtime)
        self._least = math.log(floor) if floor > 0 else -math.inf
        self._packed: PackedHeads | None = None
        self._last: dict[int, tuple[int, Tensor]] = {}  # tokens committed; [h] of the last one

    def observe(self, request: Request, features: Tensor) -> None:
        known, _ = self._last.get(request.request_id, (0, None))
        # a copy: a view would keep the whole prompt's features
        self._last[request.request_id] = known + len(features), features[-1, 0].clone()

    def release(self, request: Request) -> None:
        self._last.pop(request.request_id, None)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft()] * len(requests)
        ready = [i for i, r in enumerate(requests) if budgets[i] > 0 and self._knows(r)]
        if ready:
            last = torch.stack([self._last[requests[i].request_id][1] for i in ready])
            guesses = self._on(last.device).guesses(self._normed(last), self._width)
            for i, each in zip(ready, guesses, strict=True):
                drafts[i] = self._draft(each, budgets[i])
        return drafts

    def _knows(self, request: Request) -> bool:
        """Whether the newest token alone is not committed: not so in the middle of a prompt."""
        committed, _ = self._last.get(request.request_id, (0, None))
        return committed > 0 and committed == len(request.tokens) - 1

    def _on(self, device: torch.device) -> PackedHeads:
        """The heads, packed where the target turns out to compute."""
        if self._packed is None:
            self._packed = PackedHeads(
                self._heads,
                self._target.vocab_size,
                device=device,
                dtype=self._target.runtime.dtype,
                int8=self._config.quantization == "int8",
            )
        return self._packed

    def _draft(self, guesses: Guesses, budget: int) -> Draft:
        tokens, log_probs = guesses
        if self._tree is not None:
            depth = min(budget, len(tokens))
            return self._tree.cut(depth, len(tokens[0])).draft(tokens)
        return best_tree(log_probs[:budget], self._config.tree_nodes, self._least).draft(tokens)
