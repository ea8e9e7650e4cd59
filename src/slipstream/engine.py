"""The decode loop. It knows token ids only: no tokenizer, no transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream import sampling
from slipstream.config import SamplingParams, is_token
from slipstream.drafters import Drafter
from slipstream.errors import SlipstreamError
from slipstream.metrics import Clock, Metrics
from slipstream.noise import Noise
from slipstream.request import Request
from slipstream.runtimes import Runtime
from slipstream.scheduler import Scheduler
from slipstream.types import (
    Draft,
    Logprob,
    Origin,
    StepOutput,
    StepRows,
    Verdict,
)
from slipstream.verify import LOSSY_SAMPLERS, REJECTION_SAMPLERS, follow


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """max_num_seqs: requests in flight. max_model_len: tokens of prompt and output together.
    num_speculative_tokens: K, the longest draft. prefill_chunk: prompt tokens a step takes.
    rejection_sample_method: "standard" or "block", for sampled drafts; "typical", which is lossy,
        for all. logprobs_mode: as in vLLM.
    vocab_size: ids that the tokenizer knows; padding of the matrices beyond them is never sampled.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: Sequence[int] = ()
    max_num_seqs: int = 8
    num_speculative_tokens: int = 0
    prefill_chunk: int = 512
    rejection_sample_method: str = "standard"
    logprobs_mode: str = "raw_logprobs"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A request's part of the step at hand: ``pending`` known tokens, then its draft."""

    request: Request
    pending: int
    draft: Draft
    rows: StepRows


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The accepted tokens and the next one; their logprobs, if asked for."""

    verdict: Verdict
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass(kw_only=True)
class Engine:
    """Speculative decoding of many requests over one target.

    drafter: None for plain decoding, which is a draft of length 0 on the same path.
    on_verdict: is shown each sampled draft, the target distributions [n + 1, V] it was verified
        against and the verdict (proofs and tests).
    """

    runtime: Runtime
    config: EngineConfig
    drafter: Drafter | None = None
    metrics: Metrics = field(default_factory=Metrics)
    clock: Clock = field(default_factory=Clock)
    on_verdict: Callable[[Draft, Tensor, Verdict], None] | None = None

    def __post_init__(self) -> None:
        self.cache = self.runtime.new_cache(self.config.max_num_seqs, self.config.max_model_len)
        self.scheduler = Scheduler(self.cache)
        self._taps: Sequence[int] = getattr(self.drafter, "taps", ())
        self._next_id = 0

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt of token ids.

        Raises SlipstreamError for an empty prompt, or one that leaves no room for an answer.
        """
        longest = self.config.max_model_len
        if not prompt:
            raise SlipstreamError("the prompt is empty: give at least one token")
        if len(prompt) >= longest:
            raise SlipstreamError(
                f"the prompt has {len(prompt)} tokens, the context holds {longest} with the "
                "answer: shorten it or raise --max-model-len"
            )
        if not all(is_token(token, self.config.vocab_size) for token in prompt):
            raise SlipstreamError(f"the prompt has ids outside 0 … {self.config.vocab_size - 1}")
        params.check_vocabulary(self.config.vocab_size)
        request = Request(
            request_id=self._next_id,
            prompt_length=len(prompt),
            tokens=list(prompt),
            params=params,
            noise=Noise(params.seed),
        )
        self._next_id += 1
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Drop a request; what it has so far stays on it."""
        request.finish_reason = request.finish_reason or "abort"
        self._release(request)

    def stop(self, request: Request, length: int, reason: str) -> None:
        """End a request after ``length`` output tokens, as a stop string found in its text asks."""
        for metrics in (request.metrics, self.metrics):
            metrics.emitted -= request.output_length - length
        del request.tokens[request.prompt_length + length :]
        del request.origins[length:], request.logprobs[length:]
        request.finish_reason, request.stop_reason = "stop", reason
        self._release(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One decode step; returns the requests that got tokens, finished ones included.

        Nothing changes before verification is through: an error leaves every request as it was.
        """
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        if not batch:
            return []
        plans = self._plan(batch)
        drafted = time.perf_counter()
        output = self.runtime.step([plan.rows for plan in plans], self.cache, self._taps)
        computed = time.perf_counter()
        logits = self._split(plans, output.logits)
        outcomes = [self._decide(*pair) for pair in zip(plans, logits, strict=True)]
        self._commit(plans, outcomes, output)
        changed = [
            self._emit(plan, outcome)
            for plan, outcome in zip(plans, outcomes, strict=True)
            if outcome is not None
        ]
        self.clock.add(drafted - started, computed - drafted, time.perf_counter() - computed)
        return changed

    def _plan(self, batch: Sequence[Request]) -> list[_Plan]:
        """Draft for the requests whose next token is due; the others read on in their prompt."""
        pending = [self.scheduler.pending(request) for request in batch]
        chunk = self.config.prefill_chunk
        due = [r for r, count in zip(batch, pending, strict=True) if count <= chunk]
        drafts = dict(zip((r.request_id for r in due), self._propose(due), strict=True))
        return [
            self._rows(request, min(count, chunk), drafts.get(request.request_id))
            for request, count in zip(batch, pending, strict=True)
        ]

    def _propose(self, requests: Sequence[Request]) -> list[Draft]:
        budgets = [self._budget(request) for request in requests]
        if self.drafter is None or not any(budgets):
            return [Draft()] * len(requests)
        drafts = self.drafter.propose(requests, budgets)
        assert all(d.depth <= b for d, b in zip(drafts, budgets, strict=True))
        return drafts

    def _budget(self, request: Request) -> int:
        """Tokens worth drafting: K, less where the request may end sooner."""
        return min(self.config.num_speculative_tokens, self._room(request) - 1)

    def _room(self, request: Request) -> int:
        """Tokens that may still be emitted."""
        room = self.config.max_model_len - len(request.tokens)
        if request.params.max_tokens is not None:
            room = min(room, request.params.max_tokens - request.output_length)
        return room

    def _rows(self, request: Request, pending: int, draft: Draft | None) -> _Plan:
        """draft: None if the newest token is not among the pending rows yet."""
        assert request.slot is not None
        start = self.cache.lengths[request.slot]
        known = request.tokens[start : start + pending]
        root = pending - 1
        guess = draft or Draft()
        rows = StepRows(
            slot=request.slot,
            tokens=[*known, *guess.tokens],
            parents=[*range(-1, root), *(pending + p if p >= 0 else root for p in guess.parents)],
            logit_rows=[] if draft is None else range(root, pending + len(guess)),
        )
        return _Plan(request=request, pending=pending, draft=guess, rows=rows)

    def _split(self, plans: Sequence[_Plan], logits: Tensor) -> Sequence[Tensor]:
        """[N, V] → a request each: [n + 1, V] of its newest and its drafted tokens, or [0, V].

        Raises SlipstreamError where the logits are not numbers: every choice would be garbage.
        """
        logits = logits[:, : self.config.vocab_size]
        if logits.numel() and not bool(logits.max().isfinite()):
            raise SlipstreamError(
                "the model's logits are not numbers: its weights are damaged, or its arithmetic "
                "overflows; try --dtype float32"
            )
        return logits.split([len(plan.rows.logit_rows) for plan in plans])

    def _decide(self, plan: _Plan, logits: Tensor) -> _Outcome | None:
        """What this step gives the request, or None where the prompt goes on; changes nothing."""
        if not len(logits):
            return None
        verdict = self._verify(plan, logits)
        tokens = [*(plan.draft.tokens[node] for node in verdict.path), verdict.next_token]
        logprobs = self._logprobs(plan, verdict, logits, tokens)
        return _Outcome(verdict=verdict, tokens=tokens, logprobs=logprobs)

    def _verify(self, plan: _Plan, logits: Tensor) -> Verdict:
        """logits: [n + 1, V], of the newest and of each drafted token."""
        request, draft = plan.request, plan.draft
        if request.params.greedy:
            return follow(draft, lambda row: self._choose_greedy(plan, logits, row))
        lossy = self.config.rejection_sample_method in LOSSY_SAMPLERS
        if draft.draft_probs is None and self.on_verdict is None and not lossy:
            return follow(draft, lambda row: self._sample(plan, logits, row))
        probs = self._target_probs(plan, logits, range(len(logits)))
        verdict = self._verify_sampled(request, draft, probs)
        if self.on_verdict is not None:
            self.on_verdict(draft, probs, verdict)
        return verdict

    def _choose_greedy(self, plan: _Plan, logits: Tensor, row: int) -> int:
        """Of one row: a walk down a wide tree asks few of them."""
        context = self._context(plan, [row])
        return sampling.choose_greedy(logits[row : row + 1], plan.request.params, context)[0]

    def _sample(self, plan: _Plan, logits: Tensor, row: int) -> int:
        probs = self._target_probs(plan, logits[row : row + 1], [row])[0]
        return self._draw(plan.request, plan.draft, probs, row)

    def _target_probs(self, plan: _Plan, logits: Tensor, rows: Sequence[int]) -> Tensor:
        return sampling.target_probs(logits, plan.request.params, self._context(plan, rows))

    def _draw(self, request: Request, draft: Draft, probs: Tensor, row: int) -> int:
        position = len(request.tokens) + len(draft.suffix(row - 1))
        return request.noise.sample(probs, position)

    def _verify_sampled(self, request: Request, draft: Draft, probs: Tensor) -> Verdict:
        method = self.config.rejection_sample_method
        if method in LOSSY_SAMPLERS:
            return LOSSY_SAMPLERS[method](draft, probs, request.noise, len(request.tokens))
        if draft.draft_probs is not None:
            verify = REJECTION_SAMPLERS[method]
            return verify(draft, probs, request.noise, len(request.tokens))
        return follow(draft, lambda row: self._draw(request, draft, probs[row], row))

    def _context(self, plan: _Plan, rows: Sequence[int]) -> sampling.Context:
        """Of rows of the logits: 0 is the newest token, row i + 1 token i of the draft."""
        request = plan.request
        return sampling.Context(
            prompt=request.tokens[: request.prompt_length],
            output=request.output,
            suffixes=[plan.draft.suffix(row - 1) for row in rows],
            stop_ids=self.stop_ids(request.params),
        )

    def stop_ids(self, params: SamplingParams) -> list[int]:
        """Tokens that end a request of these parameters."""
        eos = [] if params.ignore_eos else self.config.eos_token_ids
        return [*eos, *params.stop_token_ids]

    def _commit(
        self, plans: Sequence[_Plan], outcomes: Sequence[_Outcome | None], output: StepOutput
    ) -> None:
        paths = [outcome.verdict.path if outcome else () for outcome in outcomes]
        kept = [
            [*range(plan.pending), *(plan.pending + node for node in path)]
            for plan, path in zip(plans, paths, strict=True)
        ]
        self.cache.commit(output, [plan.rows.slot for plan in plans], kept)
        if output.features is not None:
            parts = output.features.split([len(plan.rows.tokens) for plan in plans])
            for plan, features, rows in zip(plans, parts, kept, strict=True):
                self.drafter.observe(plan.request, features[rows])  # type: ignore[union-attr]

    def _emit(self, plan: _Plan, outcome: _Outcome) -> Request:
        """Append the step's tokens, up to the one that ends the request."""
        request, verdict = plan.request, outcome.verdict
        origins: list[Origin] = ["accepted" for _ in verdict.path]
        origins.append(verdict.origin)
        emitted = self._end(request, outcome.tokens)
        request.origins += origins[:emitted]
        request.logprobs += outcome.logprobs[:emitted]
        request.tokens += outcome.tokens[:emitted]
        request.noise.step += 1
        for metrics in (request.metrics, self.metrics):
            metrics.observe(plan.draft, verdict, emitted)
        if request.finish_reason is not None:
            self._release(request)
        return request

    def _end(self, request: Request, tokens: Sequence[int]) -> int:
        """How many of the new tokens the request takes; sets its reason if one of them ends it."""
        params, room = request.params, self._room(request)
        for count, token in enumerate(tokens, 1):
            if token in self.stop_ids(params):
                request.finish_reason = "stop"
                request.stop_reason = token if token in params.stop_token_ids else None
                return count
            if count == room:
                request.finish_reason = "length"
                return count
        return len(tokens)

    def _logprobs(
        self, plan: _Plan, verdict: Verdict, logits: Tensor, tokens: Sequence[int]
    ) -> list[dict[int, Logprob]]:
        params = plan.request.params
        if params.logprobs is None:
            return []
        if self.config.logprobs_mode == "processed_logprobs":
            context = self._context(plan, range(len(logits)))
            logits = sampling.adjust(logits, params, context)
            logits = logits if params.greedy else sampling.truncate(logits, params)
        path = logits[[0, *(node + 1 for node in verdict.path)]]
        return sampling.logprobs_of(path, tokens, params.logprobs)

    def _release(self, request: Request) -> None:
        self.scheduler.remove(request)
        if self.drafter is not None:
            self.drafter.release(request)
