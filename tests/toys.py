"""Toy models and drafters: a few tokens, float64, every number a function of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.cache import Cache, LayerShape, TensorKV, TorchCache
from slipstream.drafters import Drafter, Target
from slipstream.engine import Engine, EngineConfig
from slipstream.noise import Noise
from slipstream.request import Request
from slipstream.types import ROOT, Draft, StepOutput, StepRows, chain


class ToyRuntime:
    """A runtime whose logits are random numbers seeded by the path of tokens and positions.

    It knows a request's earlier tokens only from the KV that was committed for them: the key of a
    token is its id, the value its position. A wrong row committed, a wrong parent or a wrong
    position therefore gives other logits. The feature of a token, one number, is its first logit.

    padding: extra columns beyond the vocabulary, with the highest logits of all.
    grid: round the logits to multiples of it, so that ties occur.
    absent: tokens with logit -inf.
    """

    exact = False
    hidden_size = layers = 1

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        *,
        max_length: int = 64,
        padding: int = 0,
        grid: float = 0.0,
        scale: float = 1.5,
        absent: Sequence[int] = (),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.tokens = vocab_size
        self.vocab_size = vocab_size + padding
        self.max_length = max_length
        self.calls: list[list[StepRows]] = []
        self._seed, self._grid, self._scale, self._absent = seed, grid, scale, list(absent)
        self.dtype = dtype
        self._known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def __deepcopy__(self, memo: object) -> ToyRuntime:
        return self  # a pure function

    def new_cache(self, slots: int, max_length: int) -> TorchCache:
        shape = LayerShape(kv_heads=1, key_dim=1, value_dim=1)
        cpu = torch.device("cpu")
        return TorchCache(
            [shape], slots=slots, max_length=max_length, dtype=torch.float64, device=cpu
        )

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Logits after a text, without the padding."""
        return self._row(tuple(zip(tokens, range(len(tokens)), strict=True))).tolist()

    def step(self, batch: Sequence[StepRows], cache: Cache, taps: Sequence[int] = ()) -> StepOutput:
        self.calls.append(list(batch))
        width = max(len(rows.tokens) for rows in batch)
        keys = torch.full((len(batch), 1, width, 1), -1.0, dtype=torch.float64)
        values = keys.clone()
        assert isinstance(cache, TorchCache)
        past_keys, past_values = cache.view([rows.slot for rows in batch])
        logits: list[np.ndarray] = []
        features: list[float] = []
        for b, rows in enumerate(batch):
            length = cache.lengths[rows.slot]
            past = zip(
                past_keys[0][b, 0, :length, 0].long().tolist(),
                past_values[0][b, 0, :length, 0].long().tolist(),
                strict=True,
            )
            root = tuple(past)
            paths: list[tuple[tuple[int, int], ...]] = []
            for row, (token, parent) in enumerate(zip(rows.tokens, rows.parents, strict=True)):
                before = root if parent < 0 else paths[parent]
                paths.append((*before, (token, len(before))))
                keys[b, 0, row, 0], values[b, 0, row, 0] = token, len(before)
            logits += [self._row(paths[row]) for row in rows.logit_rows]
            features += [float(self._row(path)[0]) for path in paths if taps]
        table = np.array(logits).reshape(-1, self.tokens)
        padding = np.full((len(table), self.vocab_size - self.tokens), 99.0)
        full = torch.tensor(np.concatenate([table, padding], 1), dtype=self.dtype)
        tapped = torch.tensor(features, dtype=self.dtype)[:, None, None].expand(-1, len(taps), -1)
        kv = TensorKV(keys=[keys], values=[values])
        return StepOutput(logits=full, new_kv=kv, features=tapped if taps else None)

    def _row(self, path: tuple[tuple[int, int], ...]) -> np.ndarray:
        if path not in self._known:
            flat = [n for pair in path for n in pair]
            row = np.random.default_rng([self._seed, len(path), *flat]).normal(size=self.tokens)
            row *= self._scale
            if self._grid:
                row = np.round(row / self._grid) * self._grid
            row[self._absent] = -np.inf
            self._known[path] = row
        return self._known[path]


class ToyDrafter:
    """A drafter of a fixed tree shape; reads a request's tokens and nothing else.

    parents: the shape; a smaller budget takes its beginning. model: whose logits guess: its most
    probable tokens if ``sampled`` is false, else draws without replacement among siblings, and
    guesses where nothing is left to draw.
    """

    def __init__(self, model: ToyRuntime, parents: Sequence[int], *, sampled: bool) -> None:
        self._model, self._parents, self._sampled = model, list(parents), sampled
        self.released: list[Request] = []

    def release(self, request: Request) -> None:
        self.released.append(request)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(r, self._parents[:b]) for r, b in zip(requests, budgets, strict=True)]

    def _draft(self, request: Request, parents: Sequence[int]) -> Draft:
        tokens: list[int] = []
        probs: list[Tensor] = []
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(parents):
            path = () if parent == ROOT else paths[parent]
            row = torch.tensor(self._model.logits([*request.tokens, *path]), dtype=torch.float64)
            row = row.softmax(-1)
            siblings = [tokens[other] for other in range(node) if parents[other] == parent]
            row[siblings] = 0
            if not row.any():
                row[min(set(range(len(row))) - set(siblings))] = 1
            row /= row.sum()
            if self._sampled:
                position = len(request.tokens) + len(path)
                tokens.append(request.noise.sample_draft(row, position, len(siblings)))
                probs.append(row)
            else:
                tokens.append(int(row.argmax()))
            paths.append((*path, tokens[-1]))
        rows = torch.stack(probs) if probs else None
        return Draft(tokens=tokens, parents=parents, draft_probs=rows)


class ScriptedDrafter:
    """Always drafts the same tokens, cut to the budget."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [chain(self._tokens[:budget]) for budget in budgets]

    def release(self, request: Request) -> None:
        pass


def target_of(vocab_size: int, *, max_num_seqs: int = 4, max_model_len: int = 64) -> Target:
    """What a drafter is told of a toy target."""

    def load(_: str) -> Any:
        raise AssertionError("nothing to load")

    return Target(
        name="toy",
        runtime=ToyRuntime(vocab_size, seed=0),
        tokenizer=None,
        vocab_size=vocab_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        load=load,
    )


def toy_engine(
    runtime: ToyRuntime, drafter: Drafter | None = None, k: int = 0, **config: Any
) -> Engine:
    settings: dict[str, Any] = {
        "vocab_size": runtime.tokens,
        "max_model_len": runtime.max_length,
        "max_num_seqs": 4,
        "num_speculative_tokens": k,
    }
    return Engine(runtime=runtime, config=EngineConfig(**{**settings, **config}), drafter=drafter)


def drain(engine: Engine) -> None:
    """Step until nothing is left, checking the cache all the way."""
    while len(engine.scheduler):
        engine.step()
        engine.cache.check()


def committed(cache: Cache, slot: int) -> list[int]:
    """The tokens whose KV a toy cache holds."""
    assert isinstance(cache, TorchCache)
    return cache.view([slot])[0][0][0, 0, : cache.lengths[slot], 0].long().tolist()


def request_of(tokens: Sequence[int], request_id: int = 0, **params: Any) -> Request:
    """A request outside any engine, all of its tokens prompt."""
    from slipstream.config import SamplingParams

    return Request(
        request_id=request_id,
        prompt_length=len(tokens),
        tokens=list(tokens),
        params=SamplingParams(**params),
        noise=Noise(params.get("seed", 0)),
    )
