"""The statistical tests against distributions that are known: quiet if right, loud if wrong."""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
import tiny_llm
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream import SamplingParams, SlipstreamError
from slipstream.proof import distribution
from slipstream.proof.distribution import (
    AcceptanceTest,
    TestResult,
    g_test,
    sampled_tests,
    surprise_test,
    target_distribution,
)
from slipstream.types import Draft, Verdict, chain

ALARM = distribution.FALSE_ALARM
VOCAB = 12


def distributions(count: int, seed: int = 0, sharpness: float = 1.5) -> Tensor:
    """[count, VOCAB]"""
    logits = np.random.default_rng(seed).normal(size=(count, VOCAB)) * sharpness
    return torch.from_numpy(logits).softmax(-1)


def draws(probs: Tensor, seed: int = 1) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(rng.choice(len(row), p=row / row.sum())) for row in probs.numpy()]


def p_values(results: Sequence[TestResult]) -> list[float]:
    return [result.p_value for result in results]


# Counts


def test_counts_of_the_right_distribution_are_quiet() -> None:
    probs = distributions(1)[0]
    counts = Counter(draws(probs.expand(3000, -1)))
    result = g_test("x", counts, probs)
    assert result.samples == 3000
    assert result.p_value > 1e-3


def test_counts_of_another_distribution_are_loud() -> None:
    probs = distributions(2)
    counts = Counter(draws(probs[0].expand(600, -1)))
    assert g_test("x", counts, probs[1]).p_value < ALARM
    slightly = 0.85 * probs[0] + 0.15 * probs[1]
    many = Counter(draws(probs[0].expand(6000, -1)))
    assert g_test("x", many, slightly).p_value < ALARM


def test_the_g_statistic_is_the_textbook_one() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    counts = Counter({0: 40, 1: 45, 2: 15})
    expected = scipy.stats.power_divergence([40, 45, 15], [50, 30, 20], lambda_="log-likelihood")
    result = g_test("x", counts, probs)
    assert result.statistic == pytest.approx(expected.statistic)
    assert result.p_value == pytest.approx(expected.pvalue)


def test_p_values_of_counts_are_spread_evenly() -> None:
    """The chance of a p-value below 0.1 is about 0.1: the test is neither deaf nor jumpy."""
    probs = distributions(1)[0]
    rng = np.random.default_rng(7)
    found = [
        g_test("x", Counter(dict(enumerate(rng.multinomial(400, probs)))), probs).p_value
        for _ in range(400)
    ]
    assert 0.05 < np.mean(np.array(found) < 0.1) < 0.16


def test_a_token_that_cannot_occur_is_loud_even_once() -> None:
    probs = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert g_test("x", Counter({0: 50, 1: 49, 2: 1}), probs).p_value < ALARM


def test_rare_tokens_are_pooled_not_dropped() -> None:
    probs = torch.full((1000,), 0.5 / 999, dtype=torch.float64)
    probs[0] = 0.5
    rare = Counter({0: 50} | {i: 1 for i in range(1, 51)})
    assert g_test("x", rare, probs).p_value > 0.5
    assert g_test("x", Counter({0: 95} | {i: 1 for i in range(1, 6)}), probs).p_value < ALARM


def test_a_certain_token_passes_and_any_other_fails() -> None:
    probs = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert g_test("x", Counter({0: 100}), probs).p_value == 1
    assert g_test("x", Counter({0: 99, 1: 1}), probs).p_value < ALARM


# Surprise and the probability integral transform


def test_samples_of_the_right_distributions_are_quiet() -> None:
    probs = distributions(2000)
    samples = [(draws(part, seed=n), part) for n, part in enumerate(probs.split(100))]
    assert min(p_values(surprise_test(samples))) > 1e-3


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_samples_at_another_temperature_are_loud(temperature: float) -> None:
    probs = distributions(2000)
    other = (probs.log() / temperature).softmax(-1)
    surprise, transform = surprise_test([(draws(other), probs)])
    assert surprise.p_value < ALARM
    assert transform.p_value < ALARM
    assert (surprise.statistic > 0) == (temperature > 1)


def test_samples_of_the_neighbour_are_loud() -> None:
    """Row n drawn from the distribution of row n + 1: the fault of a shifted index."""
    probs = distributions(500)
    assert max(p_values(surprise_test([(draws(probs.roll(-1, 0)), probs)]))) < ALARM


def test_a_missing_tail_is_heard_by_the_transform() -> None:
    probs = distributions(3000)
    kept = probs.masked_fill(probs < probs.topk(3).values[:, -1:], 0)
    cut = kept / kept.sum(-1, keepdim=True)
    assert surprise_test([(draws(cut), probs)])[1].p_value < ALARM


def test_one_impossible_token_settles_it() -> None:
    probs = distributions(50)
    tokens = draws(probs)
    probs[7, tokens[7]] = 0
    for result in surprise_test([(tokens, probs)]):
        assert result.p_value < ALARM
        assert result.samples == 50


def test_certain_tokens_are_no_surprise() -> None:
    probs = torch.eye(VOCAB, dtype=torch.float64)
    for result in surprise_test([(list(range(VOCAB)), probs)] * 10):
        assert result.p_value > 1e-3


