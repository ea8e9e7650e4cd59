"""The decode loop on toy models: what a request gets does not depend on how it was computed."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lossless.enumeration import processed
from toys import (
    ScriptedDrafter,
    ToyDrafter,
    ToyRuntime,
    committed,
    drain,
    target_of,
    toy_engine,
)

from slipstream import sampling
from slipstream.config import SamplingParams
from slipstream.drafters import Drafter
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.engine import Engine
from slipstream.errors import SlipstreamError
from slipstream.request import Request
from slipstream.types import ROOT

VOCAB = 6
PROMPTS = [[0, 1, 2, 0, 1], [3], [4, 4, 4, 1, 0, 2, 5, 1, 3], [2, 2]]
TARGET = ToyRuntime(VOCAB, seed=1)
OTHER = ToyRuntime(VOCAB, seed=2)


def draft_model(model: ToyRuntime, sampled: bool = True) -> DraftModelDrafter:
    return DraftModelDrafter(model, target_of(VOCAB, max_num_seqs=4), sampled=sampled)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "ngram": lambda: NgramDrafter(1, 3),
    "chain": lambda: ToyDrafter(OTHER, [ROOT, 0, 1, 2], sampled=False),
    "tree": lambda: ToyDrafter(OTHER, [ROOT, ROOT, 0, 1], sampled=False),
    "greedy draft model": lambda: draft_model(OTHER, sampled=False),
    "draft model": lambda: draft_model(OTHER),
    "sampled tree": lambda: ToyDrafter(OTHER, [ROOT, ROOT, 0, 1], sampled=True),
}
DETERMINISTIC = ["ngram", "chain", "tree", "greedy draft model"]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "processed": {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.2, "min_tokens": 3},
}


def run(
    drafter: Drafter | None, prompts: list[list[int]], k: int = 4, config: Any = None, **params: Any
) -> tuple[list[list[int]], Engine]:
    engine = toy_engine(TARGET, drafter, k if drafter else 0, **(config or {}))
    requests = [
        engine.add(prompt, SamplingParams(**{"max_tokens": 12, "seed": 9, **params}))
        for prompt in prompts
    ]
    drain(engine)
    return [request.output for request in requests], engine


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_is_the_same_alone_and_among_neighbours(name: str, kind: str) -> None:
    together, _ = run(DRAFTERS[name](), PROMPTS, **PARAMS[kind])
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert run(DRAFTERS[name](), [prompt], **PARAMS[kind])[0] == [text]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_waiting_for_a_slot_changes_no_text(name: str, slots: int) -> None:
    want, _ = run(DRAFTERS[name](), PROMPTS)
    assert run(DRAFTERS[name](), PROMPTS, config={"max_num_seqs": slots})[0] == want


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("name", DRAFTERS)
def test_prefill_chunks_of_any_size_give_the_same_text(name: str, chunk: int) -> None:
    want, _ = run(DRAFTERS[name](), PROMPTS)
    assert run(DRAFTERS[name](), PROMPTS, config={"prefill_chunk": chunk})[0] == want


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("k", [1, 2, 7])
def test_a_deterministic_draft_gives_the_text_of_plain_decoding(
    name: str, kind: str, k: int
) -> None:
    """At T=1 too: with the same seed the text is the same with any drafter, any K, or none."""
    plain, _ = run(None, PROMPTS, **PARAMS[kind])
    assert run(DRAFTERS[name](), PROMPTS, k, **PARAMS[kind])[0] == plain


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_that_of_plain_decoding(name: str) -> None:
    plain, _ = run(None, PROMPTS, temperature=0, max_tokens=30)
    assert run(DRAFTERS[name](), PROMPTS, temperature=0, max_tokens=30)[0] == plain


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_seed_repeats_its_text_and_another_gives_another(name: str) -> None:
    assert run(DRAFTERS[name](), PROMPTS)[0] == run(DRAFTERS[name](), PROMPTS)[0]
    assert run(DRAFTERS[name](), PROMPTS)[0] != run(DRAFTERS[name](), PROMPTS, seed=10)[0]


@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize(("temperature", "sampled"), [(0, True), (0, False), (1, True)])
def test_the_target_as_its_own_draft_model_is_always_right(
    temperature: float, sampled: bool, verification: str
) -> None:
    """Acceptance 1 and τ = K + 1; sampling, only if the guesses are sampled too."""
    _, engine = run(
        draft_model(TARGET, sampled),
        PROMPTS,
        3,
        {"rejection_sample_method": verification},
        temperature=temperature,
        max_tokens=12,
    )
    assert engine.metrics.acceptance_rate == 1
    assert engine.metrics.mean_tokens_per_step == 4
    assert engine.metrics.acceptance_by_position == [1, 1, 1]


def test_a_step_takes_known_tokens_and_the_draft() -> None:
    """A last prefill chunk already carries a draft; its logits are asked for the newest on."""
    engine = toy_engine(TARGET, ScriptedDrafter([1, 2]), 2, prefill_chunk=3)
    TARGET.calls.clear()
    engine.add([0, 1, 2, 3, 4], SamplingParams(max_tokens=9))
    assert engine.step() == []
    assert len(engine.step()) == 1
    (first,), (second,) = TARGET.calls
    assert (list(first.tokens), list(first.logit_rows)) == ([0, 1, 2], [])
    assert (list(second.tokens), list(second.logit_rows)) == ([3, 4, 1, 2], [1, 2, 3])
    assert list(second.parents) == [-1, 0, 1, 2]


def test_the_cache_lags_behind_by_the_newest_token() -> None:
    for name in DRAFTERS:
        engine = toy_engine(TARGET, DRAFTERS[name](), 4)
        request = engine.add(PROMPTS[0], SamplingParams(max_tokens=20, seed=3))
        while len(engine.scheduler):
            engine.step()
            if request.slot is not None:
                assert committed(engine.cache, request.slot) == request.tokens[:-1]


class Failing:
    """Fails on its n-th call, as a machine out of memory or a bug would."""

    def __init__(self, what: Any, name: str, call: int) -> None:
        self._what, self._name, self._call = what, name, call
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._what, name)
        if name != self._name:
            return attribute

        def failing(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self._call:
                raise MemoryError("planted")
            return attribute(*args, **kwargs)

        return failing


def snapshot(engine: Engine, requests: list[Request]) -> Any:
    each = [(list(r.tokens), list(r.origins), r.noise.step, r.finish_reason) for r in requests]
    slots = [committed(engine.cache, s) for s in range(len(engine.cache.lengths))]
    return each, slots, engine.metrics.as_dict()


@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize("place", ["runtime", "drafter", "draft runtime"])
@pytest.mark.parametrize("name", ["chain", "tree", "draft model"])
def test_an_error_leaves_everything_as_it_was_and_a_retry_works(
    name: str, place: str, call: int
) -> None:
    want, _ = run(DRAFTERS[name](), PROMPTS, temperature=0.9)
    drafter: Any = DRAFTERS[name]()
    runtime: Any = TARGET
    if place == "runtime":
        runtime = Failing(TARGET, "step", call)
    elif place == "drafter":
        drafter = Failing(drafter, "propose", call)
    elif name != "draft model":
        return
    else:
        drafter._runtime = Failing(drafter._runtime, "step", call)
    engine = toy_engine(runtime, drafter, 4)
    requests = [
        engine.add(p, SamplingParams(max_tokens=12, seed=9, temperature=0.9)) for p in PROMPTS
    ]
    failures = 0
    while len(engine.scheduler):
        engine.scheduler.schedule()  # admits who waits, so that the snapshot has their slots
        before = snapshot(engine, requests)
        try:
            engine.step()
        except MemoryError:
            failures += 1
            engine.cache.check()
            assert snapshot(engine, requests) == before
    assert failures == 1
    assert [r.output for r in requests] == want


@pytest.mark.parametrize("name", ["none", "chain", "draft model"])
@pytest.mark.parametrize("function", ["target_probs", "logprobs_of"])
def test_an_error_in_the_mathematics_leaves_everything_as_it_was(
    function: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory runs out for a large vocabulary: no request may be left half done."""
    want, _ = run(DRAFTERS[name](), PROMPTS, logprobs=1)
    engine = toy_engine(TARGET, DRAFTERS[name](), 4)
    requests = [engine.add(p, SamplingParams(max_tokens=12, seed=9, logprobs=1)) for p in PROMPTS]
    for _ in range(5):
        engine.step()
    before = snapshot(engine, requests)
    planted = Failing(sampling, function, call=2)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, function, getattr(planted, function))
        with pytest.raises(MemoryError):
            engine.step()
    assert snapshot(engine, requests) == before
    drain(engine)
    assert [r.output for r in requests] == want


