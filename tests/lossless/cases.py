"""The settings that losslessness is shown for: processors, drafters, verifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from models import tiny_heads
from models.tiny_medusa import random_heads
from toys import ToyDrafter, ToyRuntime, target_of, toy_engine

from slipstream.config import SamplingParams
from slipstream.drafters import Drafter
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.eagle_config import Eagle3Options
from slipstream.drafters.medusa import MedusaConfig, MedusaDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.paths import RankTree, tree_of
from slipstream.drafters.together import Together
from slipstream.engine import Engine
from slipstream.models.medusa import MedusaShape
from slipstream.runtimes.torch_head import eagle3_head
from slipstream.types import ROOT

VOCAB = 4
EOS = 3
PROMPT = (0, 1, 2, 0, 1)

PROCESSORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.7},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {0: 2.0, 2: -1.5}},
    "min-tokens": {"min_tokens": 2},
    "all": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": {1: 0.7},
        "min_tokens": 1,
    },
}


def draft_model(model: ToyRuntime, *, sampled: bool = True) -> DraftModelDrafter:
    return DraftModelDrafter(model, target_of(VOCAB, max_num_seqs=32), sampled=sampled)


def medusa(
    vocab_size: int, config: MedusaConfig | None = None, tree: RankTree | None = None
) -> MedusaDrafter:
    """Two random heads over three of the tokens, on the toys' one feature."""
    shape = MedusaShape(heads=2, layers=1, hidden=1, vocab=vocab_size, draft_vocab=3)
    config = config or MedusaConfig(model="toy", path_floor=0, tree_nodes=4)
    target = target_of(vocab_size, max_num_seqs=32)
    return MedusaDrafter(random_heads(shape, seed=4, scale=2.0), lambda x: x, target, config, tree)


def eagle(**options: Any) -> EagleDrafter:
    """A random head over three of the tokens, on the toys' one feature."""
    config = dataclasses.replace(
        tiny_heads.CONFIG, vocab=VOCAB, draft_vocab=3, target_hidden=1, taps=(1,)
    )
    weights = tiny_heads.random_head(config, seed=2)
    embedding = torch.randn(VOCAB, config.hidden, generator=torch.Generator().manual_seed(0))
    given = Eagle3Options(model="toy", **({"path_floor": 0} | options))
    head = eagle3_head(weights, embedding.double())
    return EagleDrafter(head, (1,), weights.target_ids, target_of(VOCAB, max_num_seqs=32), given)


MakeDrafter = Callable[[ToyRuntime], Drafter]
SAMPLED_CHAINS: dict[str, MakeDrafter] = {
    "draft model": lambda _: draft_model(ToyRuntime(VOCAB, seed=7, padding=2)),
    "reduced vocabulary": lambda _: draft_model(ToyRuntime(VOCAB, seed=8, absent=[0, 2])),
    "itself": draft_model,
    "eagle3, drawn": lambda _: eagle(draft_sample_method="probabilistic"),
}
SAMPLED_TREES: dict[str, MakeDrafter] = {
    "two siblings": lambda _: ToyDrafter(ToyRuntime(VOCAB, seed=7), [ROOT, ROOT, 0], sampled=True),
    "three siblings": lambda _: ToyDrafter(
        ToyRuntime(VOCAB, seed=7), [ROOT, ROOT, ROOT], sampled=True
    ),
    "fork below": lambda _: ToyDrafter(ToyRuntime(VOCAB, seed=7), [ROOT, 0, 0], sampled=True),
    "nothing left to draw": lambda _: ToyDrafter(
        ToyRuntime(VOCAB, seed=8, absent=[0, 2]), [ROOT, ROOT, ROOT], sampled=True
    ),
    "itself as a tree": lambda target: ToyDrafter(target, [ROOT, ROOT, 1], sampled=True),
}
DETERMINISTIC: dict[str, MakeDrafter] = {
    "toy chain": lambda _: ToyDrafter(ToyRuntime(VOCAB, seed=5), [ROOT, 0, 1], sampled=False),
    "toy tree": lambda _: ToyDrafter(ToyRuntime(VOCAB, seed=5), [ROOT, ROOT, 0], sampled=False),
    "wide tree": lambda _: ToyDrafter(ToyRuntime(VOCAB, seed=5), [ROOT, 0, ROOT], sampled=False),
    "greedy draft model": lambda _: draft_model(ToyRuntime(VOCAB, seed=7), sampled=False),
    "ngram": lambda _: NgramDrafter(1, 3),
    "eagle3": lambda _: eagle(tree_width=2, tree_nodes=4),
    "eagle3, chain": lambda _: eagle(tree_width=1),
    "medusa": lambda _: medusa(VOCAB),
    "together": lambda _: Together(
        [(NgramDrafter(1, 3), 2), (eagle(tree_width=2, tree_nodes=3), 3), (medusa(VOCAB), 2)]
    ),
    "medusa, fixed tree": lambda _: medusa(VOCAB, tree=tree_of([[0], [1], [0, 0], [1, 0]])),
}
COMBINATIONS: dict[str, tuple[MakeDrafter, str]] = {
    **{f"{name}, rejection": (make, "standard") for name, make in SAMPLED_CHAINS.items()},
    **{f"{name}, block": (make, "block") for name, make in SAMPLED_CHAINS.items()},
    **{f"{name}, rejection": (make, "standard") for name, make in SAMPLED_TREES.items()},
    **{f"{name}, follow": (make, "standard") for name, make in DETERMINISTIC.items()},
    "no drafter": (lambda _: None, "standard"),  # type: ignore[dict-item,return-value]
}


def params(processors: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{**PROCESSORS[processors], **more})


def engine(combination: str, target: ToyRuntime, k: int, **config: Any) -> Engine:
    make, verification = COMBINATIONS[combination]
    config = {"eos_token_ids": [EOS], "prefill_chunk": 3, **config}
    return toy_engine(target, make(target), k, rejection_sample_method=verification, **config)
