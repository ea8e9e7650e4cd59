"""Calls into the extension that nothing in the package makes: a tiny model from plain arrays, and
what used to end the process, each as a command: ``python hostile.py NAME``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

native: Any = import_module("slipstream._native")
VOCAB, LAYERS, SLOTS, ROOM = 20, 2, 2, 64
CONFIG: dict[str, Any] = {
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "dim": 16,
    "inner": 32,
    "vocab": VOCAB,
    "eps": 1e-5,
    "layer_norm": False,
    "gated": True,
    "parallel_residual": False,
    "activation": "silu",
    "query_scale": 0.25,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rotary": [(np.ones(8, np.float32), 1.0)],
}


def matrix(rows: int, columns: int) -> tuple[str, list[tuple[str, Any]]]:
    values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    return "float32", [("float32", values)]


def outer() -> dict[str, Any]:
    return {"embedding": matrix(VOCAB, 32), "norm": np.ones(32, np.float32)}


def layer(heads: int = 2, kv_heads: int = 1) -> dict[str, Any]:
    return {
        "qkv": matrix(16 * (heads + 2 * kv_heads), 32),
        "out": matrix(32, 16 * heads),
        "up": matrix(64, 32),
        "down": matrix(32, 32),
        "before_attention": np.ones(32, np.float32),
        "before_mlp": np.ones(32, np.float32),
    }


def model(heads: int = 2, kv_heads: int = 1, layers: int = LAYERS) -> Any:
    words = CONFIG | {"heads": heads, "kv_heads": kv_heads}
    made = native.Model(words, outer(), 1, "")
    for _ in range(layers):
        made.add_layer(layer(heads, kv_heads), 0, 0)
    return made


def read(of: Any, cache: Any, count: int, past: int = 0) -> Any:
    """An output of a text; all its logits."""
    output, rows = native.Output(), list(range(count))
    parents = list(range(-1, count - 1))
    native.step(
        of, cache, output, [3] * count, parents, [0] * count, [past] * count, rows, [], LAYERS
    )
    return output


def filled(of: Any, count: int = 40) -> Any:
    """A cache with a text in slot 0."""
    cache = native.Cache(of, SLOTS, ROOM, False)
    cache.commit(read(of, cache, count), [0], [0], [list(range(count))])
    return cache


def refused(call: Callable[..., Any], *arguments: Any) -> None:
    try:
        call(*arguments)
    except (ValueError, TypeError):
        return
    raise AssertionError(f"accepted: {arguments}")


# What used to end the process, or to read memory of others


def a_child_with_other_past_than_its_parent() -> None:
    of = model()
    cache = filled(of)
    for first, then in ((0, 40), (40, 0)):
        output = read(of, cache, 1, first)
        refused(native.step, of, cache, output, [1], [0], [0], [then], [0], [], LAYERS)


def logits_of_no_width() -> None:
    of = model()
    output = read(of, native.Cache(of, 1, ROOM, False), 3)
    refused(output.logits, 0)
    refused(output.logits, VOCAB - 1)
    assert output.logits(VOCAB).shape == (3, VOCAB)


def logits_outlive_the_next_run() -> None:
    of = model()
    cache = native.Cache(of, 1, ROOM, False)
    output = read(of, cache, 2)
    logits = output.logits(VOCAB)
    kept = logits.copy()
    many = list(range(500))
    native.step(of, cache, output, [5] * 500, [1] * 500, [0] * 500, [0] * 500, many, [], LAYERS)
    del output
    assert np.array_equal(logits, kept)


def a_layer_after_the_cache() -> None:
    of = model(layers=LAYERS - 1)
    cache = native.Cache(of, SLOTS, ROOM, False)
    of.add_layer(layer(), 0, 0)
    refused(read, of, cache, 3)


def commit_of_another_models_step() -> None:
    small, large = model(heads=8, kv_heads=1), model(heads=8, kv_heads=8)
    output = read(small, native.Cache(small, 1, ROOM, False), 40)
    cache = native.Cache(large, 1, ROOM, False)
    refused(cache.commit, output, [0], [0], [[39]])


def a_cache_too_long_to_count() -> None:
    refused(native.Cache, model(), 1, 2**62, False)


def pairs_that_are_none() -> None:
    for bad in ((), ("float32",), ("float32", [()]), ("float32", [("float32",)])):
        refused(model(layers=0).add_layer, {**layer(), "qkv": bad}, 0, 0)
    for table in ((), (np.ones(8, np.float32),)):
        refused(native.Model, {**CONFIG, "rotary": [table]}, outer(), 1, "")


def values_of_another_type() -> None:
    for bad in ({"hidden": 2.5}, {"eps": "x"}, {"activation": 3}, {"rotary": 3}):
        refused(native.Model, CONFIG | bad, outer(), 1, "")
    for part in (3, ("float32", 3), (3, []), ("float32", [3]), ("float32", [("float32", 3)])):
        refused(model(layers=0).add_layer, {**layer(), "qkv": part}, 0, 0)


def continued_with_whatever() -> None:
    """Random runs into outputs of earlier ones: an error, or numbers."""
    of, rng = model(), np.random.default_rng(5)
    cache, accepted = filled(of), 0
    for _ in range(300):
        past, total = int(rng.choice([0, 7, 40])), int(rng.integers(1, 5))
        output = read(of, cache, total, past)
        for rows in rng.integers(1, 5, 3).tolist():
            parents = [int(rng.integers(-1, total + r)) for r in range(rows)]
            pasts = [past if rng.random() < 0.9 else int(rng.integers(0, 64)) for _ in parents]
            arguments = ([2] * rows, parents, [0] * rows, pasts, [rows - 1], [], LAYERS)
            try:
                native.step(of, cache, output, *arguments)
            except ValueError:
                continue
            accepted, total = accepted + 1, total + rows
            assert np.isfinite(output.logits(VOCAB)).all()
    assert 50 < accepted < 900


CASES = [
    a_child_with_other_past_than_its_parent,
    logits_of_no_width,
    logits_outlive_the_next_run,
    a_layer_after_the_cache,
    commit_of_another_models_step,
    a_cache_too_long_to_count,
    pairs_that_are_none,
    values_of_another_type,
    continued_with_whatever,
]

if __name__ == "__main__":
    next(case for case in CASES if case.__name__ == sys.argv[1])()