def test_the_p_value_of_kolmogorov_and_smirnov_is_the_textbook_one() -> None:
    rng = np.random.default_rng(3)
    for count in (50, 400):
        uniforms = rng.random(count)
        for values in (uniforms, uniforms**1.3):
            expected = scipy.stats.kstest(values, "uniform")
            gap = distribution._ks_gap(values.tolist())
            assert gap == pytest.approx(expected.statistic)
            assert distribution._ks(gap, count) == pytest.approx(expected.pvalue, abs=0.02)


def test_the_p_value_of_a_normal_statistic_is_the_textbook_one() -> None:
    for z in (0.0, 1.0, -2.5, 6.0):
        assert distribution._two_sided(z) == pytest.approx(2 * scipy.stats.norm.sf(abs(z)))


# Acceptance


def accepted(draft: Draft, target: Tensor, share: float, count: int = 400) -> TestResult:
    test = AcceptanceTest()
    for n in range(count):
        path = [0] if n < share * count else []
        test.observe(draft, target, Verdict(path=path, next_token=0, origin="recovered"))
    return test.result()


def test_a_sampled_draft_is_accepted_with_the_mass_in_common() -> None:
    target, draft_probs = distributions(2)[:, None]
    draft = chain([0], draft_probs)
    target = torch.cat([target, target])
    share = float(torch.minimum(target[:1], draft_probs).sum())
    assert accepted(draft, target, share).p_value > 0.5
    assert accepted(draft, target, share - 0.2).p_value < ALARM
    assert accepted(draft, target, min(share + 0.2, 1)).p_value < ALARM


def test_a_deterministic_draft_is_accepted_with_its_probability() -> None:
    target = torch.tensor([[0.3, 0.7], [0.5, 0.5]], dtype=torch.float64)
    assert accepted(chain([0]), target, 0.3).p_value > 0.5
    assert accepted(chain([0]), target, 0.5).p_value < ALARM


def test_only_positions_that_were_reached_count() -> None:
    test = AcceptanceTest()
    target = torch.full((4, 2), 0.5, dtype=torch.float64)
    for path in ([], [0], [0, 1], [0, 1, 2]):
        verdict = Verdict(path=path, next_token=0, origin="recovered")
        test.observe(chain([0, 0, 0]), target, verdict)
    assert test.result().samples == 1 + 2 + 3 + 3


def test_nothing_drafted_says_nothing() -> None:
    test = AcceptanceTest()
    target = torch.full((1, 2), 0.5, dtype=torch.float64)
    test.observe(Draft(), target, Verdict(path=[], next_token=0, origin="plain"))
    assert (test.result().samples, test.result().p_value) == (0, 1)


# On a model


def test_the_target_distribution_is_that_of_transformers() -> None:
    llm = tiny_llm.llm()
    prompt, output = llm.tokenizer.encode("the train"), llm.tokenizer.encode("in on")
    params = SamplingParams(temperature=0.7)
    probs = target_distribution(llm, prompt, output, params)
    assert probs.shape == (len(output), llm.model.vocab_size)
    tokens = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tiny_llm.target())
        reference = model(tokens).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(probs, (reference / 0.7).softmax(-1).double(), atol=1e-5, rtol=1e-3)


def test_penalties_follow_each_output_token() -> None:
    llm = tiny_llm.llm()
    prompt, output = [70, 71], [80, 80, 81]
    params = SamplingParams(frequency_penalty=2.0)
    plain = target_distribution(llm, prompt, output, SamplingParams()).log()
    shift = target_distribution(llm, prompt, output, params).log() - plain
    relative = shift[:, 80] - shift[:, 90]  # the normaliser cancels
    assert relative.tolist() == pytest.approx([0, -2, -4], abs=1e-4)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_what_is_tested(verification: str) -> None:
    llm = tiny_llm.with_draft(num_speculative_tokens=2, verification=verification)
    calls: list[None] = []
    results = sampled_tests(
        tiny_llm.llm(),
        llm,
        ["the", "in", "x"],
        SamplingParams(max_tokens=8),
        repeats=20,
        advance=lambda: calls.append(None),
    )
    counted = [f"{which} token, prompt {n}" for n in (0, 1) for which in ("first", "second")]
    expected = ["surprise", "PIT (KS)", *counted]
    # in blocks a single position is not accepted with the mass in common
    expected += ["acceptance"] * (verification == "rejection")
    assert [result.name for result in results] == expected
    assert results[0].samples == 24
    assert results[2].samples == 20
    assert len(calls) == 3 + 2 * 20
    assert llm.engine.on_verdict is None
    assert all(math.isfinite(result.statistic) for result in results)


def test_a_prompt_that_leaves_room_for_one_token_is_tested_or_refused() -> None:
    prompt = "x" * 10
    length = len(tiny_llm.llm().chat_tokens([{"role": "user", "content": prompt}]))
    llm = tiny_llm.llm({"method": "ngram"}, max_model_len=length + 1)
    plain = llm.with_speculation(None)
    with contextlib.suppress(SlipstreamError):
        results = sampled_tests(plain, llm, [prompt], SamplingParams(max_tokens=8), repeats=5)
        assert all(result.p_value > ALARM for result in results)
