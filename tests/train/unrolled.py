"""Training-time test by its definition: every row in every pass, under one mask."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.eagle3_module import Eagle3Module
from slipstream.train.eagle3_loss import Batch


def seen(rows: int, index: int) -> Tensor:
    """[T, T·(index + 1)]: what the rows of pass ``index`` attend to.

    Of pass 0, whose rows are committed by then, what lies further back than the draft; of each
    later pass its own ancestor, one a pass.
    """
    s, t = torch.arange(rows)[:, None], torch.arange(rows)[None]
    first = t <= s - index
    return torch.cat([first, *(t == s - (index - j) for j in range(1, index + 1))], 1)


def unroll(module: Eagle3Module, batch: Batch, passes: int) -> list[Tensor]:
    """Logits of each pass at the rows that count, [N, d]."""
    hidden = module.fuse(batch.features)
    rows = batch.tokens.shape[1]
    device = batch.tokens.device
    positions = torch.arange(rows, device=device).expand(batch.tokens.shape)
    past, logits = None, []
    for index in range(passes):
        mask = seen(rows, index).to(device)
        out, past = module(batch.tokens, hidden, positions, mask, past)
        logits.append(module.logits(out[batch.counts]))
        hidden = out.roll(1, dims=1)
    return logits
