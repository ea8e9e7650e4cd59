"""Exact enumeration: the production engine, run once for every outcome of every random choice.

Production code makes each random choice through three methods of ``Noise``. ``Enumerator`` stands
in for it: a choice takes the branch that a script asks for and multiplies its probability. Going
through all scripts gives the exact distribution of the engine's output.

What it is compared with is written here once more, from the definitions, in plain Python.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from toys import ToyRuntime, committed

from slipstream.config import SamplingParams
from slipstream.engine import Engine

Text = tuple[int, ...]
Outcome = tuple[Text, str]  # output tokens, finish reason
Spread = dict[Any, float]  # outcome → probability
TOLERANCE = 1e-12


class Branches:
    """A depth-first walk through all scripts of choices; shared by the requests of an engine."""

    def __init__(self) -> None:
        self._script: list[int] = []
        self._taken: list[tuple[int, int]] = []  # choice, number of possible ones
        self.probability = 1.0

    def __deepcopy__(self, memo: object) -> Branches:
        return self

    def choose(self, weights: Sequence[float]) -> int:
        """An index of positive weight."""
        assert all(w >= 0 for w in weights), weights
        possible = [i for i, w in enumerate(weights) if w > 0]
        place = len(self._taken)
        choice = self._script[place] if place < len(self._script) else 0
        self._taken.append((choice, len(possible)))
        index = possible[choice]
        self.probability *= weights[index] / math.fsum(weights)
        return index

    def all(self) -> Iterator[None]:
        """Yields once for each script; run the code under test in the loop's body."""
        self._script = []
        while True:
            self._taken, self.probability = [], 1.0
            yield
            while self._taken and self._taken[-1][0] + 1 == self._taken[-1][1]:
                self._taken.pop()
            if not self._taken:
                return
            self._script = [choice for choice, _ in self._taken]
            self._script[-1] += 1


class Enumerator:
    """``Noise`` with every outcome instead of one.

    The real noise is a function of its key: a key used twice would be the same draw twice, and
    not the independent one that is counted here. So none may be.
    """

    def __init__(self, branches: Branches) -> None:
        self._branches = branches
        self._used: set[tuple[object, ...]] = set()
        self.step = 0
        self.seed = 0

    def accept(self, probability: float, position: int, sibling: int = 0) -> bool:
        self._once("accept", position, self.step, sibling)
        assert probability >= 0  # false for nan, too
        chance = min(1.0, probability)
        return self._branches.choose([chance, 1 - chance]) == 0

    def sample(self, probs: Tensor, position: int) -> int:
        self._once("target", position)
        return self._branches.choose(probs.tolist())

    def sample_draft(self, probs: Tensor, position: int, sibling: int = 0) -> int:
        self._once("draft", position, self.step, sibling)
        return self._branches.choose(probs.tolist())

    def _once(self, *key: object) -> None:
        assert key not in self._used, f"two draws of one key: {key}"
        self._used.add(key)


Make = Callable[[], Engine]
Prompts = Sequence[tuple[Sequence[int], SamplingParams]]


def start(make: Make, prompts: Prompts, branches: Branches) -> tuple[Engine, list[Any]]:
    engine = make()
    requests = [engine.add(tokens, params) for tokens, params in prompts]
    for request in requests:
        request.noise = Enumerator(branches)  # type: ignore[assignment]
    return engine, requests


def outcome(requests: Sequence[Any]) -> Any:
    """(text, finish reason) of the only request, or a tuple of them."""
    each = tuple((tuple(r.output), r.finish_reason) for r in requests)
    return each[0] if len(each) == 1 else each


def enumerate_output(make: Make, prompts: Prompts) -> Spread:
    """The distribution of what the engine makes of the prompts.

    Step by step: states that agree in every token, and in all KV of target and drafter, are one
    state from then on. ``test_merging`` shows that this changes nothing.
    """
    branches = Branches()
    first = start(make, prompts, branches)
    waiting = {_state(*first): (first, 1.0)}
    done: Spread = defaultdict(float)
    while waiting:
        following: dict[Any, tuple[Any, float]] = {}
        for before, mass in waiting.values():
            for _ in branches.all():
                engine, requests = _copied(*before)
                engine.step()
                engine.cache.check()
                share = mass * branches.probability
                if not len(engine.scheduler):
                    done[outcome(requests)] += share
                    continue
                key = _state(engine, requests)
                known, so_far = following.get(key, ((engine, requests), 0.0))
                following[key] = (known, so_far + share)
        waiting = following
    return dict(done)


