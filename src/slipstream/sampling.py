"""From logits to the distribution that a token is drawn from: the one place where it is made.

Order as in vLLM: logit bias → minimum length → penalties → temperature → min-p → top-k → top-p.
Rows are nodes of a draft tree: each is processed as if the tokens on its own path had been
emitted. Pure functions in the dtype of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream import fast_rows
from slipstream.config import SamplingParams
from slipstream.types import Logprob

_COLD = 1e-3
_COLDEST = 1e-30  # below any temperature that makes a difference, above the smallest float32
_NUCLEUS_GUESSES = (256, 4096)  # tokens looked at before a whole vocabulary is sorted for top-p


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the processors may look at, for the rows of one request.

    prompt, output: token ids before the rows. suffixes: a row each, the drafted tokens on its
    path. stop_ids: tokens that end the request, held back until ``min_tokens``.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    suffixes: Sequence[Sequence[int]]
    stop_ids: Sequence[int]


def choose_greedy(logits: Tensor, params: SamplingParams, context: Context) -> list[int]:
    """[n, V] → n ids: the most probable token of each row after bias, length and penalties."""
    logits = adjust(logits, params, context)
    return fast_rows.argmax(logits) if fast_rows.serves(logits) else logits.argmax(-1).tolist()


def target_probs(logits: Tensor, params: SamplingParams, context: Context) -> Tensor:
    """[n, V] logits → [n, V] probabilities, rows adding to 1; temperature must be above 0."""
    logits = adjust(logits, params, context)
    if fast_rows.serves(logits):
        return fast_rows.target_probs(logits, params)
    return truncate(logits, params).softmax(-1)


def adjust(logits: Tensor, params: SamplingParams, context: Context) -> Tensor:
    """Logit bias, minimum length and penalties; [n, V] → [n, V], the input left as it was."""
    short = [
        row
        for row, suffix in enumerate(context.suffixes)
        if len(context.output) + len(suffix) < params.min_tokens
    ]
    if not (params.logit_bias or short or params.has_penalties):
        return logits
    logits = logits.clone()
    for token, bias in params.logit_bias.items():
        logits[:, token] += bias
    if short and context.stop_ids:
        rows = torch.tensor(short, device=logits.device)
        columns = torch.tensor(list(context.stop_ids), device=logits.device)
        logits[rows[:, None], columns] = -torch.inf
    return _penalise(logits, params, context) if params.has_penalties else logits


def _penalise(logits: Tensor, params: SamplingParams, context: Context) -> Tensor:
    emitted = _counts(context.output, logits)
    in_output = emitted.repeat(len(logits), 1)
    drafted = [(row, token) for row, path in enumerate(context.suffixes) for token in path]
    if drafted:
        rows, tokens = torch.tensor(drafted, device=logits.device).T
        in_output.index_put_((rows, tokens), in_output.new_ones(len(rows)), accumulate=True)
    if params.repetition_penalty != 1:
        seen = (in_output + _counts(context.prompt, logits)) > 0
        factor = params.repetition_penalty
        punished = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(seen, punished, logits)
    if params.frequency_penalty:
        logits = logits - params.frequency_penalty * in_output
    if params.presence_penalty:
        logits = logits - params.presence_penalty * (in_output > 0).to(logits.dtype)
    return logits


def _counts(tokens: Sequence[int], like: Tensor) -> Tensor:
    """[V]: how often each token occurs."""
    ids = torch.tensor(list(tokens), dtype=torch.long, device=like.device)
    return torch.bincount(ids, minlength=like.shape[-1]).to(like.dtype)


def truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then -inf outside min-p, top-k and top-p; [n, V] → [n, V].

    Tokens as probable as the last one kept by top-k or top-p are kept too; one always remains.
    """
    if params.temperature < _COLD:  # the best logit at 0 overflows to -inf only, never to NaN
        logits = logits - logits.amax(-1, keepdim=True)
    logits = logits / max(params.temperature, _COLDEST)
    if params.min_p > 0:
        # p >= min_p · p_max, compared as logits: the normaliser cancels
        bound = logits.amax(-1, keepdim=True) + torch.log(logits.new_tensor(params.min_p))
        logits = logits.masked_fill(logits < bound, -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        bound = logits.topk(params.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < bound, -torch.inf)
    return _top_p(logits, params.top_p) if params.top_p < 1 else logits


def _top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest most probable tokens whose probabilities reach ``top_p``.

    A row's result must not depend on the other rows, so ties with the last token stay too: which
    of them comes first depends on how many tokens were sorted.
    """
    log_total = logits.logsumexp(-1, keepdim=True)
    vocabulary = logits.shape[-1]
    for width in (*(guess for guess in _NUCLEUS_GUESSES if guess < vocabulary), vocabulary):
        top = logits.topk(width).values  # sorted: probabilities fall
        probs = (top - log_total).exp()
        inside = probs.cumsum(-1) - probs < top_p  # mass of all tokens ahead
        if width == vocabulary or not bool(inside[..., -1].any()):
            break
    last = inside.sum(-1, keepdim=True).clamp_min(1) - 1
    return logits.masked_fill(logits < top.gather(-1, last), -torch.inf)


def logprobs_of(logits: Tensor, tokens: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """For each row the log-probability of its token, and of the ``count`` most probable ones.

    logits: [n, V], raw or processed; tokens: n ids.
    """
    fast = fast_rows.serves(logits)
    logprobs = fast_rows.log_softmax(logits) if fast else logits.log_softmax(-1)
    chosen = torch.tensor(list(tokens), device=logits.device)[:, None]
    value = logprobs.gather(-1, chosen)
    rank = (logprobs > value).sum(-1, keepdim=True) + 1
    best, ids = logprobs.topk(count)
    places = torch.arange(1, count + 1, device=logits.device).expand(len(ids), count)
    rows = zip(
        torch.cat([ids, chosen], -1).tolist(),
        torch.cat([best, value], -1).tolist(),
        torch.cat([places, rank], -1).tolist(),
        strict=True,
    )
    return [{i: Logprob(v, r) for i, v, r in zip(*row, strict=True)} for row in rows]
