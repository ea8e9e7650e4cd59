"""Six classic ways to be wrong, planted in the production code: the gate must see each of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lossless import cases
from lossless.enumeration import TOLERANCE, gap
from torch import Tensor
from toys import ToyRuntime

from slipstream import sampling, verify
from slipstream.cache import Cache
from slipstream.config import SamplingParams
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.types import Draft, Verdict, chain

CLEAR = 1e-3  # a mutant must be further off than that: no matter of rounding
Patch = pytest.MonkeyPatch


def measure(combination: str, processors: str, k: int = 2) -> float:
    target = ToyRuntime(cases.VOCAB, seed=2)
    params = cases.params(processors, max_tokens=k + 1)
    return gap(partial(cases.engine, combination, target, k), target, cases.PROMPT, params)


def raw_draft_distribution(patch: Patch) -> None:
    """The draft is drawn from the processed distribution, the raw one is reported."""
    guess = DraftModelDrafter._guess

    def mutant(self: Any, request: Any, logits: Tensor, guesses: Any, probs: list[Tensor]) -> None:
        guess(self, request, logits, guesses, probs)
        probs[-1] = logits.softmax(-1)

    patch.setattr(DraftModelDrafter, "_guess", mutant)


def no_residual(patch: Patch) -> None:
    """After a rejection the next token comes from the target's whole distribution."""
    patch.setattr(verify, "residual", lambda target_probs, draft_probs: target_probs)


def unprocessed_bonus(patch: Patch) -> None:
    """The row after the whole draft, or the last one asked for, skips the processors."""
    processed = sampling.target_probs

    def mutant(logits: Tensor, params: SamplingParams, context: sampling.Context) -> Tensor:
        probs = processed(logits, params, context)
        if context.suffixes[-1]:  # else plain decoding, or the first row of a draft
            probs[-1] = logits[-1].softmax(-1)
        return probs

    patch.setattr(sampling, "target_probs", mutant)


class StopAtFirstFailure:
    """Noise for which nothing passes any more once something has failed."""

    def __init__(self, noise: Any) -> None:
        self._noise, self._open = noise, True

    def accept(self, probability: float, position: int, sibling: int = 0) -> bool:
        self._open = self._open and self._noise.accept(probability, position, sibling)
        return self._open

    def sample(self, probs: Tensor, position: int) -> int:
        return self._noise.sample(probs, position)


def contiguous_stop(patch: Patch) -> None:
    """Block verification takes the tokens before the first failure, not the largest success."""

    def mutant(draft: Draft, target_probs: Tensor, noise: Any, position: int) -> Verdict:
        return verify.block_verify(draft, target_probs, StopAtFirstFailure(noise), position)  # type: ignore[arg-type]

    patch.setitem(verify.REJECTION_SAMPLERS, "block", mutant)


def discard_after_sampling(patch: Patch) -> None:
    """The drafter looks at the probability of what it has drawn, and drops what is unlikely."""
    propose = DraftModelDrafter.propose

    def kept(draft: Draft) -> Draft:
        for i, token in enumerate(draft.tokens):
            if draft.draft_probs is not None and draft.draft_probs[i, token] < 0.4:
                return chain(draft.tokens[:i], draft.draft_probs[:i])
        return draft

    def mutant(self: Any, requests: Any, budgets: Sequence[int]) -> list[Draft]:
        return [kept(draft) for draft in propose(self, requests, budgets)]

    patch.setattr(DraftModelDrafter, "propose", mutant)


def typical_acceptance(patch: Patch) -> None:
    """Medusa's rule: accept what is probable enough for the target, whatever drew it."""

    def mutant(draft: Draft, target_probs: Tensor, noise: Any, position: int) -> Verdict:
        length = 0
        for row, token in zip(target_probs, draft.tokens, strict=False):
            entropy = torch.special.entr(row).sum()
            if not row[token] > min(0.3, 0.5 * torch.exp(-entropy)):
                break
            length += 1
        token = noise.sample(target_probs[length], position + length)
        return Verdict(path=range(length), next_token=token, origin="bonus")

    patch.setitem(verify.REJECTION_SAMPLERS, "standard", mutant)


def penalties_blind_to_the_draft(patch: Patch) -> None:
    """Penalties count the emitted tokens only, not the drafted ones on a node's path."""
    init = sampling.Context.__init__

    def mutant(self: Any, *, suffixes: Sequence[Any], **rest: Any) -> None:
        init(self, suffixes=[()] * len(suffixes), **rest)

    patch.setattr(sampling.Context, "__init__", mutant)


def sibling_stays_in_the_draft_distribution(patch: Patch) -> None:
    """Siblings drawn without replacement, verified as if drawn with."""
    rejection = verify.rejection_sample

    def mutant(draft: Draft, target_probs: Tensor, noise: Any, position: int) -> Verdict:
        assert draft.draft_probs is not None
        first = {parent: node for node, parent in reversed(list(enumerate(draft.parents)))}
        rows = draft.draft_probs[[first[parent] for parent in draft.parents]]
        same = Draft(tokens=draft.tokens, parents=draft.parents, draft_probs=rows)
        return rejection(same, target_probs, noise, position)

    patch.setitem(verify.REJECTION_SAMPLERS, "standard", mutant)


def wrong_row_committed(patch: Patch) -> None:
    """The cache takes a step's first rows instead of those on the accepted path."""
    commit = Cache.commit

    def mutant(self: Cache, output: Any, slots: Any, kept: Sequence[Sequence[int]]) -> None:
        commit(self, output, slots, [range(len(rows)) for rows in kept])

    patch.setattr(Cache, "commit", mutant)


MUTANTS = [
    (raw_draft_distribution, "draft model, rejection", "cold"),
    (raw_draft_distribution, "draft model, rejection", "top-p"),
    (raw_draft_distribution, "draft model, block", "all"),
    (no_residual, "draft model, rejection", "plain"),
    (no_residual, "draft model, block", "plain"),
    (no_residual, "two siblings, rejection", "plain"),
    (unprocessed_bonus, "draft model, rejection", "all"),
    (unprocessed_bonus, "itself, block", "top-k"),
    (unprocessed_bonus, "ngram, follow", "all"),
    (contiguous_stop, "draft model, block", "plain"),
    (discard_after_sampling, "draft model, rejection", "plain"),
    (discard_after_sampling, "draft model, block", "plain"),
    (typical_acceptance, "draft model, rejection", "plain"),
    (typical_acceptance, "draft model, rejection", "all"),
    (penalties_blind_to_the_draft, "toy chain, follow", "frequency"),
    (sibling_stays_in_the_draft_distribution, "two siblings, rejection", "plain"),
    (wrong_row_committed, "toy tree, follow", "plain"),
    (wrong_row_committed, "two siblings, rejection", "plain"),
]


@pytest.mark.parametrize(
    ("mutant", "combination", "processors"), MUTANTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_the_gate_sees_the_mutant(
    mutant: Any, combination: str, processors: str, monkeypatch: Patch
) -> None:
    assert measure(combination, processors) < TOLERANCE
    mutant(monkeypatch)
    assert measure(combination, processors) > CLEAR


@pytest.mark.parametrize("processors", ["plain", "all"])
def test_the_gate_sees_that_typical_acceptance_is_lossy(
    processors: str, monkeypatch: Patch
) -> None:
    """No mutant, but what its name and its notice say."""
    make, _ = cases.COMBINATIONS["medusa, follow"]
    monkeypatch.setitem(cases.COMBINATIONS, "medusa, typical", (make, "typical"))
    assert measure("medusa, follow", processors) < TOLERANCE
    assert measure("medusa, typical", processors) > CLEAR