def enumerate_without_merging(make: Make, prompts: Prompts) -> Spread:
    """The same from the first step to the last for every script: slower, and assumes nothing."""
    branches = Branches()
    done: Spread = defaultdict(float)
    for _ in branches.all():
        engine, requests = start(make, prompts, branches)
        while len(engine.scheduler):
            engine.step()
        done[outcome(requests)] += branches.probability
    return dict(done)


def _copied(engine: Engine, requests: Sequence[Any]) -> tuple[Engine, list[Any]]:
    """A deep copy, but for what never changes and for counters that nothing reads."""
    shared = [engine.config, engine.metrics, engine.clock]
    shared += [part for request in requests for part in (request.params, request.metrics)]
    return copy.deepcopy((engine, requests), {id(part): part for part in shared})


def _state(engine: Engine, requests: Sequence[Any]) -> Any:
    caches = [engine.cache, getattr(engine.drafter, "_cache", None)]
    kv = [[committed(c, s) for s in range(len(c.lengths))] for c in caches if c is not None]
    each = [(r.tokens, r.finish_reason, r.slot) for r in requests]
    slots = getattr(engine.drafter, "_slots", None)
    return repr((each, kv, slots))


# The reference: nothing below uses the package's own mathematics.


def processed(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
) -> list[float]:
    """The distribution of the next token, by the documented definitions."""
    row = list(logits)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(output) < params.min_tokens:
        for token in stop_ids:
            row[token] = -math.inf
    for token in range(len(row)):
        factor = params.repetition_penalty
        if token in prompt or token in output:
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        count = list(output).count(token)
        row[token] -= params.frequency_penalty * count
        row[token] -= params.presence_penalty if count else 0
    row = [x / params.temperature for x in row]
    probs = _softmax(row)
    if params.min_p > 0:
        bound = params.min_p * max(probs) * (1 - 1e-13)
        probs = _normalised([p if p >= bound else 0.0 for p in probs])
    if 0 < params.top_k < len(probs):
        bound = sorted(probs, reverse=True)[params.top_k - 1] * (1 - 1e-13)
        probs = _normalised([p if p >= bound else 0.0 for p in probs])
    if params.top_p < 1:
        kept, mass = set(), 0.0
        for token in sorted(range(len(probs)), key=lambda t: -probs[t]):
            if mass >= params.top_p:
                break
            kept.add(token)
            mass += probs[token]
        probs = _normalised([p if t in kept else 0.0 for t, p in enumerate(probs)])
    return probs


def _softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    return _normalised([math.exp(x - top) for x in row])


def _normalised(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


def expected_output(
    model: ToyRuntime,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Sequence[int] = (),
    max_model_len: int = 64,
) -> Spread:
    """The distribution that plain decoding, one token at a time, must have."""
    stop_ids = [*(() if params.ignore_eos else eos), *params.stop_token_ids]
    spread: Spread = defaultdict(float)
    waiting: list[tuple[Text, float]] = [((), 1.0)]
    while waiting:
        text, mass = waiting.pop()
        logits = model.logits([*prompt, *text])
        for token, p in enumerate(processed(logits, params, prompt, text, stop_ids)):
            longer = (*text, token)
            full = len(longer) == params.max_tokens or len(prompt) + len(longer) == max_model_len
            if p == 0:
                continue
            if token in stop_ids:
                spread[longer, "stop"] += mass * p
            elif full:
                spread[longer, "length"] += mass * p
            else:
                waiting.append((longer, mass * p))
    return dict(spread)


def product(spreads: Sequence[Spread]) -> Spread:
    """The joint distribution of independent requests."""
    joint: Spread = {(): 1.0}
    for spread in spreads:
        joint = {(*done, item): p * q for done, p in joint.items() for item, q in spread.items()}
    return joint


def first_tokens(spread: Spread) -> Spread:
    first: Spread = defaultdict(float)
    for (text, _), p in spread.items():
        first[text[0]] += p
    return dict(first)


def distance(got: Spread, want: Spread) -> float:
    """The largest difference of a probability, over all outcomes of either side."""
    return max(abs(got.get(key, 0.0) - want.get(key, 0.0)) for key in got.keys() | want.keys())


def gap(make: Make, model: ToyRuntime, prompt: Sequence[int], params: SamplingParams) -> float:
    """How far an engine's output is from the target's distribution: first token, all jointly."""
    engine = make()
    want = expected_output(
        model,
        prompt,
        params,
        eos=engine.config.eos_token_ids,
        max_model_len=engine.config.max_model_len,
    )
    got = enumerate_output(make, [(prompt, params)])
    return max(distance(got, want), distance(first_tokens(got), first_tokens(want)))
