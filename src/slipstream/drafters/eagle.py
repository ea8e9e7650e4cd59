"""An EAGLE head drafts: one layer on the target's own features (EAGLE-1: Li et al. 2024, arXiv
2401.15077; EAGLE-3: Li et al. 2025, 2503.01840).

Row t of the head holds token t + 1 beside the target's features of token t, and guesses token
t + 2. Its cache follows the target's rule: rows of committed features are committed, guesses never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from slipstream import sampling
from slipstream.cache import Cache
from slipstream.drafters.cost import floor_of
from slipstream.drafters.expand import Expanded, TreeShape
from slipstream.drafters.paths import read_tree
from slipstream.request import Request
from slipstream.types import Draft, StepOutput, StepRows, chain, chain_rows

if TYPE_CHECKING:
    from slipstream.drafters import Target
    from slipstream.drafters.eagle_config import EagleOptions

_CHUNK = 512  # rows of a prefill step


class Head(Protocol):
    """What this drafter asks of a head, on either runtime; shapes as in ``runtimes/torch_head``."""

    def new_cache(self, slots: int, max_length: int) -> Cache: ...

    def fuse(self, features: Tensor) -> Tensor: ...

    def step(self, batch: Sequence[StepRows], cache: Cache, hidden: Tensor) -> StepOutput: ...

    def expand(
        self,
        batch: Sequence[StepRows],
        cache: Cache,
        features: Tensor,
        shapes: Sequence[TreeShape],
    ) -> tuple[StepOutput, list[Expanded]]: ...


class EagleDrafter:
    """Drafts a tree of the most probable paths, or a chain drawn from the head's distribution."""

    def __init__(
        self,
        head: Head,
        taps: Sequence[int],
        target_ids: Tensor,
        target: Target,
        config: EagleOptions,
    ) -> None:
        self.taps = tuple(taps)
        self._head = head
        self._drawn = config.draft_sample_method == "probabilistic"
        depth = config.num_speculative_tokens
        if config.tree is not None:
            self._shape = TreeShape(depth=depth, fixed=read_tree(config.tree))
        else:
            self._shape = TreeShape(
                depth=depth,
                width=config.tree_width,
                nodes=config.tree_nodes,
                floor=floor_of(config.path_floor, target.runtime),
            )
        self._target_ids = target_ids
        self._vocab_size = target.vocab_size
        self._cache = head.new_cache(target.max_num_seqs, target.max_model_len)
        self._slots: dict[int, int] = {}
        self._features: dict[int, Tensor] = {}  # of rows that are not committed: [n, F·h]

    def observe(self, request: Request, features: Tensor) -> None:
        new, key = features.flatten(1), request.request_id
        known = self._features.get(key)
        self._features[key] = new if known is None else torch.cat([known, new])

    def release(self, request: Request) -> None:
        self._features.pop(request.request_id, None)
        slot = self._slots.pop(request.request_id, None)
        if slot is not None:
            self._cache.release(slot)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft()] * len(requests)
        sampled: list[int] = []
        grown: list[int] = []
        for i, (request, budget) in enumerate(zip(requests, budgets, strict=True)):
            if budget > 0 and self._knows(request):
                self._prefill(request)
                (sampled if self._draws(request) else grown).append(i)
        for group, draft in ((grown, self._grow), (sampled, self._sample)):
            if not group:
                continue
            made = draft([requests[i] for i in group], [budgets[i] for i in group])
            for i, one in zip(group, made, strict=True):
                drafts[i] = one
        return drafts

    def _knows(self, request: Request) -> bool:
        """Whether the features of all tokens before the newest are here: of a prompt they come with
        the step that reads its end."""
        key = request.request_id
        committed = self._cache.lengths[self._slots[key]] if key in self._slots else 0
        known = self._features.get(key)
        return known is not None and committed + len(known) == len(request.tokens) - 1

    def _draws(self, request: Request) -> bool:
        return self._drawn and not request.params.greedy

    def _grow(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        shapes = [replace(self._shape, depth=budget) for budget in budgets]
        batch = [self._rows(request) for request in requests]
        output, trees = self._head.expand(batch, self._cache, self._pending(requests), shapes)
        self._commit(requests, batch, output)
        return [Draft(tokens=tokens, parents=parents) for tokens, parents, _ in trees]

    def _sample(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """Chains, a guess a step, each with the distribution that it was drawn from."""
        return [self._sample_one(*pair) for pair in zip(requests, budgets, strict=True)]

    def _sample_one(self, request: Request, budget: int) -> Draft:
        hidden = self._head.fuse(self._features[request.request_id])
        known = len(hidden)
        tokens: list[int] = []
        probs: list[Tensor] = []
        for _ in range(budget):
            rows = self._rows(request, tokens)
            output = self._head.step([rows], self._cache, hidden)
            assert output.features is not None
            if not tokens:
                self._commit([request], [rows], output)
            hidden = torch.cat([hidden[known - 1 : known], output.features[known - 1 :, 0]])
            known = 1
            row = self._distribution(request, output.logits[0], tokens)
            tokens.append(request.noise.sample_draft(row, len(request.tokens) + len(tokens)))
            probs.append(row)
        return chain(tokens, torch.stack(probs) if probs else None)

    def _distribution(self, request: Request, logits: Tensor, guesses: Sequence[int]) -> Tensor:
        """[d] → [V]: over the target's vocabulary, after the request's own processors."""
        wide = logits.new_full((1, self._vocab_size), -torch.inf)
        wide[0, self._target_ids.to(logits.device)] = logits
        context = sampling.Context(
            prompt=request.tokens[: request.prompt_length],
            output=request.output,
            suffixes=[guesses],
            stop_ids=(),
        )
        return sampling.target_probs(wide, request.params, context)[0]

    def _prefill(self, request: Request) -> None:
        """Give the request a slot; commit rows until one step takes the rest."""
        key = request.request_id
        if key not in self._slots:
            self._slots[key] = self._cache.allocate()
        while len(self._features[key]) > _CHUNK:
            rows = self._rows(request)
            part = chain_rows(rows.slot, rows.tokens[:_CHUNK])
            hidden = self._head.fuse(self._features[key][:_CHUNK])
            output = self._head.step([part], self._cache, hidden)
            self._cache.commit(output, [rows.slot], [range(_CHUNK)])
            self._features[key] = self._features[key][_CHUNK:]

    def _rows(self, request: Request, guesses: Sequence[int] = ()) -> StepRows:
        """Rows that are not committed, one at least, then the guesses."""
        slot = self._slots[request.request_id]
        known = request.tokens[self._cache.lengths[slot] + 1 :]
        assert len(known) == len(self._features[request.request_id])
        tokens = [*known, *guesses]
        return chain_rows(slot, tokens, logit_rows=[len(tokens) - 1])

    def _pending(self, requests: Sequence[Request]) -> Tensor:
        return torch.cat([self._features[request.request_id] for request in requests])

    def _commit(
        self, requests: Sequence[Request], batch: Sequence[StepRows], output: StepOutput
    ) -> None:
        """All known rows but the last: it is computed again where the next draft begins."""
        kept = [range(len(rows.tokens) - 1) for rows in batch]
        self._cache.commit(output, [rows.slot for rows in batch], kept)
        for request, rows in zip(requests, kept, strict=True):
            key = request.request_id
            self._features[key] = self._features[key][len(rows) :]
