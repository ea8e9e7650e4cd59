"""Medusa's trees against brute force; its drafts on toys and on tiny models of both runtimes."""

from __future__ import annotations

import functools
import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_llm
import torch
from hypothesis import given
from hypothesis import strategies as st
from lossless import cases
from models.tiny_medusa import random_heads
from toys import ToyRuntime, request_of, toy_engine

from slipstream import LLM, SamplingParams
from slipstream.drafters import METHODS, parse
from slipstream.drafters.medusa import LOSSY, MedusaConfig, MedusaDrafter
from slipstream.drafters.paths import RankTree, best_tree, tree_of
from slipstream.errors import SlipstreamError
from slipstream.models import medusa
from slipstream.models.medusa import MedusaShape
from slipstream.types import ROOT

# Trees


def paths_of(tree: RankTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for parent, head, rank in zip(tree.parents, tree.heads, tree.ranks, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), rank))
        assert len(paths[-1]) == head + 1
    return paths


def falling(rows: list[list[float]]) -> list[list[float]]:
    return [sorted((-x for x in row), reverse=True) for row in rows]


HEADS = st.lists(st.lists(st.floats(0.01, 5), min_size=2, max_size=4), min_size=1, max_size=3).map(
    falling
)


@given(heads=HEADS, nodes=st.integers(1, 12), least=st.floats(-6, 0))
def test_the_best_tree_has_the_best_paths(
    heads: list[list[float]], nodes: int, least: float
) -> None:
    tree = best_tree(heads, nodes, least)
    every = [
        path
        for depth in range(1, len(heads) + 1)
        for path in itertools.product(*(range(len(row)) for row in heads[:depth]))
    ]

    def score(path: Sequence[int]) -> float:
        return math.fsum(row[rank] for row, rank in zip(heads, path, strict=False))

    allowed = sorted((score(p) for p in every if score(p) >= least), reverse=True)
    got = paths_of(tree)
    assert len(set(got)) == len(got) == min(nodes, len(allowed))
    assert [score(p) for p in got] == pytest.approx(allowed[: len(got)])  # the best ones, in order


def test_no_tree_of_as_many_nodes_expects_more() -> None:
    """By brute force over all subtrees of six nodes."""
    heads = [[math.log(p) for p in row] for row in ([0.5, 0.3, 0.1], [0.6, 0.3], [0.7, 0.2])]

    def chance(path: Sequence[int]) -> float:
        return math.prod(math.exp(row[rank]) for row, rank in zip(heads, path, strict=False))

    every = [
        path
        for depth in (1, 2, 3)
        for path in itertools.product(*(range(len(row)) for row in heads[:depth]))
    ]
    best = max(
        sum(map(chance, nodes))
        for nodes in itertools.combinations(every, 6)
        if all(len(path) == 1 or path[:-1] in nodes for path in nodes)
    )
    got = paths_of(best_tree(heads, 6, -math.inf))
    assert sum(map(chance, got)) == pytest.approx(best)


