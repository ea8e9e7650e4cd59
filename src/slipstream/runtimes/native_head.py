"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) in the native step, and its trees in one call.

As in the native runtime, a row's bits depend on its own path alone: a tree drafted in one call is
that of ``drafters.expand`` step by step. ``Eagle3Module`` is the reference of the arithmetic.

Shapes: B requests · R rows · N rows asked for · h hidden · F·h features · d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.cache import Cache
from slipstream.drafters.expand import Expanded, TreeShape, expand_below
from slipstream.extension import native as _native
from slipstream.models.eagle3 import Eagle3Config, Eagle3Weights
from slipstream.runtimes.native import NativeCache, NativeKV, NativeRuntime, Rows
from slipstream.types import StepOutput, StepRows

_FORMATS = {"none": "float32", "int8": "int8", "int4": "int4"}
_LAYER = "layers.0."


class NativeHead:
    """A packed head beside its target, on the target's threads.

    quantization: of the head's matrices; one whose rows are no multiple of 32 stays float32. The
    embedding is the target's own, as packed there, unless the checkpoint brings one. That the head
    fits its target is checked before (``drafters/belongs.py``).

    features: F·h of the target, what ``fuse`` takes. target_ids: [d].
    """

    layers = 1

    def __init__(
        self, weights: Eagle3Weights, target: NativeRuntime, *, quantization: str = "int8"
    ) -> None:
        config = weights.config
        self.hidden_size = config.hidden
        self.draft_vocab = config.draft_vocab
        self.features = config.features
        self.target_ids = weights.target_ids
        self._narrow = target.narrow
        pack = _Packer(weights, _FORMATS[quantization])
        self._model = _native.Model(_words(config), pack.outer(), target.model)
        self._model.add_layer(pack.layer(), 0, 0)

    @property
    def weight_bytes(self) -> int:
        """Of the packed weights, without an embedding that is the target's."""
        return int(self._model.bytes)

    def new_cache(self, slots: int, max_length: int) -> NativeCache:
        return NativeCache(self._model, slots=slots, max_length=max_length, narrow=self._narrow)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features → what rows of known tokens take in. [R, F·h] → [R, h]."""
        return torch.from_numpy(_native.fuse(self._model, _floats(features)))

    def step(self, batch: Sequence[StepRows], cache: Cache, hidden: Tensor) -> StepOutput:
        """One pass over the rows of every request; ``NativeRuntime.step`` for a head.

        batch: tokens are target ids. hidden: [R, h], of the position before each row: fused
        features, or what came out for the row's parent. Returns logits [N, d] over the draft
        vocabulary and, as features [R, 1, h], the hidden states before the last norm.
        """
        assert isinstance(cache, NativeCache)
        rows, output = Rows(batch, cache), _native.Output()
        taps = [self.layers]
        _native.step(
            self._model, cache.native, output, *rows.columns, taps, self.layers, _floats(hidden)
        )
        logits = torch.from_numpy(output.logits(self.draft_vocab))
        features = torch.from_numpy(output.features(self.hidden_size))[:, None]
        kv = NativeKV(output=output, starts=rows.starts)
        return StepOutput(logits=logits, new_kv=kv, features=features)

    def expand(
        self,
        batch: Sequence[StepRows],
        cache: Cache,
        features: Tensor,
        shapes: Sequence[TreeShape],
    ) -> tuple[StepOutput, list[Expanded]]:
        """A tree on the last row of each request: ``expand_below`` for this head, and in one call
        unless a shape is fixed.

        batch: known tokens, a chain each of at least one; their ``logit_rows`` are not looked at.
        features: [R, F·h] of the target, of the position before each row. Returns the KV of the R
        rows, without logits, and B trees. Features with NaN in them make empty trees.
        """
        assert isinstance(cache, NativeCache)
        assert all(rows.tokens for rows in batch)
        roots = [replace(rows, logit_rows=[len(rows.tokens) - 1]) for rows in batch]
        if any(shape.fixed for shape in shapes):
            return expand_below(self, roots, cache, features, shapes)
        rows, output = Rows(roots, cache), _native.Output()
        words = [(shape.depth, shape.width, shape.nodes, shape.least) for shape in shapes]
        trees = _native.expand(
            self._model, cache.native, output, *rows.columns, _floats(features), words
        )
        none = torch.empty(0, self.draft_vocab)
        step = StepOutput(logits=none, new_kv=NativeKV(output=output, starts=rows.starts))
        return step, trees


def _words(config: Eagle3Config) -> dict[str, Any]:
    """A head's configuration in the words of the native step."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    return {
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "dim": config.dim,
        "inner": config.inner,
        "vocab": config.vocab,
        "features": config.features,
        "normed_residual": config.norm_before_residual,
        "eps": config.eps,
        "layer_norm": False,
        "gated": True,
        "parallel_residual": False,
        "activation": "silu",
        "query_scale": config.dim**-0.5,
        "attention_softcap": 0.0,
        "logit_softcap": 0.0,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "logit_scale": 1.0,
        "rotary": [((config.rope_theta**-exponents).numpy(), 1.0)],
    }


class _Packer:
    """A head's tensors as the native step takes them."""

    def __init__(self, weights: Eagle3Weights, format_: str) -> None:
        self._tensors = weights.tensors
        self._target_ids = weights.target_ids.tolist()
        self._format = format_

    def outer(self) -> dict[str, Any]:
        found = {
            "fuse": self._matrix("fc"),
            "head": self._matrix("lm_head"),
            "norm": self._vector("norm"),
            "target_ids": self._target_ids,
        }
        if "embed_tokens.weight" in self._tensors:
            found["embedding"] = self._matrix("embed_tokens")
        return found

    def layer(self) -> dict[str, Any]:
        query_key_value = [f"{_LAYER}self_attn.{part}_proj" for part in "qkv"]
        return {
            "qkv": self._matrix(*query_key_value),
            "out": self._matrix(_LAYER + "self_attn.o_proj"),
            "up": self._matrix(_LAYER + "mlp.gate_proj", _LAYER + "mlp.up_proj"),
            "down": self._matrix(_LAYER + "mlp.down_proj"),
            "before_attention": self._vector(_LAYER + "input_layernorm"),
            "hidden_norm": self._vector(_LAYER + "hidden_norm"),
            "before_mlp": self._vector(_LAYER + "post_attention_layernorm"),
        }

    def _vector(self, name: str) -> np.ndarray:
        return _floats(self._tensors[name + ".weight"])

    def _matrix(self, *names: str) -> tuple[str, list[tuple[str, np.ndarray]]]:
        """(format, [(how it is stored, rows), …]) of matrices one below the other."""
        parts = [("float32", self._vector(name)) for name in names]
        whole = parts[0][1].shape[1] % 32 == 0
        return self._format if whole else "float32", parts


def _floats(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().contiguous().numpy()
