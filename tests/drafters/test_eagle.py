"""Drafts of an EAGLE-3 head: the text is that of plain decoding, on both runtimes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny_eagle
import tiny_llm

from slipstream import LLM, SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.models import eagle3

CHAIN = {"tree_width": 1, "path_floor": 0.0, "num_speculative_tokens": 4}
TREE = {"tree_width": 3, "tree_nodes": 9, "path_floor": 0.0, "num_speculative_tokens": 3}
FIXED = {"tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}
SHAPES: dict[str, dict[str, Any]] = {"chain": CHAIN, "tree": TREE, "fixed": FIXED, "default": {}}
PROMPTS = ["the fox on the ice", "in a den, a bear", "hide", "an ode on ink " * 30]


@pytest.fixture(scope="module", params=["native", "torch"])
def plain(request: pytest.FixtureRequest) -> LLM:
    return tiny_llm.llm(runtime=request.param)


def config(**options: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(tiny_eagle.trained()[0]), **options}


def texts(llm: LLM, **params: Any) -> list[Any]:
    settings = SamplingParams(**{"max_tokens": 40, "seed": 5, **params})
    return [run.outputs[0].token_ids for run in llm.generate(PROMPTS, settings)]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_plain_decoding(plain: LLM, shape: str, temperature: int) -> None:
    """Also where the request samples: paths of a tree are no random choice."""
    fast = plain.with_speculation(config(**SHAPES[shape]))
    assert texts(fast, temperature=temperature) == texts(plain, temperature=temperature)
    if temperature == 0:
        assert fast.engine.metrics.mean_tokens_per_step > 1.3


def test_neighbours_and_chunks_of_the_prompt_change_no_draft(plain: LLM) -> None:
    fast = plain.with_speculation(config(**TREE))
    together = texts(fast, temperature=0)
    steps = fast.engine.metrics.steps
    alone = plain.with_speculation(config(**TREE))
    # no prompt leaves one token for its last chunk: then the features are there for a draft at once
    object.__setattr__(alone.engine.config, "prefill_chunk", 8)
    params = SamplingParams(max_tokens=40, temperature=0)
    assert [alone.generate(p, params)[0].outputs[0].token_ids for p in PROMPTS] == together
    if plain.model.runtime.exact:  # else a draft may differ where two paths are about as probable
        assert alone.engine.metrics.steps == steps


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sampled_chains(plain: LLM, method: str) -> None:
    options = {**CHAIN, "draft_sample_method": "probabilistic", "rejection_sample_method": method}
    fast = plain.with_speculation(config(**options))
    assert texts(fast, temperature=1) == texts(fast, temperature=1)
    assert texts(fast, temperature=0) == texts(plain, temperature=0)
    assert fast.engine.metrics.accepted > 0


def test_a_bfloat16_target_on_torch() -> None:
    plain = tiny_llm.llm(runtime="torch", dtype="bfloat16")
    for options in (CHAIN, TREE, {**CHAIN, "draft_sample_method": "probabilistic"}):
        fast = plain.with_speculation(config(**options))
        texts(fast, temperature=1)
        assert fast.engine.metrics.accepted > 0


def test_drawn_chains_commit_what_is_known(plain: LLM) -> None:
    """A prompt's rows run once, not again with every guess."""
    fast = plain.with_speculation(config(**CHAIN, draft_sample_method="probabilistic"))
    drafter = fast.engine.drafter
    real, rows = drafter._head.step, []

    def step(batch: Any, *args: Any) -> Any:
        rows.append(len(batch[0].tokens))
        return real(batch, *args)

    drafter._head.step = step
    fast.generate("the fox on the ice " * 20, SamplingParams(max_tokens=20, temperature=1, seed=1))
    assert rows[0] > 100
    assert max(rows[1:]) <= 2 * (CHAIN["num_speculative_tokens"] + 1)


def test_penalties_and_truncation(plain: LLM) -> None:
    fast = plain.with_speculation(config(**TREE))
    params = {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2}
    assert texts(fast, **params) == texts(plain, **params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden": 96, "hidden": 96}, "its hidden size is 96"),
        ({"vocab": 300}, "its vocabulary is 300"),
        ({"taps": (0, 1, 9)}, "it looks at layer 9"),
        ({"hidden": 96}, "it needs embed_tokens.weight"),
    ],
)
def test_a_head_of_another_target_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    from models.tiny_heads import random_head

    folder, _ = tiny_eagle.trained()
    shape = dataclasses.replace(eagle3.read(folder, "head").config, **changes)
    eagle3.write(tmp_path / "head", random_head(shape), speculative_tokens=4)
    with pytest.raises(SlipstreamError, match=message):
        tiny_llm.llm({"method": "eagle3", "model": str(tmp_path / "head")})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nobody"}, "no draft head 'nobody'"),
        ({"tree_width": 0}, "tree_width must be"),
        ({"path_floor": 1}, "path_floor must be in"),
        ({"tree": [[0, 0]]}, "the tree has"),
        ({"tree": "nowhere.json"}, "tree: nowhere.json can't be read"),
        ({"quantization": "int2"}, "unknown quantization 'int2'"),
        ({"draft_sample_method": "x"}, "unknown draft_sample_method 'x'"),
        ({"width": 3}, "unknown eagle3 option 'width'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        tiny_llm.llm({"method": "eagle3", "model": str(tiny_eagle.trained()[0]), **options})
