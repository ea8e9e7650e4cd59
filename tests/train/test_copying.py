"""What a new EAGLE-3 head is like before it is trained: it copies, whatever is divided by what."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
import torch
from train.tiny_training import target, with_features

from slipstream.models.eagle3_module import Eagle3Module, rotate
from slipstream.runtimes.torch_head import eagle3_head
from slipstream.train import copying
from slipstream.train import eagle3 as recipe
from slipstream.train.eagle3_loss import Batch, Collate
from slipstream.train.features import Example
from slipstream.train.text import Conversation

TAPS = (0, 1, 2)


@functools.cache
def examples() -> Sequence[Example]:
    """Text that says the same again and again, in another order."""
    random = torch.Generator().manual_seed(0)
    vocab = target().config.vocab_size
    parts = torch.randint(1, vocab, (6, 5), generator=random)
    conversations = []
    for _ in range(24):
        tokens = parts[torch.randint(6, (8,), generator=random)].flatten().tolist()
        conversations.append(Conversation(prompt=tokens[:10], answer=tokens[10:]))
    return with_features(conversations, TAPS)


def new_head(draft_vocab: int) -> tuple[Eagle3Module, Collate]:
    ids = list(range(draft_vocab))
    config = recipe.config_of(target(), TAPS, draft_vocab)
    known = copying.sample(examples(), config.hidden)
    torch.manual_seed(0)
    module = recipe.initial(target(), config, ids, known)
    return module, Collate(target(), ids, known.size, 2, torch.device("cpu"))


def loss_of(module: Eagle3Module, batch: Batch) -> float:
    with torch.no_grad():
        hidden = module.fuse(batch.features)
        return copying.attention_loss(module, batch.tokens, hidden, batch.inside).item()


def test_a_new_head_finds_what_followed_the_newest_token() -> None:
    module, collate = new_head(target().config.vocab_size)
    batch = collate(examples()[:8])
    found = loss_of(module, batch)
    for part in (module.layer.self_attn.q_proj, module.layer.self_attn.k_proj):
        torch.nn.init.normal_(part.weight, std=0.05)
    assert found < 0.5 * loss_of(module, batch)


def test_the_loss_is_of_rows_that_hold_what_comes_next() -> None:
    """Row by row and head by head, with padding in the batch."""
    module, collate = new_head(target().config.vocab_size)
    short = examples()[1]
    cut = Example(
        **{k: getattr(short, k)[:17] for k in ("tokens", "features", "last", "best")}, start=10
    )
    batch = collate([examples()[0], cut])
    layer, dim = module.layer, module.config.dim
    count = copying.heads_for(module.config.hidden, dim, module.config.draft_vocab)
    losses = []
    for example in (examples()[0], cut):
        tokens = example.tokens.long()
        embedded = layer.input_layernorm(target().embedding[tokens[1:]])
        hidden = module.fuse(example.features[:-1].float() / collate.size)
        both = torch.cat([embedded, layer.hidden_norm(hidden)], -1)
        turn = layer.self_attn.turn(torch.arange(len(tokens) - 1)[None])
        query, key = (
            rotate(part(both).unflatten(-1, (-1, dim)).transpose(0, 1)[None], *turn)[0]
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
        for head in range(module.config.heads - count, module.config.heads):
            for row in range(len(tokens) - 2):
                shares = (key[head, : row + 1] @ query[head, row] / math.sqrt(dim)).softmax(-1)
                right = [
                    share
                    for at, share in enumerate(shares)
                    if tokens[at] == tokens[row + 1] and tokens[at + 1] == tokens[row + 2] and at
                ]
                if right:
                    losses.append(-sum(right).log().clamp_min(-12))
    want = torch.stack(losses).clamp_max(12).mean().item()
    assert loss_of(module, batch) == pytest.approx(want, rel=1e-4)


def test_what_features_are_divided_by_is_in_the_weights_on_disk() -> None:
    module, collate = new_head(40)
    example = examples()[0]
    written = recipe.weights_of(module, range(40), collate.size, torch.float32)
    have = eagle3_head(written, target().embedding).fuse(example.features.float())
    want = module.fuse(example.features.float() / collate.size)
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("draft_vocab", [5, 40])
def test_a_new_head_leaves_its_target_as_it_is(draft_vocab: int) -> None:
    before = {name: tensor.clone() for name, tensor in target().layer.items()}
    new_head(draft_vocab)
    for name, tensor in before.items():
        assert torch.equal(target().layer[name], tensor), name


def test_a_draft_vocabulary_too_small_for_such_heads() -> None:
    module, collate = new_head(5)
    assert module.config.heads == target().config.num_attention_heads
    assert loss_of(module, collate(examples()[:2])) == 0.0


def test_questions_count_where_the_first_pass_is_alone() -> None:
    _, collate = new_head(target().config.vocab_size)
    batch, more = (collate(examples()[:3], questions=asked) for asked in (False, True))
    assert torch.equal(batch.counts, more.counts & (torch.arange(more.counts.shape[1]) >= 8))
    assert more.counts[:, :8].all()
    assert len(more.probs) == more.counts.sum() > len(batch.probs)
