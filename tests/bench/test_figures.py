"""Figures by hand: passes made up, results recomputed."""

import json

import pytest

from slipstream.bench.drive import Answer, Pass
from slipstream.bench.figures import identical, run_figures, speedup, total
from slipstream.metrics import Metrics


def answer(seconds: float, tokens: int, ttft: float | None = 0.5, **more: object) -> Answer:
    given = {"token_ids": list(range(tokens)), **more}
    return Answer(output_tokens=tokens, seconds=seconds, ttft=ttft, **given)  # type: ignore[arg-type]


def a_pass(**answers: Answer) -> Pass:
    """Prompts a, b, c … one at a time."""
    numbered = {ord(name) - ord("a"): found for name, found in answers.items()}
    return Pass(answers=numbered, seconds=0.0, decode_seconds=0.0).only(numbered)


CATEGORIES = {0: "qa", 1: "qa", 2: "math"}


def three(*seconds: float) -> Pass:
    """10, 20 and 30 tokens in so many seconds."""
    a, b, c = (answer(s, n) for s, n in zip(seconds, (10, 20, 30), strict=True))
    return a_pass(a=a, b=b, c=c)


PLAIN = [three(2, 4, 6), three(2, 4, 7), three(3, 4, 8)]  # 12, 13, 15 seconds
OTHER = [three(1, 2, 3), three(2, 4, 4), three(1, 1, 1)]  # 6, 10, 3


def test_rates_come_from_the_median_round() -> None:
    found = run_figures(OTHER, PLAIN, CATEGORIES)
    assert (found["prompts"], found["output_tokens"]) == (3, 60)
    assert found["round_seconds"] == [6, 10, 3]
    assert found["seconds"] == 6
    assert found["tokens_per_second"] == 10
    assert found["decode_tokens_per_second"] == pytest.approx(57 / 4.5, abs=1e-3)
    json.dumps(found, allow_nan=False)


def test_speedup_is_taken_round_by_round() -> None:
    """Not from the two medians, which would be 13 / 6."""
    found = run_figures(OTHER, PLAIN, CATEGORIES)
    assert found["speedup_vs_plain"] == {"median": 2, "min": 1.3, "max": 5}
    assert run_figures(PLAIN, None, CATEGORIES)["speedup_vs_plain"] is None


def test_by_category() -> None:
    found = run_figures(OTHER, PLAIN, CATEGORIES)["by_category"]
    assert list(found) == ["qa", "math"]
    assert (found["qa"]["prompts"], found["qa"]["output_tokens"]) == (2, 30)
    assert found["qa"]["round_seconds"] == [3, 6, 2]
    assert found["qa"]["tokens_per_second"] == 10
    assert found["qa"]["speedup_vs_plain"] == {"median": 2, "min": 1, "max": 3.5}
    assert found["math"]["speedup_vs_plain"] == {"median": 2, "min": 1.75, "max": 8}


def test_one_category_in_flight_together_is_compared_like_with_like() -> None:
    """By category both sides count what requests saw, and not the clock of one of them."""

    def together(seconds: float) -> Pass:
        answers = {n: answer(seconds, 10) for n in range(2)}
        return Pass(answers=answers, seconds=seconds, decode_seconds=seconds)

    found = run_figures([together(2)], [together(4)], {0: "qa", 1: "qa"})
    assert found["seconds"] == 2
    assert found["speedup_vs_plain"]["median"] == 2
    assert found["by_category"]["qa"]["seconds"] == 4
    assert found["by_category"]["qa"]["speedup_vs_plain"]["median"] == 2


def test_texts_of_different_length_are_compared_by_the_token() -> None:
    plain, other = [a_pass(a=answer(4, 40))], [a_pass(a=answer(4, 20))]
    assert speedup(plain, other) == {"median": 0.5, "min": 0.5, "max": 0.5}


def test_only_what_both_answered_is_compared() -> None:
    plain = [a_pass(a=answer(4, 10), b=answer(90, 10))]
    peer = [a_pass(a=answer(2, 10))]
    assert speedup(plain, peer) == {"median": 2, "min": 2, "max": 2}
    assert speedup(plain, [a_pass()]) is None


def test_a_side_that_answered_nothing_has_no_rates() -> None:
    found = run_figures([a_pass()], [a_pass(a=answer(1, 5))], CATEGORIES)
    assert (found["prompts"], found["output_tokens"], found["by_category"]) == (0, 0, {})
    for name in ("tokens_per_second", "decode_tokens_per_second", "ttft_ms", "speedup_vs_plain"):
        assert found[name] is None


def test_a_prompt_missing_in_one_round_counts_in_none() -> None:
    rounds = [a_pass(a=answer(1, 5), b=answer(2, 5)), a_pass(a=answer(3, 5))]
    found = run_figures(rounds, None, CATEGORIES)
    assert (found["prompts"], found["round_seconds"]) == (1, [1, 3])


def test_latencies_are_percentiles_over_all_rounds() -> None:
    rounds = [
        a_pass(a=answer(9, 4, ttft=0.1, gaps=[0.01] * 9), b=answer(9, 4, ttft=0.2)),
        a_pass(a=answer(9, 4, ttft=0.3, gaps=[0.03]), b=answer(9, 4, ttft=0.5)),
    ]
    found = run_figures(rounds, None, CATEGORIES)
    assert found["ttft_ms"] == {"p50": 250, "p95": pytest.approx(470)}
    assert found["itl_ms"] == {"p50": 10, "p95": pytest.approx(10 + 20 * 0.55, abs=0.01)}
    assert run_figures([a_pass(a=answer(1, 4, None))], None, CATEGORIES)["ttft_ms"] is None


def test_acceptance_adds_up_over_requests() -> None:
    a = Metrics(steps=4, emitted=8, drafted=6, accepted=4, tried_at=[4, 2], accepted_at=[3, 1])
    b = Metrics(steps=1, emitted=1, drafted=1, accepted=0, tried_at=[1], accepted_at=[0])
    whole = total([a, b])
    assert whole == Metrics(
        steps=5, emitted=9, drafted=7, accepted=4, tried_at=[5, 2], accepted_at=[3, 1]
    )
    found = run_figures(
        [a_pass(a=answer(1, 8, metrics=a), b=answer(1, 1, metrics=b))], None, CATEGORIES
    )
    assert found["mean_tokens_per_step"] == 1.8
    assert found["acceptance_by_position"] == [0.6, 0.5]
    unknown = run_figures([a_pass(a=answer(1, 8))], None, CATEGORIES)
    assert unknown["mean_tokens_per_step"] is unknown["acceptance_by_position"] is None


def test_identical_texts_are_counted_in_the_worst_round() -> None:
    same, other = answer(1, 3), answer(1, 3, token_ids=[7, 7, 7])
    plain = [a_pass(a=same, b=same)] * 2
    assert identical(plain, [a_pass(a=same, b=same)] * 2) == 2
    assert identical(plain, [a_pass(a=same, b=same), a_pass(a=same, b=other)]) == 1
    assert identical(plain, [a_pass(a=same, b=answer(1, 3, token_ids=None))] * 2) is None
