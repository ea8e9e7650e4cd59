"""Medusa heads on disk: the checkpoint format of FasterDecoding/Medusa, and two words of our own.

Medusa (Cai et al. 2024, arXiv 2401.10774) guesses several tokens at once from what the target's LM
head sees: one small head a position. Full output layers are most of a small target's size, so
config.json may also say

- ``draft_vocab_size``: output layers over fewer tokens, with the maps d2t and t2d of EAGLE-3;
- ``medusa_shared_lm_head``: one output layer, ``lm_head.weight``, for all heads.

Shapes: h hidden · d draft vocabulary, V where it is not reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models import head_files

_FILE = "medusa_lm_head.safetensors"
_PICKLED = "medusa_lm_head.pt"
_PREFIX = "medusa_head."  # of some checkpoints' names
_SHARED = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class MedusaShape:
    """heads: K, one a drafted position. layers: residual blocks of each. vocab: V of the target.
    draft_vocab: d. shared: one output layer for all heads. verifier: the target's name or path, ""
    if not told."""

    heads: int
    layers: int
    hidden: int
    vocab: int
    draft_vocab: int
    shared: bool = False
    verifier: str = ""

    @property
    def reduced(self) -> bool:
        return self.draft_vocab != self.vocab

    def shapes(self) -> dict[str, tuple[int, ...]]:
        h = self.hidden
        found: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            for layer in range(self.layers):
                found[f"{head}.{layer}.linear.weight"] = (h, h)
                found[f"{head}.{layer}.linear.bias"] = (h,)
            if not self.shared:
                found[f"{head}.{self.layers}.weight"] = (self.draft_vocab, h)
        if self.shared:
            found[_SHARED] = (self.draft_vocab, h)
        if self.reduced:
            found |= {"d2t": (self.draft_vocab,), "t2d": (self.vocab,)}
        return found


@dataclass(frozen=True, kw_only=True)
class MedusaHeads:
    """tensors: by name, as in ``MedusaShape.shapes``."""

    shape: MedusaShape
    tensors: Mapping[str, Tensor]

    @property
    def target_ids(self) -> Tensor:
        """[d]: the target's id of each token of the draft vocabulary, ascending."""
        if self.shape.reduced:
            return head_files.target_ids(self.tensors["d2t"])
        return torch.arange(self.shape.vocab)


def read(folder: Path, name: str) -> MedusaHeads:
    """Read heads; ``name`` is the user's word for them in errors.

    Raises SlipstreamError naming what is missing, of another shape, out of range or no number.
    """
    words = head_files.read_words(folder / "config.json", name)
    tensors = _tensors(folder, name)
    shape = _shape(words, tensors, name)
    wanted = shape.shapes()
    head_files.check_tensors(tensors, wanted, wanted, "Medusa", name)
    if shape.reduced:
        head_files.check_maps(tensors, shape.vocab, name)
    return MedusaHeads(shape=shape, tensors=tensors)


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    if (folder / _FILE).is_file():
        tensors = head_files.read_safetensors(folder / _FILE, name)
    elif (folder / _PICKLED).is_file():
        tensors = head_files.read_pickled(folder / _PICKLED, name)
    else:
        raise SlipstreamError(f"{name}: {folder} has neither {_FILE} nor {_PICKLED}")
    return {key.removeprefix(_PREFIX): value for key, value in tensors.items()}


def _shape(words: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> MedusaShape:
    """Published configs leave sizes out, and say 2 heads where the file holds 5: what the tensors
    show counts then."""
    layers = words.get("medusa_num_layers")
    if not isinstance(layers, int) or not isinstance(words.get("medusa_num_heads"), int):
        raise SlipstreamError(
            f"{name}: config.json lacks medusa_num_heads or medusa_num_layers: no Medusa heads"
        )
    numbers = [int(first) for first in (k.split(".")[0] for k in tensors) if first.isdecimal()]
    heads = max([words["medusa_num_heads"], *(number + 1 for number in numbers)])
    if layers < 0 or not 1 <= heads <= len(tensors):
        raise SlipstreamError(f"{name}: {heads} heads of {layers} layers in {len(tensors)} tensors")
    shared = words.get("medusa_shared_lm_head", False)
    output = tensors.get(_SHARED if shared else f"0.{layers}.weight")
    if output is None or output.dim() != 2:
        what = "no" if output is None else "an odd"
        raise SlipstreamError(f"{name}: the checkpoint has {what} output layer for head 0")
    draft_vocab = words.get("draft_vocab_size")
    return MedusaShape(
        heads=heads,
        layers=layers,
        hidden=words.get("hidden_size") or output.shape[1],
        vocab=words.get("vocab_size") or output.shape[0],
        draft_vocab=draft_vocab or words.get("vocab_size") or output.shape[0],
        shared=shared,
        verifier=words.get("base_model_name_or_path") or "",
    )


def write(folder: Path, heads: MedusaHeads) -> None:
    """Write heads as FasterDecoding does. The folder appears complete or not at all."""
    head_files.write(folder, _FILE, heads.tensors, _words(heads.shape))


def _words(shape: MedusaShape) -> dict[str, Any]:
    """config.json; our own words only where they say something."""
    words: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": shape.heads,
        "medusa_num_layers": shape.layers,
        "base_model_name_or_path": shape.verifier,
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
    }
    if shape.reduced:
        words["draft_vocab_size"] = shape.draft_vocab
    if shape.shared:
        words["medusa_shared_lm_head"] = True
    return words
