"""EAGLE-3 heads in the native step: torch's numbers up to rounding, the same bits in any company,
and trees in one call as step by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache as remember
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tiny_heads import CONFIG, random_head
from torch import Tensor

from slipstream.config import RuntimeConfig, SamplingParams
from slipstream.drafters.expand import Expanded, TreeRows, TreeShape, expand_by_steps
from slipstream.extension import native as extension
from slipstream.models.adapter import ATTENTION
from slipstream.models.eagle3 import Eagle3Config, Eagle3Weights
from slipstream.models.eagle3_module import Eagle3Module
from slipstream.models.weights import Blocks
from slipstream.runtimes import native
from slipstream.runtimes.native_head import NativeHead
from slipstream.types import ROOT, StepRows, chain_rows

pytestmark = pytest.mark.skipif(native.MISSING is not None, reason=str(native.MISSING))
HEAD = dataclasses.replace(
    CONFIG, hidden=64, target_hidden=64, dim=24, inner=96, vocab=tiny_models.VOCAB, draft_vocab=40
)  # queries of another width than the hidden state
NARROW = dataclasses.replace(HEAD, hidden=32)  # brings its own embedding
PRECISIONS = ["none", "int8", "int4"]


@remember
def target(threads: int = 1, kernels: str = "", kv: str = "auto") -> native.NativeRuntime:
    model = tiny_models.build(tiny_models.config("llama"), ATTENTION)
    options = RuntimeConfig(dtype="float32", threads=threads, kv_cache_dtype=kv)
    blocks = Blocks(None, "llama")
    return native.NativeRuntime(model.config, model.state_dict(), blocks, options, kernels)


@remember
def target_embedding() -> Tensor:
    model = tiny_models.build(tiny_models.config("llama"), ATTENTION)
    return model.state_dict()["model.embed_tokens.weight"].float()


def weights(config: Eagle3Config = HEAD, *, ties: bool = False) -> Eagle3Weights:
    made = random_head(config, seed=5)
    tensors = dict(made.tensors)
    if config.hidden != config.target_hidden:
        tensors["embed_tokens.weight"] = torch.randn(config.vocab, config.hidden)
    if ties:  # neighbours in the draft vocabulary are as probable as each other
        tensors["lm_head.weight"] = tensors["lm_head.weight"][::2].repeat_interleave(2, 0)
    return Eagle3Weights(config=config, tensors=tensors)


@remember
def head(
    precision: str = "none", threads: int = 1, kernels: str = "", ties: bool = False
) -> NativeHead:
    return NativeHead(weights(ties=ties), target(threads, kernels), quantization=precision)


def module_of(of: Eagle3Weights) -> Eagle3Module:
    module = Eagle3Module(of.config, of.tensors.get("embed_tokens.weight", target_embedding()))
    names = dict(module.named_parameters())
    module.load_state_dict({k: v for k, v in of.tensors.items() if k in names})
    return module.requires_grad_(False)


def random_rows(seed: int, count: int, hidden: int = 64) -> tuple[list[int], Tensor]:
    """Tokens and hidden states."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, tiny_models.VOCAB, (count,), generator=generator).tolist()
    return tokens, torch.randn(count, hidden, generator=generator)


