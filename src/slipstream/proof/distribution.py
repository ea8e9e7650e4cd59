"""Sampled losslessness: is the text distributed as the target says?

Every test gives a p-value under "nothing changed"; together they raise a false alarm with a
probability of at most ``FALSE_ALARM`` (Bonferroni; martingale.py says why the p-values can be
believed, the G- and KS-tests' hold in large samples). The exact proof, by enumeration over small
vocabularies, is in the test suite; these tests look at the user's model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream import sampling
from slipstream.config import SamplingParams
from slipstream.llm import LLM
from slipstream.proof.identity import NEAR_TIE, output_context, prompt_ids, target_logits
from slipstream.proof.martingale import EventBets, TokenBets
from slipstream.types import Draft, Verdict

FALSE_ALARM = 1e-6
_MIN_EXPECTED = 5  # bins of the G-test with less are pooled


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """p_value: probability of a statistic at least as extreme if nothing is wrong."""

    __test__ = False  # not a test case for pytest

    name: str
    samples: int
    statistic: float
    p_value: float


def target_distribution(
    llm: LLM, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """What each output token should have been drawn from, plainly computed.

    Returns [n, V] probabilities and [n, V] bool: tokens outside top-k, top-p or min-p by so little
    that rounding may have put them inside in another forward pass. One of those is no evidence.
    """
    tokens = [*prompt, *output[:-1]]
    suffixes = [output[:i] for i in range(len(output))]
    context = output_context(llm.engine, prompt, (), suffixes, params)
    logits = sampling.adjust(target_logits(llm.engine, tokens, len(prompt)), params, context)
    probs = sampling.truncate(logits, params).softmax(-1).double()
    lowest = logits.masked_fill(probs <= 0, torch.inf).amin(-1, keepdim=True)
    edge = (probs <= 0) & (logits >= lowest - 2 * NEAR_TIE[llm.model.runtime.dtype])
    return probs, edge


def _judged(
    llm: LLM, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> tuple[list[int], Tensor]:
    """Tokens and their distributions, less the tokens at an edge."""
    probs, edge = target_distribution(llm, prompt, output, params)
    kept = [i for i, token in enumerate(output) if not edge[i, token]]
    return [output[i] for i in kept], probs[kept]


def output_tests(samples: Sequence[tuple[Sequence[int], Tensor]]) -> list[TestResult]:
    """Two looks at sampled outputs, without bins; samples: (token ids [n], distributions [n, V]).

    Surprise: -log p(x_t) against its mean. PIT: the randomised probability integral transform,
    tokens in order of falling probability, is uniform (Kolmogorov-Smirnov).
    """
    bets = TokenBets()
    uniforms: list[float] = []
    rng = np.random.default_rng(0)
    for tokens, rows in samples:
        for token, probs in zip(tokens, rows, strict=True):
            bets.add(probs, token)
            above = float((probs * (probs > probs[token])).sum())
            tied = float((probs * (probs == probs[token])).sum())  # in no order among themselves
            uniforms.append(above + rng.random() * tied)
    gap = _ks_gap(uniforms)
    return [
        _result("surprise", bets),
        TestResult(
            name="PIT (KS)", samples=len(uniforms), statistic=gap, p_value=_ks(gap, len(uniforms))
        ),
    ]


def _result(name: str, bets: TokenBets | EventBets) -> TestResult:
    return TestResult(name=name, samples=bets.count, statistic=bets.statistic, p_value=bets.p_value)


def g_test(name: str, counts: Counter[int], probs: Tensor) -> TestResult:
    """Observed token counts against their distribution [V]; rare tokens are pooled."""
    total = sum(counts.values())
    if any(probs[token] <= 0 for token in counts):  # a token that can't occur settles it
        return TestResult(name=name, samples=total, statistic=math.inf, p_value=0.0)
    expected = (probs * total).tolist()
    bins = [(counts[i], e) for i, e in enumerate(expected) if e >= _MIN_EXPECTED]
    seen, due = total - sum(o for o, _ in bins), total - sum(e for _, e in bins)
    if bins and due < _MIN_EXPECTED:  # the rest is too little for a bin of its own
        rarest = min(range(len(bins)), key=lambda i: bins[i][1])
        bins[rarest] = bins[rarest][0] + seen, bins[rarest][1] + due
    else:
        bins.append((seen, due))
    g = 2 * sum(o * math.log(o / e) for o, e in bins if o)
    freedom = len(bins) - 1
    p = 1.0
    if freedom:
        half = torch.tensor([freedom / 2, max(g, 0.0) / 2], dtype=torch.float64)
        p = float(torch.special.gammaincc(half[0], half[1]))
    return TestResult(name=name, samples=total, statistic=g, p_value=p)


class VerdictTests:
    """Looks into verification: ``observe`` is an engine's on_verdict, for chains.

    draft: guesses against the distributions they are said to be drawn from. acceptance: accepted
    positions against 1 - TV(target, draft), which a wrong draft distribution fails; coin: against
    min(1, p/q) of the very token. next: the token after the accepted ones against the residual, or
    the target where all were accepted. Block verification accepts in blocks: there the middle two
    don't apply, and next only after a whole block.
    """

    def __init__(self, rejection_sample_method: str) -> None:
        self._block = rejection_sample_method == "block"
        self._draft, self._next = TokenBets(), TokenBets()
        self._acceptance, self._coin = EventBets(), EventBets()

    def observe(self, draft: Draft, target_probs: Tensor, verdict: Verdict) -> None:
        accepted = len(verdict.path)
        if draft.draft_probs is not None:
            for token, probs in zip(draft.tokens, draft.draft_probs, strict=True):
                self._draft.add(probs, token)
        if accepted == len(draft):
            self._next.add(target_probs[accepted], verdict.next_token)
        if self._block and draft.draft_probs is not None:
            return
        for at in range(min(accepted + 1, len(draft))):
            target, token = target_probs[at], draft.tokens[at]
            guess = _one_hot(token, target) if draft.draft_probs is None else draft.draft_probs[at]
            self._acceptance.add(at < accepted, float(torch.minimum(target, guess).sum()))
            self._coin.add(at < accepted, min(1.0, float(target[token] / guess[token])))
            if at == accepted:
                rest = (target - guess).clamp_min(0)
                if float(rest.sum()) > 1e-6:  # else nothing but rounding rejected it
                    self._next.add(rest / rest.sum(), verdict.next_token)

    def results(self) -> list[TestResult]:
        looks: dict[str, TokenBets | EventBets] = {
            "draft tokens": self._draft,
            "acceptance": self._acceptance,
            "acceptance coin": self._coin,
            "next token": self._next,
        }
        return [_result(name, bets) for name, bets in looks.items() if bets.count]


def _one_hot(token: int, like: Tensor) -> Tensor:
    hot = torch.zeros_like(like)
    hot[token] = 1
    return hot


def sampled_tests(
    plain: LLM,
    speculative: LLM,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    repeats: int,
    first_seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[TestResult]:
    """Sample with the drafter; test against the target's distributions, plainly computed.

    prompts: each answered once with ``params.max_tokens``; the first prompts again ``repeats``
    times for three tokens, whose first two are counted. Another first_seed is fresh evidence.
    advance: called after each answer.
    """
    inside = VerdictTests(speculative.engine.config.rejection_sample_method)
    speculative.engine.on_verdict = inside.observe
    samples: list[tuple[list[int], Tensor]] = []
    results: list[TestResult] = []
    try:
        tokenized = [prompt_ids(plain, [{"role": "user", "content": p}]) for p in prompts]
        for n, prompt in enumerate(tokenized):
            output = _sample(speculative, [prompt], params, [first_seed + n], advance)[0]
            samples.append(_judged(plain, prompt, output, params))
        results += output_tests(samples)
        for n, prompt in enumerate(tokenized[:2]):
            # no two samples share a seed: their noise would be the same at equal positions
            start = first_seed + len(prompts) + n * repeats
            seeds = range(start, start + repeats)
            results += _count(plain, speculative, prompt, params, seeds, f"prompt {n}", advance)
    finally:
        speculative.engine.on_verdict = None
    return results + inside.results()


def _count(
    plain: LLM,
    speculative: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    seeds: Sequence[int],
    name: str,
    advance: Callable[[], None],
) -> list[TestResult]:
    """G-tests of the first token, and of the second after the commonest first one."""
    short = replace(params, max_tokens=3, ignore_eos=True, min_tokens=0)
    outputs = _sample(speculative, [prompt] * len(seeds), short, seeds, advance)
    firsts = Counter(output[0] for output in outputs)
    common = firsts.most_common(1)[0][0]
    seconds = Counter(output[1] for output in outputs if output[0] == common and output[1:])
    probs, edges = target_distribution(plain, prompt, [common, common], short)
    results = []
    places = zip(("first", "second"), (firsts, seconds), probs, edges, strict=True)
    for place, counts, row, edge in places:
        inside = {token: n for token, n in counts.items() if not edge[token]}
        if inside:  # a context may leave room for one token only
            results.append(g_test(f"{place} token, {name}", Counter(inside), row))
    return results


def _sample(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seeds: Sequence[int],
    advance: Callable[[], None],
) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        [replace(params, seed=seed) for seed in seeds],
        on_finish=lambda output: advance(),
    )
    return [output.outputs[0].token_ids for output in outputs]


def _ks_gap(uniforms: Sequence[float]) -> float:
    ordered = np.sort(uniforms)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


def _ks(gap: float, count: int) -> float:
    """Kolmogorov's limit distribution with Stephens' correction for finite samples."""
    root = math.sqrt(count)
    x = (root + 0.12 + 0.11 / root) * gap
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)]
    return min(max(sum(terms), 0.0), 1.0) if x > 0.2 else 1.0
