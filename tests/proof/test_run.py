"""The whole proof on a tiny model: it passes, and every planted fault makes it fail."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_llm
from torch import Tensor

from slipstream import SamplingParams, cli, engine, verify
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.noise import Noise
from slipstream.proof.distribution import TestResult
from slipstream.proof.identity import Mismatch
from slipstream.proof.run import Proof, prove
from slipstream.request import Request
from slipstream.types import ROOT, Draft, StepOutput, Verdict

PROMPTS = ["the train", "a lighthouse keeper", "in on an", "x"]
K = 2
NGRAM = {"method": "ngram", "num_speculative_tokens": K}
DRAFT = {"method": "draft_model", "model": str(tiny_llm.draft()), "num_speculative_tokens": K}
WAYS = {"ngram": NGRAM, "draft model": DRAFT, "block": DRAFT | {"rejection_sample_method": "block"}}


def proof(
    way: str,
    settings: dict[str, Any],
    prompts: Sequence[str] = PROMPTS[:1],
    k: int = K,
    repeats: int = 150,
) -> Proof:
    """Many requests in flight: most of the time goes into short samples."""
    config = WAYS[way] | {"num_speculative_tokens": k}
    llm = tiny_llm.llm(config, max_num_seqs=32)
    params = SamplingParams(max_tokens=32, **settings)
    return prove(llm, config["method"], prompts, params, repeats=repeats)


@pytest.mark.parametrize("settings", [{"temperature": 1}, {"top_p": 0.9}], ids=["T=1", "top_p"])
@pytest.mark.parametrize("way", WAYS)
def test_the_proof_passes(way: str, settings: dict[str, Any]) -> None:
    found = proof(way, settings, PROMPTS[:3], repeats=40)
    assert found.passed
    assert (found.faults, found.mismatches) == (0, [])
    assert found.prompts == 3
    assert found.tokens == 32 * 3
    assert found.tests


def test_the_sampled_tests_may_be_left_out() -> None:
    params = SamplingParams(max_tokens=8)
    found = prove(tiny_llm.llm(NGRAM), "ngram", PROMPTS[:1], params, repeats=0)
    assert found.tests == []
    assert found.passed


def a_proof(**changes: Any) -> Proof:
    tests = [TestResult(name="t", samples=9, statistic=0.0, p_value=0.5)] * 7
    found = Proof(model="m", method="x", prompts=2, tokens=9, mismatches=[], tests=tests)
    return replace(found, **changes)


def test_the_alarm_levels_add_up_to_the_stated_rate() -> None:
    found = a_proof()
    assert found.passed
    assert found.alarm_below * len(found.tests) == pytest.approx(found.false_alarm)
    just_below = replace(found.tests[0], p_value=0.99 * found.alarm_below)
    assert not replace(found, tests=[*found.tests[1:], just_below]).passed


def test_near_ties_pass_and_faults_do_not() -> None:
    tie = Mismatch(prompt="", position=0, plain_token=1, other_token=2, gap=0.0, kind="near-tie")
    fault = replace(tie, kind="fault", gap=3.0)
    assert a_proof(mismatches=[tie]).passed
    assert not a_proof(mismatches=[tie, fault]).passed


def test_a_p_value_that_is_no_number_does_not_pass() -> None:
    broken = TestResult(name="t", samples=0, statistic=0.0, p_value=float("nan"))
    assert not a_proof(tests=[broken]).passed


# Planted faults. Each is the kind of mistake that gives fluent text.

Plant = Callable[[pytest.MonkeyPatch], None]


def residual_is_the_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "residual", lambda target_probs, draft_probs: target_probs)


def a_wrong_token_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """Greedy: one token more than the target agrees with."""

    def follow(draft: Draft, choose: Callable[[int], int]) -> Verdict:
        verdict = verify.follow(draft, choose)
        children = draft.children(verdict.path[-1] if verdict.path else ROOT)
        if not children:
            return verdict
        path = [*verdict.path, children[0]]
        return Verdict(path=path, next_token=choose(children[0] + 1), origin="recovered")

    patch.setattr(engine, "follow", follow)


def draft_probs_are_raw(patch: pytest.MonkeyPatch) -> None:
    """The drafter draws at the request's temperature and reports the distribution without it."""
    propose = DraftModelDrafter.propose

    def without_temperature(request: Request, draft: Draft) -> Draft:
        if draft.draft_probs is None:
            return draft
        raw = draft.draft_probs**request.params.temperature
        return replace(draft, draft_probs=raw / raw.sum(-1, keepdim=True))

    def reported(
        self: DraftModelDrafter, requests: Sequence[Request], budgets: Sequence[int]
    ) -> list[Draft]:
        drafts = propose(self, requests, budgets)
        return [without_temperature(*pair) for pair in zip(requests, drafts, strict=True)]

    patch.setattr(DraftModelDrafter, "propose", reported)


def _bonus_from(row: Callable[[Draft, Tensor], Tensor]) -> Plant:
    def rejection_sample(
        draft: Draft, target_probs: Tensor, noise: Noise, position: int
    ) -> Verdict:
        verdict = verify.rejection_sample(draft, target_probs, noise, position)
        if verdict.origin != "bonus":
            return verdict
        token = noise.sample(row(draft, target_probs), position + len(verdict.path))
        return replace(verdict, next_token=token)

    return lambda patch: patch.setitem(verify.REJECTION_SAMPLERS, "standard", rejection_sample)


def bonus_from_the_row_before(patch: pytest.MonkeyPatch) -> None:
    _bonus_from(lambda draft, target_probs: target_probs[-2])(patch)


def bonus_from_the_drafter(patch: pytest.MonkeyPatch) -> None:
    def last(draft: Draft, target_probs: Tensor) -> Tensor:
        assert draft.draft_probs is not None
        return draft.draft_probs[-1]

    _bonus_from(last)(patch)


