"""The statistical tests against distributions that are known: quiet if right, loud if wrong."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import scipy.stats
import tiny_llm
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream import SamplingParams, SlipstreamError
from slipstream.noise import Noise
from slipstream.proof import distribution
from slipstream.proof.distribution import (
    TestResult,
    VerdictTests,
    g_test,
    output_tests,
    sampled_tests,
    target_distribution,
)
from slipstream.proof.martingale import EventBets, TokenBets
from slipstream.types import Draft, Verdict, chain
from slipstream.verify import block_verify, rejection_sample

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
    rare = Counter({0: 50} | dict.fromkeys(range(1, 51), 1))
    assert g_test("x", rare, probs).p_value > 0.5
    assert g_test("x", Counter({0: 95} | dict.fromkeys(range(1, 6), 1)), probs).p_value < ALARM


def test_a_certain_token_passes_and_any_other_fails() -> None:
    probs = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert g_test("x", Counter({0: 100}), probs).p_value == 1
    assert g_test("x", Counter({0: 99, 1: 1}), probs).p_value < ALARM


# Surprise and the probability integral transform


def test_samples_of_the_right_distributions_are_quiet() -> None:
    probs = distributions(2000)
    samples = [(draws(part, seed=n), part) for n, part in enumerate(probs.split(100))]
    assert min(p_values(output_tests(samples))) > 1e-3


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_samples_at_another_temperature_are_loud(temperature: float) -> None:
    probs = distributions(2000)
    other = (probs.log() / temperature).softmax(-1)
    surprise, transform = output_tests([(draws(other), probs)])
    assert surprise.p_value < ALARM
    assert transform.p_value < ALARM
    assert (surprise.statistic > 0) == (temperature > 1)


def test_samples_of_the_neighbour_are_loud() -> None:
    """Row n drawn from the distribution of row n + 1: the fault of a shifted index."""
    probs = distributions(500)
    assert max(p_values(output_tests([(draws(probs.roll(-1, 0)), probs)]))) < ALARM


def test_a_missing_tail_is_heard_by_the_transform() -> None:
    probs = distributions(3000)
    kept = probs.masked_fill(probs < probs.topk(3).values[:, -1:], 0)
    cut = kept / kept.sum(-1, keepdim=True)
    assert output_tests([(draws(cut), probs)])[1].p_value < ALARM


def test_one_impossible_token_settles_it() -> None:
    probs = distributions(50)
    tokens = draws(probs)
    probs[7, tokens[7]] = 0
    surprise, transform = output_tests([(tokens, probs)])
    assert surprise.p_value == 0
    assert surprise.samples == transform.samples == 50


def test_tokens_of_equal_probability_are_quiet() -> None:
    """Logits of few bits tie often: which of the equals is taken must not matter."""
    probs = torch.full((400, VOCAB), 1 / VOCAB, dtype=torch.float64)
    assert min(p_values(output_tests([(draws(probs), probs)]))) > 1e-3
    coarse = (distributions(2000).log() * 2).round().softmax(-1)
    assert min(p_values(output_tests([(draws(coarse), coarse)]))) > 1e-3


def test_certain_tokens_are_no_surprise() -> None:
    probs = torch.eye(VOCAB, dtype=torch.float64)
    for result in output_tests([(list(range(VOCAB)), probs)] * 10):
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


# Inside verification

Verifier = Callable[[Draft, Tensor, Noise, int], Verdict]


def verdicts(
    verifier: Verifier = rejection_sample,
    *,
    verification: str = "standard",
    drawn_from: Tensor | None = None,
    said: Callable[[Tensor], Tensor] = lambda draft_probs: draft_probs,
    count: int = 400,
) -> dict[str, float]:
    """p-values after ``count`` chains of two guesses.

    drawn_from: the distributions [2, V] of the guesses, if not those of the drafter. said: what
    the drafter reports of its distributions.
    """
    rows = distributions(5, seed=4)
    target, draft_probs = rows[:3], rows[3:]
    tests = VerdictTests(verification)
    for seed in range(count):
        noise = Noise(seed)
        source = draft_probs if drawn_from is None else drawn_from
        tokens = [noise.sample_draft(row, at) for at, row in enumerate(source)]
        draft = chain(tokens, said(draft_probs))
        tests.observe(draft, target, verifier(draft, target, noise, 0))
    return {result.name: result.p_value for result in tests.results()}


def test_right_verdicts_are_quiet() -> None:
    found = verdicts()
    assert list(found) == ["draft tokens", "acceptance", "acceptance coin", "next token"]
    assert min(found.values()) > 1e-3
    found = verdicts(block_verify, verification="block")
    assert list(found) == ["draft tokens", "next token"]
    assert min(found.values()) > 1e-3


def test_guesses_from_elsewhere_are_heard() -> None:
    assert verdicts(drawn_from=distributions(2, seed=9))["draft tokens"] < ALARM


def test_a_wrongly_reported_draft_distribution_is_heard() -> None:
    found = verdicts(said=lambda draft_probs: (draft_probs.log() * 2).softmax(-1))
    assert found["draft tokens"] < ALARM


def _generous(draft: Draft, target: Tensor, noise: Noise, position: int) -> Verdict:
    verdict = rejection_sample(draft, target, noise, position)
    return verdict if verdict.path else Verdict(path=[0], next_token=0, origin="recovered")


def test_too_many_accepted_are_heard() -> None:
    found = verdicts(_generous)
    assert found["acceptance"] < ALARM
    assert found["acceptance coin"] < ALARM


def _next_from(row: Callable[[Draft, Tensor, int], Tensor]) -> Verifier:
    def verifier(draft: Draft, target: Tensor, noise: Noise, position: int) -> Verdict:
        verdict = rejection_sample(draft, target, noise, position)
        at = len(verdict.path)
        token = noise.sample(row(draft, target, at), position + at)
        return Verdict(path=verdict.path, next_token=token, origin=verdict.origin)

    return verifier


def test_a_next_token_from_another_distribution_is_heard() -> None:
    plain_target = _next_from(lambda draft, target, at: target[at])
    assert verdicts(plain_target)["next token"] < ALARM
    row_before = _next_from(lambda draft, target, at: target[max(at - 1, 0)])
    assert verdicts(row_before)["next token"] < ALARM


def test_a_deterministic_draft_is_accepted_with_its_probability() -> None:
    target = torch.tensor([[0.3, 0.7], [0.5, 0.5]], dtype=torch.float64)

    def accepted(share: float) -> dict[str, float]:
        tests = VerdictTests("standard")
        for n in range(400):
            path, token = ([0], n % 2) if n < share * 400 else ([], 1)
            tests.observe(chain([0]), target, Verdict(path=path, next_token=token, origin="bonus"))
        return {result.name: result.p_value for result in tests.results()}

    assert min(accepted(0.3).values()) > 1e-3
    assert accepted(0.5)["acceptance"] < ALARM
    assert accepted(0.1)["acceptance"] < ALARM


def test_a_rejected_token_cannot_be_the_recovered_one_of_a_deterministic_draft() -> None:
    tests = VerdictTests("standard")
    target = torch.tensor([[0.3, 0.7], [0.5, 0.5]], dtype=torch.float64)
    tests.observe(chain([0]), target, Verdict(path=[], next_token=0, origin="recovered"))
    assert {result.name: result.p_value for result in tests.results()}["next token"] == 0


def test_only_positions_that_were_reached_count() -> None:
    tests = VerdictTests("standard")
    target = torch.full((4, 2), 0.5, dtype=torch.float64)
    for path in ([], [0], [0, 1], [0, 1, 2]):
        verdict = Verdict(path=path, next_token=1, origin="recovered")
        tests.observe(chain([0, 0, 0]), target, verdict)
    samples = {result.name: result.samples for result in tests.results()}
    assert samples["acceptance"] == 1 + 2 + 3 + 3


def test_nothing_drafted_is_tested_as_plain_decoding() -> None:
    tests = VerdictTests("standard")
    target = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    tests.observe(Draft(), target, Verdict(path=[], next_token=0, origin="plain"))
    (result,) = tests.results()
    assert (result.name, result.samples, result.p_value) == ("next token", 1, 1)
    tests.observe(Draft(), target, Verdict(path=[], next_token=1, origin="plain"))
    assert tests.results()[0].p_value == 0


# Bets


def test_the_chance_of_a_false_alarm_is_what_the_p_value_says() -> None:
    """Among 1000 honest series at most about one in twenty may reach p = 0.05."""
    probs = distributions(1000 * 20, seed=6).view(1000, 20, VOCAB)
    alarms = 0
    for n, rows in enumerate(probs):
        bets = TokenBets()
        for row, token in zip(rows, draws(rows, seed=n), strict=True):
            bets.add(row, token)
        alarms += bets.p_value <= 0.05
    assert alarms <= 70


def test_the_statistic_of_token_bets_is_nearly_standard_normal() -> None:
    probs = distributions(2000)
    bets = TokenBets()
    for row, token in zip(probs, draws(probs), strict=True):
        bets.add(row, token)
    assert bets.count == 2000
    assert abs(bets.statistic) < 4


def test_event_bets_hear_a_chance_that_is_off() -> None:
    rng = np.random.default_rng(1)
    right, wrong = EventBets(), EventBets()
    for chance in rng.random(600):
        right.add(bool(rng.random() < chance), chance)
        wrong.add(bool(rng.random() < 0.7 * chance), chance)
    assert right.p_value > 1e-3
    assert wrong.p_value < ALARM


def test_no_evidence_is_a_p_value_of_one() -> None:
    assert TokenBets().p_value == EventBets().p_value == 1


# On a model


def test_the_target_distribution_is_that_of_transformers() -> None:
    llm = tiny_llm.llm()
    prompt, output = llm.tokenizer.encode("the train"), llm.tokenizer.encode("in on")
    params = SamplingParams(temperature=0.7)
    probs, edges = target_distribution(llm, prompt, output, params)
    assert not edges.any()
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
    plain = target_distribution(llm, prompt, output, SamplingParams())[0].log()
    shift = target_distribution(llm, prompt, output, params)[0].log() - plain
    relative = shift[:, 80] - shift[:, 90]  # the normaliser cancels
    assert relative.tolist() == pytest.approx([0, -2, -4], abs=1e-4)


@pytest.mark.parametrize("verification", ["standard", "block"])
def test_what_is_tested(verification: str) -> None:
    llm = tiny_llm.with_draft(num_speculative_tokens=2, rejection_sample_method=verification)
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
    inside = ["draft tokens", "acceptance", "acceptance coin", "next token"]
    if verification == "block":  # in blocks a single position is accepted with another chance
        inside = ["draft tokens", "next token"]
    assert [result.name for result in results] == ["surprise", "PIT (KS)", *counted, *inside]
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
