"""Text of the tiny target with its features, and Medusa heads trained on it for a moment."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tiny_llm
import torch

from slipstream import SamplingParams
from slipstream.models import medusa as checkpoint
from slipstream.train import features, medusa
from slipstream.train.features import Example
from slipstream.train.target import TargetParts, read_target
from slipstream.train.text import Conversation

TAPS = [1]  # Medusa needs none: what it looks at is always kept


@functools.cache
def examples() -> Sequence[Example]:
    """Every second answer sampled; the first of them share their prompts with nobody."""
    llm = tiny_llm.llm()
    prompts = [list(range(3 + i, 20 + i)) for i in range(24)]
    params = [SamplingParams(temperature=i % 2, max_tokens=48, seed=i) for i in range(24)]
    runs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    conversations = [
        Conversation(prompt=prompt, answer=list(run.outputs[0].token_ids))
        for prompt, run in zip(prompts, runs, strict=True)
    ]
    return with_features(conversations, TAPS)


def with_features(conversations: Sequence[Conversation], taps: Sequence[int]) -> Sequence[Example]:
    with tempfile.TemporaryDirectory() as folder:
        for _ in features.compute(tiny_llm.llm(), conversations, taps, Path(folder)):
            pass
        return [e.load() for e in features.entries(conversations, taps, Path(folder))]


@functools.cache
def target() -> TargetParts:
    return read_target(str(tiny_llm.target()))


def task(
    *, ids: Sequence[int] | None = None, heads: int = 3, shared: bool = True, l1: float = 0.0
) -> medusa.MedusaTask:
    """ids: of the draft vocabulary; None for all of the target's."""
    ids = range(target().config.vocab_size) if ids is None else ids
    shape = medusa.shape_of(target(), heads=heads, draft_vocab=len(ids), shared=shared)
    torch.manual_seed(0)
    module = medusa.initial(target(), shape, ids)
    collate = medusa.Collate(target(), ids, torch.device("cpu"))
    return medusa.MedusaTask(module, collate, [examples()[:6]], l1=l1)


def steps(task: medusa.MedusaTask, batch: Sequence[Example], count: int) -> list[float]:
    """Losses of so many steps on the same batch."""
    optimizer = torch.optim.AdamW(task.module.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(count):
        loss = task.loss(batch, 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(folder: Path) -> Path:
    """Written to disk, with a reduced vocabulary and one output layer."""
    used = sorted({int(token) for e in examples() for token in e.tokens[e.start :]})
    done = task(ids=used)
    steps(done, examples(), 60)
    module = done.module
    assert isinstance(module, medusa.MedusaModule)
    checkpoint.write(folder, medusa.weights_of(module, used, torch.float16))
    return folder