def every_draft_is_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Noise, "accept", lambda self, probability, position, sibling=0: True)


def acceptance_is_never_certain(patch: pytest.MonkeyPatch) -> None:
    """Accept with min(1, p/q) less a fifth: the residual then is no longer the right one."""
    accept = Noise.accept

    def less(self: Noise, probability: float, position: int, sibling: int = 0) -> bool:
        return accept(self, min(probability, 1) - 0.2, position, sibling)

    patch.setattr(Noise, "accept", less)


@pytest.mark.parametrize(
    ("plant", "way", "settings"),
    [
        (residual_is_the_target, "draft model", {}),
        (residual_is_the_target, "block", {}),
        (a_wrong_token_is_accepted, "ngram", {}),
        (a_wrong_token_is_accepted, "draft model", {}),
        (draft_probs_are_raw, "draft model", {"temperature": 0.5}),
        (draft_probs_are_raw, "block", {"temperature": 0.5}),
        (every_draft_is_accepted, "draft model", {}),
        (every_draft_is_accepted, "block", {}),
        (acceptance_is_never_certain, "draft model", {}),
    ],
)
def test_a_planted_fault_fails(
    plant: Plant, way: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert not proof(way, settings).passed


@pytest.mark.parametrize("plant", [bonus_from_the_row_before, bonus_from_the_drafter])
def test_a_bonus_from_another_distribution_fails(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With K = 1 every second token may be a bonus."""
    plant(monkeypatch)
    assert not proof("draft model", {}, PROMPTS[:2], k=1, repeats=80).passed


@pytest.mark.parametrize("way", ["ngram", "draft model"])
@pytest.mark.parametrize(
    "faulty",
    [lambda kept: [*kept[:-2], kept[-1]], lambda kept: [*kept[:-1], kept[-2]]],
    ids=["a row dropped", "a row kept twice"],
)
def test_a_fault_of_the_cache_fails(
    way: str, faulty: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where a draft was accepted: plain decoding, which is compared with, stays right."""
    llm = tiny_llm.llm(WAYS[way])
    commit = llm.engine.cache.commit

    def wrong(output: StepOutput, slots: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        accepted = [1 < len(rows) <= K + 1 for rows in kept]
        rows = [faulty(list(r)) if a else r for r, a in zip(kept, accepted, strict=True)]
        commit(output, slots, rows)

    monkeypatch.setattr(llm.engine.cache, "commit", wrong)
    assert not prove(llm, way, PROMPTS, SamplingParams(max_tokens=80), repeats=0).passed


# The command


@pytest.fixture
def prompts_file(tmp_path: Any) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return str(path)


def verify_command(prompts_file: str, *options: str) -> list[str]:
    model = ["--model", str(tiny_llm.target()), "--prompts", prompts_file]
    return ["verify", *model, "--max-tokens", "24", "--repeats", "40", *options]


def test_the_command_exits_with_0_and_says_so(
    prompts_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = ["--draft-model", str(tiny_llm.draft()), "--num-prompts", "2", "--json"]
    assert cli.main(verify_command(prompts_file, *draft)) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert any("passed: nothing changed" in line for line in shown)
    assert not any("FAULT" in line for line in shown)
    found = json.loads(last)
    assert set(found) == {"model", "method", "greedy", "sampled", "passed"}
    assert (found["model"], found["method"]) == (str(tiny_llm.target()), "draft_model")
    assert found["passed"] is True
    assert found["greedy"] == {"prompts": 2, "identical": 2, "tokens": 48, "mismatches": []}
    assert found["sampled"]["false_alarm"] == 1e-6
    assert found["sampled"]["tests"]
    for test in found["sampled"]["tests"]:
        assert set(test) == {"name", "samples", "statistic", "p_value"}


def test_the_command_exits_with_1_on_a_fault(
    prompts_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_wrong_token_is_accepted(monkeypatch)
    assert cli.main(verify_command(prompts_file, "--greedy-only", "--json")) == 1
    *shown, last = capsys.readouterr().out.splitlines()
    assert any("FAULT: the text changed" in line for line in shown)
    assert any("fault at output token" in line for line in shown)
    found = json.loads(last)
    assert found["passed"] is False
    assert found["sampled"]["tests"] == []
    for mismatch in found["greedy"]["mismatches"]:
        assert mismatch["kind"] == "fault"


def test_the_json_of_a_text_that_ended_sooner_is_json(
    prompts_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gap without an end is no number of JSON's."""
    end = engine.Engine._end

    def sooner(self: engine.Engine, request: Request, tokens: list[int]) -> int:
        if self.drafter is not None and request.output_length >= 5:
            request.finish_reason = "stop"
            return 1
        return end(self, request, tokens)

    monkeypatch.setattr(engine.Engine, "_end", sooner)
    assert cli.main(verify_command(prompts_file, "--greedy-only", "--json")) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    last = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(last, parse_constant=refuse)
    assert found["greedy"]["identical"] == 0


@pytest.mark.model
def test_the_default_model_passes_greedily(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--greedy-only", "--num-prompts", "2", "--max-tokens", "24"]
    assert cli.main(arguments) == 0
    assert "passed: nothing changed" in capsys.readouterr().out


@pytest.mark.model
def test_a_planted_fault_on_the_default_model_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"  # n-gram drafts are often wrong on this one: it bites
    prompts.write_text("Write a Python function that reverses a list, then one for a string.\n")
    a_wrong_token_is_accepted(monkeypatch)
    arguments = ["verify", "--greedy-only", "--prompts", str(prompts), "--max-tokens", "40"]
    assert cli.main(arguments) == 1
    assert "FAULT: the text changed" in capsys.readouterr().out
