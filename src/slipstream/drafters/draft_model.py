"""A smaller model of the same tokenizer drafts, token by token.

Its cache follows the target's rule: known tokens are committed, guesses never. Each further guess
is computed with the guesses before it as rows of the same step; rows are nearly free, and there is
nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream import sampling
from slipstream.config import require, unknown
from slipstream.drafters import Target
from slipstream.errors import SlipstreamError
from slipstream.models.vocabulary import check_same_vocabulary
from slipstream.request import Request
from slipstream.runtimes import Runtime
from slipstream.runtimes.native import Choice, NativeRuntime
from slipstream.types import Draft, StepOutput, StepRows, chain, chain_rows

_CHUNK = 512  # rows of a prefill step


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig:
    """model: as for ``--model``. draft_sample_method: "probabilistic" draws guesses from the draft
    model's own distribution when the request samples, "greedy" takes its most probable token."""

    model: str
    num_speculative_tokens: int = 4
    draft_sample_method: str = "probabilistic"

    def __post_init__(self) -> None:
        require(isinstance(self.model, str) and bool(self.model), "model", self.model, "a model")
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise unknown(
                "draft_sample_method", self.draft_sample_method, ("probabilistic", "greedy")
            )

    def build(self, target: Target) -> DraftModelDrafter:
        runtime, tokenizer = target.load(self.model)
        check_same_vocabulary(target.tokenizer, tokenizer, self.model)
        if runtime.vocab_size < target.vocab_size:
            raise SlipstreamError(
                f"draft model {self.model} has {runtime.vocab_size} embeddings for a tokenizer of "
                f"{target.vocab_size} tokens: its checkpoint is incomplete"
            )
        return DraftModelDrafter(
            runtime, target, sampled=self.draft_sample_method == "probabilistic"
        )


class DraftModelDrafter:
    """sampled: draw guesses from the draft distribution, for requests that sample."""

    def __init__(self, runtime: Runtime, target: Target, *, sampled: bool) -> None:
        self._runtime = runtime
        self._sampled = sampled
        self._vocab_size = target.vocab_size
        self._max_length = min(target.max_model_len, runtime.max_length)
        self._cache = runtime.new_cache(target.max_num_seqs, self._max_length)
        self._slots: dict[int, int] = {}

    def release(self, request: Request) -> None:
        slot = self._slots.pop(request.request_id, None)
        if slot is not None:
            self._cache.release(slot)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        wanted = [
            min(budget, self._max_length - len(request.tokens))
            for request, budget in zip(requests, budgets, strict=True)
        ]
        drafts = [Draft()] * len(requests)
        at_once: list[int] = []
        by_steps: list[int] = []
        for i, (request, count) in enumerate(zip(requests, wanted, strict=True)):
            if count > 0:
                self._prefill(request)
                (at_once if self._in_one_call(request) else by_steps).append(i)
        for group, draft in ((at_once, self._draft_at_once), (by_steps, self._draft_by_steps)):
            some = draft([requests[i] for i in group], [wanted[i] for i in group])
            for i, made in zip(group, some, strict=True):
                drafts[i] = made
        return drafts

    def _in_one_call(self, request: Request) -> bool:
        """Whether the native step can choose this request's guesses itself."""
        plain = not (request.params.logit_bias or request.params.has_penalties)
        return isinstance(self._runtime, NativeRuntime) and plain

    def _draft_at_once(self, requests: Sequence[Request], wanted: Sequence[int]) -> list[Draft]:
        if not requests:
            return []
        assert isinstance(self._runtime, NativeRuntime)
        batch = [self._rows(request, []) for request in requests]
        choices = [self._choice(*pair) for pair in zip(requests, wanted, strict=True)]
        output, made = self._runtime.draft(batch, self._cache, wanted, choices, self._vocab_size)
        self._commit(batch, [len(rows.tokens) - 1 for rows in batch], output)
        return [chain(tokens, probs if len(probs) else None) for tokens, probs in made]

    def _choice(self, request: Request, count: int) -> Choice:
        if not self._draws(request):
            return Choice(params=request.params)
        start = len(request.tokens)
        numbers = [request.noise.draft_number(start + i) for i in range(count)]
        return Choice(params=request.params, numbers=numbers)

    def _draft_by_steps(self, requests: Sequence[Request], wanted: Sequence[int]) -> list[Draft]:
        """The same step by step: for other runtimes, penalties and biases, and as the reference."""
        guesses: list[list[int]] = [[] for _ in requests]
        probs: list[list[Tensor]] = [[] for _ in requests]
        for depth in range(max(wanted, default=0)):
            live = [i for i, count in enumerate(wanted) if count > depth]
            logits = self._step([requests[i] for i in live], [guesses[i] for i in live])
            for i, row in zip(live, logits, strict=True):
                self._guess(requests[i], row, guesses[i], probs[i])
        return [
            chain(tokens, torch.stack(rows) if rows else None)
            for tokens, rows in zip(guesses, probs, strict=True)
        ]

    def _prefill(self, request: Request) -> None:
        """Give the request a slot; commit known tokens until one step takes the rest."""
        if request.request_id not in self._slots:
            self._slots[request.request_id] = self._cache.allocate()
        slot = self._slots[request.request_id]
        while len(request.tokens) - (start := self._cache.lengths[slot]) > _CHUNK:
            rows = chain_rows(slot, request.tokens[start : start + _CHUNK])
            self._cache.commit(self._runtime.step([rows], self._cache), [slot], [range(_CHUNK)])

    def _step(self, requests: Sequence[Request], guesses: Sequence[Sequence[int]]) -> Tensor:
        """[B, V]: logits after the guesses so far; commits the known tokens but the newest."""
        batch = [self._rows(*pair) for pair in zip(requests, guesses, strict=True)]
        output = self._runtime.step(batch, self._cache)
        known = [len(rows.tokens) - len(g) - 1 for rows, g in zip(batch, guesses, strict=True)]
        self._commit(batch, known, output)
        return output.logits[:, : self._vocab_size]

    def _rows(self, request: Request, guesses: Sequence[int]) -> StepRows:
        """Known tokens that are not committed yet, then the guesses."""
        slot = self._slots[request.request_id]
        tokens = [*request.tokens[self._cache.lengths[slot] :], *guesses]
        return chain_rows(slot, tokens, logit_rows=[len(tokens) - 1])

    def _commit(self, batch: Sequence[StepRows], counts: Sequence[int], output: StepOutput) -> None:
        self._cache.commit(output, [rows.slot for rows in batch], [range(n) for n in counts])

    def _guess(
        self, request: Request, logits: Tensor, guesses: list[int], probs: list[Tensor]
    ) -> None:
        """Append the next guess, and the distribution that it was really drawn from."""
        params = request.params
        context = sampling.Context(
            prompt=request.tokens[: request.prompt_length],
            output=request.output,
            suffixes=[guesses],
            stop_ids=(),
        )
        if not self._draws(request):
            guesses += sampling.choose_greedy(logits[None], params, context)
            return
        row = sampling.target_probs(logits[None], params, context)[0]
        position = len(request.tokens) + len(guesses)
        guesses.append(request.noise.sample_draft(row, position))
        probs.append(row)

    def _draws(self, request: Request) -> bool:
        return self._sampled and not request.params.greedy
