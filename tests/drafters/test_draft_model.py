from typing import Any

import pytest
import tiny_llm
import torch
from toys import ToyRuntime, committed, drain, request_of, target_of, toy_engine

from slipstream import sampling
from slipstream.config import SamplingParams
from slipstream.drafters import Target
from slipstream.drafters import draft_model as module
from slipstream.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from slipstream.errors import SlipstreamError
from slipstream.request import Request
from slipstream.runtimes import native

VOCAB = 5
MODEL = ToyRuntime(VOCAB, seed=3)


def drafter(model: ToyRuntime = MODEL, *, sampled: bool = True, **target: Any) -> DraftModelDrafter:
    return DraftModelDrafter(model, target_of(VOCAB, **target), sampled=sampled)


def lengths(drafter: DraftModelDrafter, requests: list[Request]) -> list[int]:
    return [drafter._cache.lengths[drafter._slots[r.request_id]] for r in requests]


def test_greedy_guesses_are_the_most_probable_tokens() -> None:
    request = request_of([1, 2, 3])
    (draft,) = drafter(sampled=False).propose([request], [4])
    text = [1, 2, 3]
    for token in draft.tokens:
        row = MODEL.logits(text)
        assert token == row.index(max(row))
        text.append(token)
    assert draft.is_chain
    assert draft.draft_probs is None


def test_greedy_requests_get_deterministic_drafts() -> None:
    (draft,) = drafter(sampled=True).propose([request_of([1], temperature=0)], [3])
    assert draft.draft_probs is None


def test_reports_the_distribution_that_the_guesses_were_drawn_from() -> None:
    """After the processors, along the guesses: what a request's own parameters make of it."""
    params: dict[str, Any] = {"temperature": 0.6, "top_k": 3, "frequency_penalty": 1.0}
    request = request_of([1, 2, 3], seed=4, **params)
    (draft,) = drafter().propose([request], [4])
    assert draft.draft_probs is not None
    for i, row in enumerate(draft.draft_probs):
        logits = torch.tensor([MODEL.logits([1, 2, 3, *draft.tokens[:i]])], dtype=torch.float64)
        context = sampling.Context(
            prompt=[1, 2, 3], output=[], suffixes=[draft.tokens[:i]], stop_ids=()
        )
        want = sampling.target_probs(logits, request.params, context)[0]
        torch.testing.assert_close(row, want, atol=1e-15, rtol=0)
        assert draft.tokens[i] == request.noise.sample_draft(row, 3 + i)


@pytest.mark.parametrize("sampled", [True, False])
def test_commits_known_tokens_but_the_newest_and_never_a_guess(sampled: bool) -> None:
    d = drafter(sampled=sampled)
    requests = [request_of([1, 2, 3, 4], 0), request_of([2], 1), request_of([0, 0], 2)]
    for _ in range(3):
        d.propose(requests, [3, 1, 4])
        assert lengths(d, requests) == [len(r.tokens) - 1 for r in requests]
        for request in requests:
            assert committed(d._cache, d._slots[request.request_id]) == request.tokens[:-1]
            request.tokens += [4, 1]
        d._cache.check()