@pytest.mark.parametrize("name", DRAFTERS)
def test_abort_frees_the_slot_and_keeps_the_text(name: str) -> None:
    want, _ = run(DRAFTERS[name](), PROMPTS)
    engine = toy_engine(TARGET, DRAFTERS[name](), 4, max_num_seqs=2)
    requests = [engine.add(p, SamplingParams(max_tokens=12, seed=9)) for p in PROMPTS]
    for _ in range(3):
        engine.step()
    running, waiting = requests[1], requests[3]
    engine.abort(running)
    engine.abort(waiting)
    engine.abort(running)  # twice is once
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert running.slot is None
    assert waiting.output == []
    assert engine.cache.free_slots == 1
    drain(engine)
    assert engine.cache.free_slots == 2
    assert running.output == want[1][: len(running.output)]
    assert [requests[i].output for i in (0, 2)] == [want[i] for i in (0, 2)]
    drafter = engine.drafter
    if isinstance(drafter, DraftModelDrafter):
        assert drafter._slots == {}
        assert drafter._cache.free_slots == 4


def test_abort_after_the_end_keeps_the_reason() -> None:
    engine = toy_engine(TARGET)
    request = engine.add([1], SamplingParams(max_tokens=1))
    drain(engine)
    engine.abort(request)
    assert request.finish_reason == "length"


