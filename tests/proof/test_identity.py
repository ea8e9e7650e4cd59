"""Greedy identity: rounding and faults are told apart."""

from collections.abc import Sequence

import pytest
import tiny_llm
import torch

from slipstream import LLM, SamplingParams
from slipstream.proof import identity
from slipstream.proof.identity import Mismatch, compare_tokens, greedy_identity, target_logits

GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPT = tiny_llm.tokenizer_of().encode("the train")
PROMPTS = ["the train", "in", "a lighthouse keeper"]


def classified(
    plain: Sequence[int], other: Sequence[int], params: SamplingParams = GREEDY
) -> Mismatch | None:
    return compare_tokens(tiny_llm.llm(runtime="torch"), PROMPT, plain, other, params)


def greedy_tokens(params: SamplingParams = GREEDY) -> list[int]:
    output = tiny_llm.llm().generate({"prompt_token_ids": PROMPT}, params)[0]
    return output.outputs[0].token_ids


def test_equal_tokens_are_no_mismatch() -> None:
    assert classified([4, 5, 6], (4, 5, 6)) is None


def test_the_first_difference_is_found_and_measured() -> None:
    tokens = greedy_tokens()
    other = [*tokens[:5], 3, 3, *tokens[7:]]
    found = classified(tokens, other)
    row = target_logits(tiny_llm.llm().engine, [*PROMPT, *tokens[:5]], len(PROMPT) + 5)[0]
    assert found is not None
    assert (found.position, found.plain_token, found.other_token) == (5, tokens[5], 3)
    assert found.gap == pytest.approx(float(row[tokens[5]] - row[3]), abs=1e-5)
    assert found.prompt == "the train"


@pytest.mark.parametrize(("share", "kind"), [(0.9, "near-tie"), (1.1, "fault"), (-1.1, "fault")])
def test_a_gap_that_rounding_explains_is_a_near_tie(share: float, kind: str) -> None:
    """A bias brings another token as near to the best one as it takes."""
    tokens = greedy_tokens()
    row = target_logits(tiny_llm.llm().engine, PROMPT, len(PROMPT))[0]
    wanted = share * identity.NEAR_TIE[torch.float32]
    other = int(row.argmin())
    bias = float(row[tokens[0]] - row[other]) - wanted
    params = SamplingParams(temperature=0, logit_bias={other: bias})
    found = classified(tokens, [other, *tokens[1:]], params)
    assert found is not None
    assert found.kind == kind
    assert found.gap == pytest.approx(wanted, abs=1e-5)


def test_an_exact_runtime_has_no_near_ties() -> None:
    tokens = greedy_tokens()
    row = target_logits(tiny_llm.llm().engine, PROMPT, len(PROMPT))[0]
    other = int(row.argmin())
    params = SamplingParams(temperature=0, logit_bias={other: float(row[tokens[0]] - row[other])})
    llm = tiny_llm.llm()
    assert llm.model.runtime.exact
    found = compare_tokens(llm, PROMPT, tokens, [other, *tokens[1:]], params)
    assert found is not None
    assert (found.kind, found.gap) == ("fault", pytest.approx(0, abs=1e-5))


@pytest.mark.parametrize("cut", [0, 3])
def test_a_text_that_ends_sooner_is_a_fault(cut: int) -> None:
    tokens = greedy_tokens()
    for plain, other in ((tokens, tokens[:cut]), (tokens[:cut], tokens)):
        found = classified(plain, other)
        assert found is not None
        assert (found.position, found.kind, found.gap) == (cut, "fault", float("inf"))
        assert None in (found.plain_token, found.other_token)


def test_the_tolerance_lies_between_rounding_and_any_gap_of_a_fault() -> None:
    assert identity.NEAR_TIE[torch.float64] < identity.NEAR_TIE[torch.float32] <= 1e-3
    assert max(identity.NEAR_TIE.values()) <= 0.25


def test_logits_are_the_same_for_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_llm.llm().engine
    tokens = [*PROMPT, *greedy_tokens()]
    whole = target_logits(engine, tokens, 4)
    assert whole.shape == (len(tokens) - 3, tiny_llm.llm().model.vocab_size)
    for chunk in (1, 4, 7):
        monkeypatch.setattr(identity, "_CHUNK", chunk)
        torch.testing.assert_close(target_logits(engine, tokens, 4), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("verification", ["standard", "block"])
def test_speculation_is_identical_on_every_prompt(verification: str) -> None:
    calls: list[None] = []
    llm = tiny_llm.with_draft(num_speculative_tokens=3, rejection_sample_method=verification)
    tokens, mismatches = greedy_identity(
        tiny_llm.llm(), llm, PROMPTS, 24, advance=lambda: calls.append(None)
    )
    assert (tokens, mismatches, len(calls)) == (24 * len(PROMPTS), [], len(PROMPTS))
    assert llm.engine.metrics.accepted > 0


def test_another_model_is_a_fault() -> None:
    other = LLM(str(tiny_llm.draft()))
    _, mismatches = greedy_identity(tiny_llm.llm(), other, PROMPTS, 24)
    assert mismatches
    assert {found.kind for found in mismatches} == {"fault"}


def test_a_model_without_a_template_gets_the_bare_prompt() -> None:
    llm = LLM(str(tiny_llm.without_template()))
    assert identity.prompt_ids(llm, [{"role": "user", "content": "the train"}]) == PROMPT
    assert len(identity.prompt_ids(tiny_llm.llm(), [{"role": "user", "content": "the"}])) > 5