def test_a_tree_of_published_paths() -> None:
    tree = tree_of([(0, 0), (1,), (0,), (0, 1), (0, 0, 0), (2,)])
    assert paths_of(tree) == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]
    assert paths_of(tree.cut(2, 9)) == [(0,), (1,), (2,), (0, 0), (0, 1)]
    assert paths_of(tree.cut(9, 1)) == [(0,), (0, 0), (0, 0, 0)]
    assert len(tree.cut(0, 9)) == 0
    draft = tree.cut(2, 2).draft([[7, 8], [5, 6]])
    assert (list(draft.tokens), list(draft.parents)) == ([7, 8, 5, 6], [ROOT, ROOT, 0, 0])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0]], r"has the path \[0\] twice"),
        ([[0], [1, 0]], r"has \[1, 0\], but not \[1\]"),
        ([[0], []], "list of ranks"),
        ([[0], [-1]], "list of ranks"),
        ([[0], [True]], "list of ranks"),
        (["0"], "list of ranks"),
        ([], "list of paths"),
        ({"0": 1}, "list of paths"),
        ("[[0]]", "list of paths"),
    ],
)
def test_a_wrong_tree_is_refused(paths: Any, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        tree_of(paths)


# Drafts, on toys


def toy_drafter(**options: Any) -> MedusaDrafter:
    settings = {"path_floor": 0.0, "tree_nodes": 5, "quantization": "none", **options}
    tree = settings.pop("tree", None)
    return cases.medusa(4, MedusaConfig(model="toy", **settings), tree)


def observed(drafter: MedusaDrafter, request: Any, count: int) -> None:
    drafter.observe(request, torch.linspace(-1, 1, count, dtype=torch.float64)[:, None, None])


def test_nothing_is_drafted_before_the_newest_token_alone_is_new() -> None:
    drafter, request = toy_drafter(), request_of([0, 1, 2, 0, 1])
    assert not drafter.propose([request], [3])[0]
    observed(drafter, request, 2)
    assert not drafter.propose([request], [3])[0]
    observed(drafter, request, 2)
    draft = drafter.propose([request], [3])[0]
    assert len(draft) == 5
    assert draft.draft_probs is None
    assert drafter.propose([request], [3]) == [draft]  # without news the same
    request.tokens.append(2)
    assert not drafter.propose([request], [3])[0]
    drafter.release(request)
    drafter.release(request)
    request.tokens.pop()
    assert not drafter.propose([request], [3])[0]


def test_a_draft_keeps_to_its_budgets() -> None:
    drafter = toy_drafter(tree_nodes=9)
    requests = [request_of([0] * 4, i) for i in range(4)]
    for request in requests:
        observed(drafter, request, 3)
    drafts = drafter.propose(requests, [0, 1, 2, 9])
    assert [d.depth for d in drafts] == [0, 1, 2, 2]  # there are 2 heads
    assert [len(d) for d in drafts] == [0, 3, 9, 9]  # 3 tokens in the draft vocabulary
    alone = drafter.propose(requests[2:3], [2])
    assert alone == drafts[2:3]  # whoever else asks
    assert not toy_drafter(path_floor=0.999).propose(requests[:1], [2])[0]


def test_a_fixed_tree() -> None:
    tree = tree_of([[0], [1], [3], [0, 0], [0, 0, 0]])  # deeper and wider than these heads reach
    drafter, request = toy_drafter(tree=tree), request_of([0, 1])
    observed(drafter, request, 1)
    draft = drafter.propose([request], [5])[0]
    assert list(draft.parents) == [ROOT, ROOT, 0]
    assert drafter.propose([request], [1])[0].depth == 1


def test_the_features_of_the_last_committed_token_are_used() -> None:
    """However they came: the drafts of an engine are those of its last features."""
    runtime = ToyRuntime(4, seed=3)
    drafter = toy_drafter()
    seen: list[tuple[int, float]] = []
    observe = drafter.observe
    drafter.observe = lambda request, features: (  # type: ignore[method-assign]
        seen.append((len(features), float(features[-1, 0, 0]))),
        observe(request, features),
    )[1]
    engine = toy_engine(runtime, drafter, 2, prefill_chunk=3)
    request = engine.add([0, 1, 2, 0, 1, 3, 2], SamplingParams(temperature=0, max_tokens=9))
    while len(engine.scheduler):
        engine.step()
        if request.finish_reason is None:
            committed = sum(count for count, _ in seen)
            assert seen[-1][1] == runtime.logits(request.tokens[:committed])[0]
            middle = committed < request.prompt_length - 1
            assert middle or committed == len(request.tokens) - 1
    assert request.metrics.drafted > 0
    assert not drafter._last


# Drafts, on tiny models of both runtimes


@functools.cache
def heads_of_tiny() -> Path:
    """Heads for the tiny target, trained for a moment: right often enough to be worth a test."""
    from train.tiny_training import trained

    return trained(Path(tempfile.mkdtemp(prefix="tiny_medusa_")) / "heads")


def speculative(**options: Any) -> dict[str, Any]:
    return {"method": "medusa", "model": str(heads_of_tiny()), **options}


@pytest.mark.parametrize("runtime", ["native", "torch"])
def test_text_is_that_of_plain_decoding(runtime: str) -> None:
    """At any temperature: the drafts are deterministic, and the noise is keyed by position."""
    plain = LLM(str(tiny_llm.target()), runtime=runtime)
    prompts = ["hello", "the cat in the ", "one two three", "x" * 70]
    for options in ({}, {"tree": [[0], [0, 0], [1], [0, 1]]}, {"quantization": "none"}):
        fast = plain.with_speculation(speculative(**options))
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=40, seed=7)
            want, got = plain.generate(prompts, params), fast.generate(prompts, params)
            assert [a.outputs[0].token_ids for a in got] == [a.outputs[0].token_ids for a in want]
        metrics = fast.engine.metrics
        assert metrics.accepted > 0.2 * metrics.steps
        assert fast.engine.drafter is not None
        assert not fast.engine.drafter._last  # type: ignore[attr-defined]