@pytest.mark.parametrize("sampled", [True, False])
def test_proposing_twice_gives_the_same(sampled: bool) -> None:
    d = drafter(sampled=sampled)
    requests = [request_of([1, 2, 3], 0, seed=1), request_of([4], 1, seed=2)]
    first, second = (d.propose(requests, [4, 2]) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert list(a.tokens) == list(b.tokens)
        assert (a.draft_probs is None) == (b.draft_probs is None)
        if a.draft_probs is not None and b.draft_probs is not None:
            assert torch.equal(a.draft_probs, b.draft_probs)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_draft_does_not_depend_on_its_neighbours(sampled: bool) -> None:
    texts = [[1, 2, 3], [4], [0, 0, 2, 2]]
    together = drafter(sampled=sampled).propose(
        [request_of(t, i, seed=7) for i, t in enumerate(texts)], [2, 0, 4]
    )
    for text, budget, draft in zip(texts, [2, 0, 4], together, strict=True):
        (alone,) = drafter(sampled=sampled).propose([request_of(text, 0, seed=7)], [budget])
        assert list(alone.tokens) == list(draft.tokens)
        assert len(draft) == budget


@pytest.mark.skipif(native.MISSING is not None, reason=str(native.MISSING))
def test_one_native_call_guesses_what_single_steps_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and distributions, to the last bit, over several turns, with neighbours that can't go
    along in the call."""
    model = tiny_llm.llm().model
    target = target_of(model.vocab_size)
    sampling_params: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 1.3},
    ]
    prompts = [[40, 41, 42], [50], [60, 61], [70, 40, 40]]
    budgets = [4, 1, 3, 2]

    def drafts(one_call: bool) -> list[Any]:
        d = DraftModelDrafter(model.runtime, target, sampled=True)
        if not one_call:
            monkeypatch.setattr(d, "_in_one_call", lambda request: False)
        requests = [
            request_of(p, i, seed=i, **params)
            for i, (p, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]
        made: list[Any] = []
        for turn in range(3):
            for draft in d.propose(requests, budgets[turn:] + budgets[:turn]):
                made.append((list(draft.tokens), draft.draft_probs))
            for request in requests:
                request.tokens += [45 + turn, 50]
            d._cache.check()
        return made

    for (tokens, probs), (want_tokens, want_probs) in zip(drafts(True), drafts(False), strict=True):
        assert tokens == want_tokens
        assert (probs is None) == (want_probs is None)
        assert probs is None or torch.equal(probs, want_probs)


def test_budget_zero_costs_nothing() -> None:
    model = ToyRuntime(VOCAB, seed=3)
    d = drafter(model)
    drafts = d.propose([request_of([1, 2], 0), request_of([1], 1)], [0, 0])
    assert [len(draft) for draft in drafts] == [0, 0]
    assert model.calls == []


def test_a_request_may_skip_steps() -> None:
    """Without a budget for a while, then with one: what was missed is read in one go."""
    d = drafter(sampled=False)
    request = request_of([1, 2], 0)
    d.propose([request], [2])
    request.tokens += [3, 4, 0]
    d.propose([request, request_of([1], 1)], [0, 1])
    request.tokens += [2]
    (draft,) = d.propose([request], [2])
    (fresh,) = drafter(sampled=False).propose([request_of(request.tokens)], [2])
    assert list(draft.tokens) == list(fresh.tokens)


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    want = drafter().propose([request_of([1, 2, 3, 4, 0, 1, 2], seed=1)], [3])
    monkeypatch.setattr(module, "_CHUNK", 2)
    model = ToyRuntime(VOCAB, seed=3)
    got = drafter(model).propose([request_of([1, 2, 3, 4, 0, 1, 2], seed=1)], [3])
    assert list(got[0].tokens) == list(want[0].tokens)
    assert [len(rows.tokens) for (rows,) in model.calls] == [2, 2, 2, 1, 2, 3]


@pytest.mark.parametrize("context", [6, 7, 8, 9])
def test_a_context_shorter_than_the_targets(context: int) -> None:
    """Where the draft model's context ends, so do its drafts; the target goes on."""
    model = ToyRuntime(VOCAB, seed=3, max_length=context)
    target = ToyRuntime(VOCAB, seed=1)
    for temperature in (0, 1):
        engine = toy_engine(target, drafter(model), 3, max_model_len=20)
        request = engine.add([1, 2, 3], SamplingParams(max_tokens=None, temperature=temperature))
        drain(engine)
        assert len(request.tokens) == 20
        assert request.metrics.drafted > 0
    (draft,) = drafter(model).propose([request_of([1] * (context + 3))], [3])
    assert len(draft) == 0


def test_release_frees_the_slot_and_may_be_repeated() -> None:
    d = drafter(max_num_seqs=1)
    a, b = request_of([1, 2], 0), request_of([3], 1)
    d.propose([a], [2])
    d.release(a)
    d.release(a)
    d.release(request_of([1], 99))  # never seen
    (draft,) = d.propose([b], [2])
    assert len(draft) == 2
    assert lengths(d, [b]) == [0]


class Tokenizer:
    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: id_ for id_, token in enumerate(self._tokens)}


def build(tokenizer: Tokenizer, width: int, target_tokenizer: Tokenizer) -> DraftModelDrafter:
    target = Target(
        name="the-target",
        runtime=ToyRuntime(width),
        tokenizer=target_tokenizer,
        vocab_size=len(target_tokenizer.get_vocab()),
        max_num_seqs=2,
        max_model_len=32,
        load=lambda name: (ToyRuntime(width), tokenizer),
    )
    return DraftModelConfig(model="the-draft").build(target)


OURS = Tokenizer("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Tokenizer("a", "b", "x", "d"), "the-draft.*token 2 is 'c'.*'x'"),
        (Tokenizer("a", "c", "b", "d"), "token 1 is 'b'.*'c'"),
        (Tokenizer("a", "b", "c"), "token 3 is 'd'.*None"),
        (Tokenizer("a", "b", "c", "d", "e"), "token 4 is None.*'e'"),
    ],
)
def test_another_tokenizer_is_named_with_the_first_difference(
    theirs: Tokenizer, message: str
) -> None:
    with pytest.raises(SlipstreamError, match=message):
        build(theirs, 4, OURS)


@pytest.mark.parametrize("width", [4, 5, 64])
def test_matrices_padded_to_another_size_are_fine(width: int) -> None:
    (draft,) = build(OURS, width, OURS).propose([request_of([1, 2])], [3])
    assert max(draft.tokens) < 4
    assert draft.draft_probs is not None
    assert draft.draft_probs.shape == (3, 4)


def test_fewer_embeddings_than_tokens_is_an_incomplete_checkpoint() -> None:
    with pytest.raises(SlipstreamError, match=r"3 embeddings.*4 tokens"):
        build(OURS, 3, OURS)