def path_to(parents: Sequence[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


class Request:
    """A context, committed in chunks, and a tree of rows below it."""

    def __init__(self, seed: int, cuts: Sequence[int], parents: Sequence[int], hidden: int) -> None:
        self.cuts, self.parents = cuts, parents
        self.known, self.states = random_rows(seed, max(cuts, default=0), hidden)
        self.tokens, self.inputs = random_rows(seed + 1000, len(parents), hidden)

    def commit(self, of: NativeHead, cache: Any) -> StepRows:
        slot, done = cache.allocate(), 0
        for cut in self.cuts:
            rows = chain_rows(slot, self.known[done:cut])
            cache.commit(of.step([rows], cache, self.states[done:cut]), [slot], [range(cut - done)])
            done = cut
        every = range(len(self.tokens))
        return StepRows(slot=slot, tokens=self.tokens, parents=self.parents, logit_rows=every)

    def path(self, row: int) -> tuple[list[int], Tensor]:
        """Tokens and hidden states of the whole text down to a row."""
        rows = path_to(self.parents, row)
        tokens = [*self.known, *(self.tokens[r] for r in rows)]
        return tokens, torch.cat([self.states, self.inputs[rows]])


def run(of: NativeHead, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of all rows, from one step."""
    cache = of.new_cache(len(requests), 256)
    batch = [request.commit(of, cache) for request in requests]
    output = of.step(batch, cache, torch.cat([request.inputs for request in requests]))
    assert output.features is not None
    return output.logits, output.features[:, 0]


def some_requests(hidden: int) -> list[Request]:
    return [
        Request(1, [17, 23], [-1, 0, 0, 1, 2, 4], hidden),
        Request(2, [], [-1, -1, 1], hidden),
        Request(3, [40], [-1, 0, 1, 2], hidden),
    ]


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("config", [HEAD, NARROW], ids=["shared", "own embedding"])
def test_rows_are_those_of_torch(config: Eagle3Config, normed: bool) -> None:
    of = weights(dataclasses.replace(config, norm_before_residual=normed))
    module, requests = module_of(of), some_requests(config.hidden)
    logits, states = run(NativeHead(of, target(), quantization="none"), requests)
    paths = [request.path(row) for request in requests for row in range(len(request.tokens))]
    for got_logits, got_state, (tokens, hidden) in zip(logits, states, paths, strict=True):
        count = len(tokens)
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        out, _ = module(torch.tensor([tokens]), hidden[None], torch.arange(count)[None], seen, None)
        torch.testing.assert_close(got_state, out[0, -1], atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(got_logits, module.logits(out[0, -1]), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("config", [HEAD, NARROW], ids=["shared", "own embedding"])
def test_features_are_fused_as_in_torch(config: Eagle3Config) -> None:
    of, features = weights(config), torch.randn(21, config.features)
    native_head = NativeHead(of, target(), quantization="none")
    assert native_head.features == features.shape[1]
    want = module_of(of).fuse(features)
    torch.testing.assert_close(native_head.fuse(features), want, atol=1e-4, rtol=1e-4)
    assert native_head.fuse(features[:0]).shape == (0, config.hidden)


@pytest.mark.parametrize(("precision", "allowed"), [("int8", 0.05), ("int4", 0.5)])
def test_quantised_heads_are_near(precision: str, allowed: float) -> None:
    requests = some_requests(64)
    features = torch.randn(9, HEAD.features)
    pairs = list(zip(run(head(precision), requests), run(head(), requests), strict=True))
    pairs.append((head(precision).fuse(features), head().fuse(features)))
    for got, want in pairs:
        assert 0 < float((got - want).std()) < allowed * float(want.std())
    assert head(precision).weight_bytes < head().weight_bytes / 3


@st.composite
def situations(draw: st.DrawFn) -> list[Request]:
    requests = []
    for i in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, 60), max_size=3)))
        parents = [-1]
        for node in range(1, draw(st.integers(1, 20))):
            parents.append(draw(st.integers(-1, node - 1)))
        requests.append(Request(draw(st.integers(0, 900)) + i, cuts, parents, 64))
    return requests


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=15, deadline=None)
@given(requests=situations(), threads=st.sampled_from([1, 2, 3]))
def test_a_row_has_the_same_bits_in_any_company(
    precision: str, requests: list[Request], threads: int
) -> None:
    logits, states = run(head(precision, threads), requests)
    start = 0
    for request in requests:
        for row in (0, len(request.tokens) - 1):
            tokens, hidden = request.path(row)
            alone = head(precision, 1, "portable")
            cache = alone.new_cache(1, 256)
            slot = cache.allocate()
            for token, state in zip(tokens, hidden, strict=True):
                output = alone.step([chain_rows(slot, [token], [0])], cache, state[None])
                cache.commit(output, [slot], [[0]])
            assert torch.equal(logits[start + row], output.logits[0])
            assert torch.equal(states[start + row], output.features[0, 0])  # type: ignore[index]
        start += len(request.tokens)


# Trees


class Known:
    """Requests with committed tokens, and known ones that are new."""

    def __init__(self, of: NativeHead, counts: Sequence[int], seed: int = 0) -> None:
        self.of, self.cache = of, of.new_cache(len(counts), 64)
        self.batch: list[StepRows] = []
        features = []
        for i, count in enumerate(counts):
            slot = self.cache.allocate()
            tokens, read = random_rows(seed + i, 7 * i + count, of.features)
            hidden = of.fuse(read[: 7 * i])
            if i:
                output = of.step([chain_rows(slot, tokens[: 7 * i])], self.cache, hidden)
                self.cache.commit(output, [slot], [range(7 * i)])
            self.batch.append(chain_rows(slot, tokens[7 * i :]))
            features.append(read[7 * i :])
        self.features = torch.cat(features)

    def at_once(self, shapes: Sequence[TreeShape]) -> list[Expanded]:
        return self.of.expand(self.batch, self.cache, self.features, shapes)[1]

    def by_steps(self, shapes: Sequence[TreeShape]) -> list[Expanded]:
        known = self.of.fuse(self.features).split([len(rows.tokens) for rows in self.batch])

        def run_below(trees: Sequence[TreeRows]) -> tuple[Tensor, Tensor]:
            parts = [torch.cat([k, t.hidden]) for k, t in zip(known, trees, strict=True)]
            joined = [below(*pair) for pair in zip(self.batch, trees, strict=True)]
            output = self.of.step(joined, self.cache, torch.cat(parts))
            assert output.features is not None
            states = output.features[:, 0].split([len(part) for part in parts])
            wanted = [s[rows.logit_rows] for s, rows in zip(states, joined, strict=True)]
            return output.logits, torch.cat(wanted)

        none = TreeRows(tokens=[], parents=[], hidden=known[0][:0], new=0)
        roots = [dataclasses.replace(none, new=1)] * len(known)  # of each request its last row
        return expand_by_steps(run_below, *run_below(roots), shapes, self.of.target_ids)


def below(rows: StepRows, tree: TreeRows) -> StepRows:
    count = len(rows.tokens)
    parents = [*rows.parents, *(count - 1 if p == ROOT else count + p for p in tree.parents)]
    wanted = list(range(len(parents) - tree.new, len(parents)))
    tokens = [*rows.tokens, *tree.tokens]
    return StepRows(slot=rows.slot, tokens=tokens, parents=parents, logit_rows=wanted)


SHAPES = st.builds(
    TreeShape,
    depth=st.integers(0, 6),
    width=st.sampled_from([1, 1, 2, 3, 8, 100]),
    nodes=st.integers(0, 40),
    floor=st.sampled_from([0.0, 1e-4, 0.01, 0.2, 1.0]),
)


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), SHAPES), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    threads=st.sampled_from([1, 2, 3]),
    ties=st.booleans(),
)
def test_one_call_gives_the_trees_of_many_steps(
    precision: str,
    requests: list[tuple[int, TreeShape]],
    seed: int,
    threads: int,
    ties: bool,
) -> None:
    shapes = [shape for _, shape in requests]
    known = Known(head(precision, threads, ties=ties), [count for count, _ in requests], seed)
    trees = known.at_once(shapes)
    assert trees == known.by_steps(shapes)  # to the last bit
    for (tokens, parents, scores), shape in zip(trees, shapes, strict=True):
        assert len(tokens) == len(parents) == len(scores) <= shape.nodes
        assert set(tokens) <= set(known.of.target_ids.tolist())
        assert shape.width > 1 or list(parents) == list(range(-1, len(tokens) - 1))
        assert all(score >= shape.least for score in scores)


def test_of_equals_the_lower_comes_first() -> None:
    known = Known(head(ties=True), [3])
    ((tokens, _, scores),) = known.at_once([TreeShape(depth=1, width=6, nodes=6)])
    ids = known.of.target_ids.tolist()
    drafted = [ids.index(token) for token in tokens]
    assert drafted[1::2] == [first + 1 for first in drafted[::2]]
    assert scores[1::2] == scores[::2]


def test_known_rows_are_computed_whatever_the_trees() -> None:
    """Committed, they serve the next step like those of a step without a tree."""
    empty = [TreeShape(depth=0, width=2, nodes=5), TreeShape(depth=3, width=2, nodes=0)]
    token, state = random_rows(77, 1)
    for shapes in (empty, [TreeShape(depth=3, width=2, nodes=5), empty[0]]):
        known, plain = Known(head(), [4, 2]), Known(head(), [4, 2])
        output, trees = known.of.expand(known.batch, known.cache, known.features, shapes)
        assert [len(tokens) for tokens, _, _ in trees] == [s.nodes * bool(s.depth) for s in shapes]
        want = plain.of.step(plain.batch, plain.cache, plain.of.fuse(plain.features))
        after = []
        for of, step in ((known, output), (plain, want)):
            of.cache.commit(step, [0, 1], [range(4), range(2)])
            assert of.cache.lengths == [4, 9]
            after.append(of.of.step([chain_rows(1, token, [0])], of.cache, state).logits)
        assert torch.equal(*after)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_features_that_are_no_numbers_draft_nothing(bad: float) -> None:
    shape = TreeShape(depth=3, width=3, nodes=9)
    known = Known(head(), [2, 3])
    want = known.at_once([shape, shape])[1]
    known.features[1, 5] = bad
    empty, other = known.at_once([shape, shape])
    assert empty == ([], [], [])
    assert other == want


def test_head_and_target_share_threads() -> None:
    """Called at the same time they wait for each other."""
    of, beside = head("int8", 2), target(2)
    known, shape = Known(of, [5]), TreeShape(depth=4, width=4, nodes=20)
    cache = beside.new_cache(1, 64)
    rows = [chain_rows(cache.allocate(), range(20), range(20))]
    tree, logits = known.at_once([shape]), beside.step(rows, cache).logits
    with ThreadPoolExecutor(4) as pool:
        trees = [pool.submit(known.at_once, [shape]) for _ in range(40)]
        steps = [pool.submit(beside.step, rows, cache) for _ in range(40)]
        assert all(made.result() == tree for made in trees)
        assert all(torch.equal(made.result().logits, logits) for made in steps)


# What is refused


def bad_calls() -> list[Callable[[Known], Any]]:
    one = TreeShape(depth=1, width=1, nodes=1)
    deep = TreeShape(depth=65, width=1, nodes=1)
    two = torch.zeros(2, 64)

    def expand(k: Known, **changes: Any) -> Any:
        words = {"batch": k.batch, "cache": k.cache, "features": k.features, "shapes": [one]}
        return k.of.expand(**words | changes)  # type: ignore[arg-type]

    return [
        lambda k: k.of.step(k.batch, k.cache, two[:1]),
        lambda k: k.of.step(k.batch, k.cache, two[:, :63]),
        lambda k: k.of.step([chain_rows(0, [1, 97])], k.cache, two),
        lambda k: k.of.step(k.batch, target().new_cache(4, 64), two),
        lambda k: k.of.fuse(k.features[:, 1:]),
        lambda k: expand(k, shapes=[deep]),
        lambda k: expand(k, shapes=[one, one]),
        lambda k: expand(k, shapes=[]),
        lambda k: expand(k, features=k.features[:1]),
        lambda k: expand(k, features=two),
        lambda k: expand(k, batch=[chain_rows(0, [1, -1])]),
        lambda k: expand(k, cache=head("int4").new_cache(1, 64)),
    ]


@pytest.mark.parametrize("call", bad_calls() if extension is not None else [])
def test_nonsense_is_refused_and_changes_nothing(call: Callable[[Known], Any]) -> None:
    known, shape = Known(head(), [2]), TreeShape(depth=2, width=2, nodes=4)
    want = known.at_once([shape])
    with pytest.raises(ValueError):  # noqa: PT011
        call(known)
    assert known.at_once([shape]) == want


def test_the_extension_keeps_heads_and_models_apart() -> None:
    of, beside = head(), target()
    caches = of.new_cache(1, 64), beside.new_cache(1, 64)
    row, room = ([1], [-1], [0], [0], [0]), extension.Output
    features, shapes = torch.zeros(1, of.features).numpy(), [(1, 1, 1, 0.0)]
    hidden, params = torch.zeros(1, 64).numpy(), SamplingParams(temperature=0.0)
    choice = (params.temperature, params.top_k, params.top_p, params.min_p, [])
    head_, model, (mine, its) = of._model, beside.model, (c.native for c in caches)
    for call, arguments in (
        (extension.step, (head_, mine, room(), *row, [], 1)),
        (extension.step, (model, its, room(), *row, [], 3, hidden)),
        (extension.draft, (head_, mine, room(), *row, [2], [choice], 40)),
        (extension.fuse, (model, features)),
        (extension.expand, (model, its, room(), *row, features, shapes)),
        (extension.expand, (head_, mine, room(), *row, features, [(-1, 1, 1, 0.0)])),
        (extension.expand, (head_, mine, room(), *row, features, [(1, 0, 1, 0.0)])),
        (extension.expand, (head_, mine, room(), *row, features, [(1, 1, -1, 0.0)])),
        (extension.expand, (head_, mine, room(), *row, features, [(1, 1, 1, math.nan)])),
        (head_.add_layer, ({}, 0, 0)),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            call(*arguments)
