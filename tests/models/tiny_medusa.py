"""Random Medusa heads, and the files that FasterDecoding publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.models.head_files import vocabulary_maps
from slipstream.models.medusa import MedusaHeads, MedusaShape

PLAIN = MedusaShape(heads=3, layers=1, hidden=32, vocab=50, draft_vocab=50)
SHAPES = {
    "plain": PLAIN,
    "two layers": MedusaShape(heads=2, layers=2, hidden=32, vocab=50, draft_vocab=50),
    "no layers": MedusaShape(heads=2, layers=0, hidden=32, vocab=50, draft_vocab=50),
    "reduced": MedusaShape(heads=3, layers=1, hidden=32, vocab=50, draft_vocab=12, verifier="t"),
    "shared": MedusaShape(heads=3, layers=1, hidden=32, vocab=50, draft_vocab=50, shared=True),
    "both": MedusaShape(heads=4, layers=2, hidden=32, vocab=50, draft_vocab=12, shared=True),
}


def random_heads(shape: MedusaShape = PLAIN, seed: int = 0, scale: float = 0.3) -> MedusaHeads:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: scale * torch.randn(size, generator=generator)
        for name, size in shape.shapes().items()
    }
    if shape.reduced:
        ids = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab].sort().values
        tensors["d2t"], tensors["t2d"] = vocabulary_maps(ids.tolist(), shape.vocab)
    return MedusaHeads(shape=shape, tensors=tensors)


def save_published(
    folder: Path, tensors: Mapping[str, Tensor], *, pickled: bool, prefix: str = "", **words: Any
) -> Path:
    """As FasterDecoding's repository does: a config without sizes."""
    folder.mkdir(parents=True)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/x"}
    (folder / "config.json").write_text(json.dumps(config | words))
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    if pickled:
        torch.save(named, folder / "medusa_lm_head.pt")
    else:
        save_file(named, folder / "medusa_lm_head.safetensors")
    return folder
