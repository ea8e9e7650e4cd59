"""Hold the native step against the torch runtime; run by `make check-native`.

    python native/check_step.py FOLDER_OF_THE_BUILT_MODULE

Tiny random models of every supported architecture: logits of chunks, trees and ragged batches are
those of the torch runtime up to rounding, and the same bits whatever the kernels and threads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

sys.path[:0] = [sys.argv[1], "native", "tests"]
import _native  # type: ignore[import-not-found]  # noqa: E402
import describe  # noqa: E402
import tiny_models  # noqa: E402

from slipstream.models.adapter import ATTENTION  # noqa: E402
from slipstream.runtimes.torch import TorchRuntime  # noqa: E402
from slipstream.types import StepRows  # noqa: E402

CLOSE = 1e-4


class Native:
    """Just enough of a runtime to be compared."""

    def __init__(
        self, config: Any, tensors: Mapping[str, Tensor], format_: str, threads: int, kernels: str
    ) -> None:
        tables, index = describe.rotary_of(config)
        rotates = getattr(config, "no_rope_layers", None)
        tables = [*tables, (np.zeros(0, np.float32), 1.0)]  # for layers that don't rotate
        words = describe.config_of(config) | {"rotary": tables}
        outer = arrays(describe.outer_of(config, tensors))
        self.model = _native.Model(words, outer, format_, threads, kernels)
        kinds = getattr(config, "layer_types", None)
        for i in range(config.num_hidden_layers):
            kind = kinds[i] if kinds else ""
            slides = not kinds or kind == "sliding_attention"
            window = getattr(config, "sliding_window", None) or 0
            rotary = index.get(kind, 0) if not rotates or rotates[i] else len(tables) - 1
            layer = arrays(describe.layer_of(config, tensors, i))
            self.model.add_layer(layer, window if slides else 0, rotary)
        self.cache = _native.Cache(self.model, 3, 64)
        self.lengths = [0, 0, 0]

    def step(self, batch: Sequence[StepRows], kept: Sequence[Sequence[int]]) -> np.ndarray:
        tokens, parents, slots, past, wanted, starts = ([] for _ in range(6))
        for rows in batch:
            start = len(tokens)
            starts.append(start)
            tokens += rows.tokens
            parents += [start + p if p >= 0 else -1 for p in rows.parents]
            slots += [rows.slot] * len(rows.tokens)
            past += [self.lengths[rows.slot]] * len(rows.tokens)
            wanted += [start + r for r in rows.logit_rows]
        out = _native.step(self.model, self.cache, tokens, parents, slots, past, wanted)
        for rows, start, keep in zip(batch, starts, kept, strict=True):
            at = self.lengths[rows.slot]
            self.cache.commit(out, rows.slot, at, [start + r for r in keep])
            self.lengths[rows.slot] += len(keep)
        return np.array(out.logits).reshape(len(wanted), -1)


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: t.detach().float().contiguous().numpy() for name, t in tensors.items()}


def steps(tokens: Sequence[int]) -> list[tuple[list[StepRows], list[list[int]]]]:
    """A prefill, another of another length, trees of both at once, one row of each."""

    def rows(slot: int, ids: Sequence[int], parents: Sequence[int], n: int) -> StepRows:
        wanted = range(len(ids) - n, len(ids))
        return StepRows(slot=slot, tokens=list(ids), parents=list(parents), logit_rows=list(wanted))

    def chain(count: int) -> range:
        return range(-1, count - 1)

    return [
        ([rows(0, tokens[:23], chain(23), 23)], [list(range(23))]),
        ([rows(2, tokens[:4], chain(4), 1)], [list(range(4))]),
        (
            [
                rows(0, tokens[23:29], [-1, 0, 0, 1, 2, 4], 6),
                rows(2, tokens[4:7], [-1, 0, 0], 2),
            ],
            [[0, 2, 4], [0, 1]],
        ),
        ([rows(2, [5], [-1], 1), rows(0, [7], [-1], 1)], [[0], [0]]),
    ]


def compare(name: str, config: Any) -> bool:
    model = tiny_models.build(config, ATTENTION)
    reference = TorchRuntime(model, name)
    cache = reference.new_cache(3, 64)
    for _ in range(3):
        cache.allocate()
    tensors = model.state_dict()
    variants = [("", 2), ("portable", 1), ("", 1)]
    natives = [
        Native(config, tensors, "float32", threads, kernels) for kernels, threads in variants
    ]
    gap, same = 0.0, True
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for batch, kept in steps(tokens):
        output = reference.step(batch, cache)
        cache.commit(output, [rows.slot for rows in batch], kept)
        found = [native.step(batch, kept) for native in natives]
        gap = max(gap, float(np.abs(found[0] - output.logits.numpy()).max()))
        same = same and all(np.array_equal(found[0], other) for other in found[1:])
    good = gap < CLOSE and same
    print(
        f"{'ok' if good else 'FAILED':7}{name:28} largest difference {gap:.1e}, same bits: {same}"
    )
    return good


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    results = [
        compare(name, tiny_models.config(name))
        for name in tiny_models.ARCHITECTURES
        if tiny_models.config(name).model_type in describe.SUPPORTED
    ]
    print(f"{len(results) - sum(results)} of {len(results)} architectures failed")
    return int(not all(results) or not results)


if __name__ == "__main__":
    sys.exit(main())