def test_stop_cuts_the_text_and_frees_the_slot() -> None:
    engine = toy_engine(TARGET)
    request = engine.add([1], SamplingParams(max_tokens=9, logprobs=1))
    for _ in range(4):
        engine.step()
    text = request.output
    engine.stop(request, 2, "end")
    assert request.output == text[:2]
    assert len(request.origins) == len(request.logprobs) == 2
    assert (request.finish_reason, request.stop_reason) == ("stop", "end")
    assert engine.cache.free_slots == 4
    assert not len(engine.scheduler)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_no_token_is_drafted_that_can_not_be_emitted(max_tokens: int) -> None:
    """The target as its own draft model is always accepted: every draft is used in full."""
    for temperature in (0, 1):
        texts, engine = run(
            draft_model(TARGET), PROMPTS, 4, temperature=temperature, max_tokens=max_tokens
        )
        assert [len(text) for text in texts] == [max_tokens] * 4
        assert engine.metrics.accepted == engine.metrics.drafted
        assert engine.metrics.steps == 4 * math.ceil(max_tokens / 5)
        assert engine.metrics.emitted == 4 * max_tokens


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 6, 11])
def test_the_text_ends_where_the_context_ends(room: int) -> None:
    for name in DRAFTERS:
        config = {"max_model_len": len(PROMPTS[2]) + room}
        engine = toy_engine(TARGET, DRAFTERS[name](), 4, **config)
        request = engine.add(PROMPTS[2], SamplingParams(max_tokens=None, seed=1))
        drain(engine)
        assert len(request.output) == room
        assert request.finish_reason == "length"


def test_end_of_sequence_and_stop_tokens_end_the_text_and_are_part_of_it() -> None:
    """Whether the token is a draft's or not; what was accepted after it is cut."""
    for name in DRAFTERS:
        for seed in range(6):
            params: dict[str, Any] = {"seed": seed, "max_tokens": 30, "stop_token_ids": [4]}
            engine = toy_engine(TARGET, DRAFTERS[name](), 4, eos_token_ids=[2])
            request = engine.add(PROMPTS[0], SamplingParams(**params, logprobs=0))
            drain(engine)
            ends = [i for i, token in enumerate(request.output) if token in (2, 4)]
            assert ends in ([], [len(request.output) - 1])
            assert len(request.logprobs) == len(request.origins) == len(request.output)
            if ends:
                assert request.finish_reason == "stop"
                assert request.stop_reason == (4 if request.output[-1] == 4 else None)
            else:
                assert request.finish_reason == "length"
                assert request.stop_reason is None


def test_ignore_eos_goes_on() -> None:
    engine = toy_engine(TARGET, eos_token_ids=range(VOCAB))
    a = engine.add([1], SamplingParams(max_tokens=5))
    b = engine.add([1], SamplingParams(max_tokens=5, ignore_eos=True))
    drain(engine)
    assert (len(a.output), a.finish_reason) == (1, "stop")
    assert (len(b.output), b.finish_reason) == (5, "length")


def test_padding_of_the_matrices_is_never_chosen() -> None:
    """The toy gives the columns beyond the vocabulary by far the highest logits."""
    padded = ToyRuntime(VOCAB, seed=1, padding=3)
    for temperature in (0, 1):
        for drafter in (None, DraftModelDrafter(padded, target_of(VOCAB), sampled=True)):
            engine = toy_engine(padded, drafter, 3)
            request = engine.add([1], SamplingParams(temperature=temperature, max_tokens=20))
            drain(engine)
            assert max(request.output) < VOCAB