def test_typical_acceptance_says_that_it_is_lossy_and_is() -> None:
    said: list[str] = []
    plain = LLM(str(tiny_llm.target()), notify=said.append)
    fast = plain.with_speculation(speculative(acceptance="typical"))
    assert LOSSY in said
    prompts = ["hello", "the cat in the ", "one two three"]
    for temperature, equal in ((0.0, True), (1.0, False)):  # greedy requests stay as they are
        params = SamplingParams(temperature=temperature, max_tokens=60, seed=7)
        want, got = plain.generate(prompts, params), fast.generate(prompts, params)
        same = [a.outputs[0].token_ids for a in got] == [a.outputs[0].token_ids for a in want]
        assert same is equal
    quiet: list[str] = []
    LLM(str(tiny_llm.target()), speculative_config=speculative(), notify=quiet.append)
    assert LOSSY not in quiet


def test_a_tree_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps([[0], [1], [0, 0]]))
    fast = tiny_llm.llm(speculative(tree=str(path)))
    fast.generate("hello", SamplingParams(temperature=0, max_tokens=9))
    assert fast.engine.metrics.drafted > 0
    for content in ("[[0], ", "[[1, 1]]"):
        path.write_text(content)
        with pytest.raises(SlipstreamError, match="tree"):
            tiny_llm.llm(speculative(tree=str(path)))
    with pytest.raises(SlipstreamError, match="no-such-file"):
        tiny_llm.llm(speculative(tree="no-such-file"))


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "model must be a name or a path"),
        ({"tree_nodes": 0}, "tree_nodes"),
        ({"path_floor": 1}, "path_floor"),
        ({"path_floor": "x"}, "path_floor"),
        ({"acceptance": "typicall"}, "did you mean 'typical'"),
        ({"quantization": "int4"}, "quantization"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"nodes": 3}, "nodes"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    assert "medusa" in METHODS
    with pytest.raises(SlipstreamError, match=message):
        parse({"method": "medusa", "model": "m", **options})


def test_lossy_verification_is_asked_for_by_its_own_option_only() -> None:
    config = {"method": "medusa", "model": "m"}
    assert parse(config).rejection_sample_method == "standard"
    assert parse({**config, "acceptance": "typical"}).rejection_sample_method == "typical"
    with pytest.raises(SlipstreamError, match="rejection_sample_method"):
        parse({**config, "rejection_sample_method": "typical"})


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    width = tiny_llm.llm().model.runtime.vocab_size
    for name, hidden, vocab in (("hidden size", 32, width), ("vocabulary", 64, width + 1)):
        shape = MedusaShape(heads=2, layers=1, hidden=hidden, vocab=vocab, draft_vocab=vocab)
        medusa.write(tmp_path / "heads", random_heads(shape))
        with pytest.raises(SlipstreamError, match=f"another target: its {name}"):
            tiny_llm.llm({"method": "medusa", "model": str(tmp_path / "heads")})
