"""Draft heads on disk: what their formats have in common.

Shapes: d draft vocabulary · V the target's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError

Shapes = Mapping[str, tuple[int, ...]]


def read_words(path: Path, name: str) -> dict[str, Any]:
    """A config.json; ``name`` is the user's word for the head in errors, here and below."""
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SlipstreamError(f"{name}: {path} can't be read: {error}") from error
    if not isinstance(words, dict):
        raise SlipstreamError(f"{name}: {path} is not a JSON object")
    return words


def read_pickled(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors that ``torch.save`` wrote; no code in the file is run."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise SlipstreamError(f"{name}: {path} can't be read: {error}") from error
    if not isinstance(loaded, dict):
        raise SlipstreamError(f"{name}: {path} holds no tensors by name")
    return {key: value for key, value in loaded.items() if isinstance(value, Tensor)}


def read_safetensors(path: Path, name: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise SlipstreamError(f"{name}: {path} can't be read: {error}") from error


def check_tensors(
    tensors: Mapping[str, Tensor], wanted: Shapes, allowed: Shapes, kind: str, name: str
) -> None:
    """Raise SlipstreamError naming what is missing, unknown, of another shape or no number.

    allowed: all of ``wanted``, and what may be there besides. kind: of head, as errors call it.
    """
    for what, keys in (
        ("lacks", sorted(wanted.keys() - tensors.keys())),
        (f"has, and {kind} has not,", sorted(tensors.keys() - allowed.keys())),
    ):
        if keys:
            shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
            raise SlipstreamError(f"{name}: the checkpoint {what} {shown}")
    for key, tensor in sorted(tensors.items()):
        if tuple(tensor.shape) != allowed[key]:
            raise SlipstreamError(
                f"{name}: {key} is {list(tensor.shape)}, by its config.json {list(allowed[key])}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise SlipstreamError(f"{name}: {key} holds numbers that are none (NaN or infinity)")


def check_maps(tensors: Mapping[str, Tensor], vocab: int, name: str) -> None:
    """d2t and t2d must be one map: offsets to ids in ascending order, and the mask of those ids."""
    ids = target_ids(tensors["d2t"])
    if not bool(((ids >= 0) & (ids < vocab)).all()):
        raise SlipstreamError(f"{name}: d2t leads out of the vocabulary of {vocab} tokens")
    mask = _mask(ids, vocab)
    if not bool((ids[1:] > ids[:-1]).all()):
        raise SlipstreamError(f"{name}: d2t leads to tokens twice, or not in ascending order")
    if not torch.equal(mask, tensors["t2d"].bool()):
        raise SlipstreamError(f"{name}: t2d doesn't mark the tokens that d2t leads to")


def target_ids(d2t: Tensor) -> Tensor:
    """[d]: the target's id of each token of the draft vocabulary."""
    return torch.arange(len(d2t)) + d2t.long()


def vocabulary_maps(ids: Sequence[int], vocab: int) -> tuple[Tensor, Tensor]:
    """(d2t, t2d) of a draft vocabulary, its target ids ascending."""
    used = torch.tensor(list(ids), dtype=torch.int64)
    assert bool((used[1:] > used[:-1]).all())
    return used - torch.arange(len(used)), _mask(used, vocab)


def _mask(ids: Tensor, vocab: int) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    return mask


def write(folder: Path, file: str, tensors: Mapping[str, Tensor], words: Mapping[str, Any]) -> None:
    """Tensors to ``file`` and words to config.json. The folder appears complete or not at all; a
    killed write may leave the former one under another name."""
    from safetensors.torch import save_file

    temporary, old = (folder.with_name(folder.name + end) for end in (".part", ".old"))
    if folder.is_dir() and old.is_dir():  # of a write that was killed
        shutil.rmtree(old)
    if temporary.is_dir():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    own = {key: value.clone().contiguous() for key, value in tensors.items()}  # none shared
    save_file(own, temporary / file, metadata={"format": "pt"})
    text = json.dumps(words, indent=2) + "\n"
    (temporary / "config.json").write_text(text, encoding="utf-8")
    if folder.is_dir():
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)
    else:
        temporary.rename(folder)