BAD_PROMPTS: list[tuple[list[int], str]] = [
    ([], "empty"),
    ([1] * 10, "10 tokens.*context.*10"),
    ([1] * 11, "11 tokens"),
    ([1, VOCAB], "ids outside"),
    ([-1], "ids outside"),
    ([1.5], "ids"),  # type: ignore[list-item]
    (["a"], "ids"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=lambda x: str(x))
def test_a_bad_prompt_is_named(prompt: list[int], message: str) -> None:
    engine = toy_engine(TARGET, max_model_len=10)
    with pytest.raises(SlipstreamError, match=message):
        engine.add(prompt, SamplingParams())
    assert not len(engine.scheduler)
    engine.add([1] * 9, SamplingParams())  # one token of room is enough


@pytest.mark.parametrize(
    "params", [{"stop_token_ids": [VOCAB]}, {"logit_bias": {VOCAB: 1}}, {"logprobs": VOCAB + 1}]
)
def test_parameters_beyond_the_vocabulary_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(SlipstreamError, match="vocabulary"):
        toy_engine(TARGET).add([1], SamplingParams(**params))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_logprobs(name: str, mode: str) -> None:
    """Of every token emitted, drafted or not: raw, or of the distribution it was drawn from."""
    params = SamplingParams(
        temperature=0.7, top_k=4, frequency_penalty=0.4, logprobs=2, max_tokens=9, seed=5
    )
    engine = toy_engine(TARGET, DRAFTERS[name](), 4, logprobs_mode=mode)
    request = engine.add(PROMPTS[0], params)
    drain(engine)
    for i, (token, entries) in enumerate(zip(request.output, request.logprobs, strict=True)):
        prompt, output = PROMPTS[0], request.output[:i]
        logits = TARGET.logits([*prompt, *output])
        raw = torch.tensor(logits, dtype=torch.float64).softmax(-1).tolist()
        drawn_from = processed(logits, params, prompt, output, ())
        probs = raw if mode == "raw_logprobs" else drawn_from
        best = sorted(range(VOCAB), key=lambda t, p=probs: -p[t])
        assert list(entries)[:2] == best[:2]
        assert set(entries) == {*best[:2], token}
        for id_, entry in entries.items():
            assert math.exp(entry.logprob) == pytest.approx(probs[id_])
            assert entry.rank == best.index(id_) + 1


def test_no_logprobs_unless_asked_for() -> None:
    engine = toy_engine(TARGET)
    request = engine.add([1], SamplingParams())
    drain(engine)
    assert request.logprobs == []


def test_origins_tell_where_a_token_came_from() -> None:
    plain = toy_engine(TARGET).add([1], SamplingParams())
    assert plain.origins == []
    engine = toy_engine(TARGET, draft_model(TARGET), 2)
    request = engine.add(PROMPTS[0], SamplingParams(max_tokens=7))
    drain(engine)
    assert request.origins == [*["accepted", "accepted", "bonus"] * 2, "plain"]


def test_a_drafter_that_returns_nothing_is_plain_decoding() -> None:
    want, _ = run(None, PROMPTS)
    got, engine = run(ScriptedDrafter([]), PROMPTS)
    assert got == want
    assert engine.metrics.mean_tokens_per_step == 1
    assert engine.metrics.drafted == 0


def test_drafts_for_different_budgets_in_one_step() -> None:
    """Requests that end at different times draft different lengths in the same step."""
    engine = toy_engine(TARGET, draft_model(TARGET), 4)
    lengths = [1, 2, 3, 12]
    requests = [
        engine.add(p, SamplingParams(max_tokens=n, temperature=0))
        for p, n in zip(PROMPTS, lengths, strict=True)
    ]
    drain(engine)
    assert [len(r.output) for r in requests] == lengths


def test_nothing_to_do_is_no_step() -> None:
    engine = toy_engine(TARGET)
    assert engine.step() == []


def test_every_request_is_released_by_the_drafter_once() -> None:
    drafter = ToyDrafter(OTHER, [ROOT], sampled=False)
    engine = toy_engine(TARGET, drafter, 1)
    requests = [engine.add(p, SamplingParams(max_tokens=3)) for p in PROMPTS]
    drain(engine)
    assert sorted(r.request_id for r in drafter.released) == [r.request_id for r in requests]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = toy_engine(TARGET)
    request = engine.add([1, 2], SamplingParams())
    step = ToyRuntime.step

    def broken(self: ToyRuntime, *args: Any) -> Any:
        output = step(self, *args)
        output.logits[0, 1] = value
        return output

    monkeypatch.setattr(ToyRuntime, "step", broken)
    with pytest.raises(SlipstreamError, match="not numbers"):
        engine.step()
    assert request.output == []
