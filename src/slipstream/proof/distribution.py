"""Sampled losslessness: is the text distributed as the target says?

Every test gives a p-value under "nothing changed"; together they raise a false alarm with a
probability of at most ``FALSE_ALARM`` (Bonferroni). The exact proof, by enumeration over small
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
from slipstream.proof.identity import output_context, prompt_ids, target_logits
from slipstream.types import ROOT, Draft, Verdict

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
) -> Tensor:
    """[len(output), V]: what each output token should have been drawn from, plainly computed."""
    tokens = [*prompt, *output[:-1]]
    logits = target_logits(llm.engine, tokens, len(prompt))
    suffixes = [output[:i] for i in range(len(output))]
    context = output_context(llm.engine, prompt, (), suffixes, params)
    return sampling.target_probs(logits, params, context).double()


def surprise_test(
    samples: Sequence[tuple[Sequence[int], Tensor]],
) -> tuple[TestResult, TestResult]:
    """Two looks at sampled outputs, without bins; samples: (token ids [n], distributions [n, V]).

    Σ(-log p(x_t) - H_t) / √ΣVar_t is nearly standard normal; the randomised probability integral
    transform, tokens in order of falling probability, is uniform (Kolmogorov-Smirnov).
    """
    excess, variance = 0.0, 0.0
    uniforms: list[float] = []
    rng = np.random.default_rng(0)
    for tokens, probs in samples:
        chosen = probs.gather(-1, torch.tensor(list(tokens), device=probs.device)[:, None])
        if bool((chosen == 0).any()):  # a token that the target can't emit settles it
            excess = math.inf
            break
        surprise = -probs.log().nan_to_num(neginf=0.0)
        entropy = (probs * surprise).sum(-1)
        excess += float((-chosen.log()[:, 0] - entropy).sum())
        variance += float(((probs * surprise**2).sum(-1) - entropy**2).sum())
        above = (probs * (probs > chosen)).sum(-1)
        draws = torch.from_numpy(rng.random(len(chosen))).to(probs.device)
        uniforms += (above + draws * chosen[:, 0]).tolist()
    count = sum(len(tokens) for tokens, _ in samples)
    z = excess / math.sqrt(variance) if variance else (math.inf if excess else 0.0)
    gap = _ks_gap(uniforms) if excess < math.inf else 1.0
    return (
        TestResult(name="surprise", samples=count, statistic=z, p_value=_two_sided(z)),
        TestResult(name="PIT (KS)", samples=count, statistic=gap, p_value=_ks(gap, count)),
    )


def g_test(name: str, counts: Counter[int], probs: Tensor) -> TestResult:
    """Observed token counts against their distribution [V]; rare tokens are pooled."""
    total = sum(counts.values())
    expected = (probs * total).tolist()
    bins = [(counts[i], e) for i, e in enumerate(expected) if e >= _MIN_EXPECTED]
    rest = total - sum(o for o, _ in bins), total - sum(e for _, e in bins)
    if rest[1] > 1e-6 * total or rest[0]:
        bins.append((rest[0], max(rest[1], 1e-6 * total)))
    g = 2 * sum(o * math.log(o / e) for o, e in bins if o)
    freedom = len(bins) - 1
    p = 1.0
    if freedom:
        half = torch.tensor([freedom / 2, max(g, 0.0) / 2], dtype=torch.float64)
        p = float(torch.special.gammaincc(half[0], half[1]))
    return TestResult(name=name, samples=total, statistic=g, p_value=p)


class AcceptanceTest:
    """Accepted drafts against what their distributions predict; catches a wrong draft_probs.

    A sampled chain's token at a reached position is accepted with 1 - TV(target, draft); a
    deterministic one with the target's probability of it. ``observe`` is an engine's on_verdict.
    Block verification accepts in blocks: there the mean per position isn't this, so not tested.
    """

    def __init__(self) -> None:
        self._tried = 0
        self._excess = 0.0
        self._variance = 0.0

    def observe(self, draft: Draft, target_probs: Tensor, verdict: Verdict) -> None:
        for depth, node in enumerate((ROOT, *verdict.path)):
            children = draft.children(node)
            if not children:
                return
            target = target_probs[node + 1]
            if draft.draft_probs is None:
                chance = float(sum(target[draft.tokens[child]] for child in children))
            else:
                chance = float(torch.minimum(target, draft.draft_probs[children[0]]).sum())
            self._tried += 1
            self._excess += (depth < len(verdict.path)) - chance
            self._variance += max(chance * (1 - chance), 0.0)

    def result(self) -> TestResult:
        # one more than the variance counted: certain outcomes differ from it by rounding alone
        z = self._excess / math.sqrt(self._variance + 1e-3) if self._tried else 0.0
        return TestResult(
            name="acceptance", samples=self._tried, statistic=z, p_value=_two_sided(z)
        )


def sampled_tests(
    plain: LLM,
    speculative: LLM,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    repeats: int,
    advance: Callable[[], None] = lambda: None,
) -> list[TestResult]:
    """Sample with the drafter; test against the target's distributions, plainly computed.

    prompts: each answered once with ``params.max_tokens``; the first prompts again ``repeats``
    times for three tokens, whose first two are counted. advance: called after each answer.
    """
    acceptance = AcceptanceTest()
    block = speculative.engine.config.verification == "block"
    speculative.engine.on_verdict = None if block else acceptance.observe
    samples: list[tuple[list[int], Tensor]] = []
    results: list[TestResult] = []
    try:
        tokenized = [prompt_ids(plain, [{"role": "user", "content": p}]) for p in prompts]
        for seed, prompt in enumerate(tokenized):
            output = _sample(speculative, [prompt], params, [seed], advance)[0]
            samples.append((output, target_distribution(plain, prompt, output, params)))
        results += surprise_test(samples)
        for n, prompt in enumerate(tokenized[:2]):
            results += _count(plain, speculative, prompt, params, repeats, f"prompt {n}", advance)
    finally:
        speculative.engine.on_verdict = None
    return results if block else [*results, acceptance.result()]


def _count(
    plain: LLM,
    speculative: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    repeats: int,
    name: str,
    advance: Callable[[], None],
) -> list[TestResult]:
    """G-tests of the first token, and of the second after the commonest first one."""
    short = replace(params, max_tokens=3, ignore_eos=True, min_tokens=0)
    seeds = range(1000, 1000 + repeats)
    outputs = _sample(speculative, [prompt] * repeats, short, seeds, advance)
    firsts = Counter(output[0] for output in outputs)
    common = firsts.most_common(1)[0][0]
    seconds = Counter(output[1] for output in outputs if output[0] == common)
    probs = target_distribution(plain, prompt, [common, common], short)
    return [
        g_test(f"first token, {name}", firsts, probs[0]),
        g_test(f"second token, {name}", seconds, probs[1]),
    ]


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


def _two_sided(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


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
