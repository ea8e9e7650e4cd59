"""Training of Medusa heads: which row teaches which head, where they start, that they learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from train.tiny_training import examples, steps, target, task

from slipstream.models import medusa as checkpoint
from slipstream.train import loop, medusa
from slipstream.train.config import TrainOptions
from slipstream.train.features import Example

CPU = torch.device("cpu")


def example_of(start: int, length: int, best: list[int]) -> Example:
    last = torch.randn(length, target().config.hidden_size).half()
    wanted = torch.tensor([-1] * (start - 1) + best, dtype=torch.int32)
    assert len(wanted) == length
    return Example(
        tokens=torch.arange(length, dtype=torch.int32),
        start=start,
        features=last,
        last=last,
        best=wanted,
    )


def test_heads_begin_as_the_lm_head() -> None:
    """Every residual block adds nothing, so a head says what the target says of token t + 1."""
    ids = [3, 5, 8, 100]
    hidden = torch.randn(7, target().config.hidden_size)
    for shared in (True, False):
        module = task(ids=ids, shared=shared).module
        want = hidden @ target().lm_head[torch.tensor(ids)].T
        for logits in module(hidden):
            torch.testing.assert_close(logits, want)


def test_which_row_learns_what() -> None:
    """Against a plain loop over positions: head i at token t learns token t + 2 + i."""
    ids = [3, 5, 8, 100]
    some = [
        example_of(4, 9, [5, 3, 8, 7, 100, 3]),  # 7 can't be said
        example_of(2, 4, [8, 3, 5]),
        example_of(3, 4, [3, 5]),
    ]
    batch = medusa.Collate(target(), ids, CPU)(some)
    pairs: dict[int, list[tuple[Tensor, Tensor, int]]] = {0: [], 1: [], 2: []}
    for e in some:
        normed = target().normed(e.last)
        for t in range(e.start - 1, len(e) - 1):
            for head in pairs:
                row = t + 1 + head  # its logits are of token t + 2 + head
                if row < len(e) and int(e.best[row]) in ids:
                    logits = target().lm_head[torch.tensor(ids)] @ normed[row]
                    best = ids.index(int(e.best[row]))
                    pairs[head].append((normed[t], logits.softmax(-1), best))
    for head, want in pairs.items():
        rows = batch.rows(head)
        assert len(rows) == len(want) > 0
        torch.testing.assert_close(batch.hidden[rows], torch.stack([h for h, _, _ in want]))
        torch.testing.assert_close(batch.probs[rows + head], torch.stack([p for _, p, _ in want]))
        assert batch.best[rows + head].tolist() == [b for _, _, b in want]


def test_the_loss_is_the_weighted_mean_of_the_heads() -> None:
    batch = medusa.Collate(target(), range(40), CPU)(examples()[:3])
    module = task(ids=range(40), heads=2).module
    assert isinstance(module, medusa.MedusaModule)
    means = []
    for head in range(2):
        rows = batch.rows(head)
        with torch.autocast("cpu", torch.bfloat16):
            log_q = module(batch.hidden[rows])[head].float().log_softmax(-1)
        means.append(-(batch.probs[rows + head] * log_q).sum(-1).mean())
    want = (means[0] + 0.8 * means[1]) / 1.8
    torch.testing.assert_close(medusa.training_loss(module, batch, 0.0), want)


def test_a_batch_without_anything_to_say() -> None:
    short = example_of(3, 3, [5])
    for ids, batch in (([3, 4], [example_of(2, 4, [9, 9, 9])]), ([3, 5], [short])):
        made = task(ids=ids)
        loss = made.loss(batch, 0.0)
        loss.backward()
        assert loss.item() == 0


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("l1", [0.0, 0.9])
def test_a_tiny_batch_is_learnt_by_heart(shared: bool, l1: float) -> None:
    """Down to what even the target doesn't know: the entropy of its own distributions."""
    greedy = examples()[:6:2]
    made = task(shared=shared, l1=l1)
    losses = steps(made, greedy, 120)
    assert all(b < a for a, b in zip(losses[::40], losses[40::40], strict=False))
    check = medusa.Collate(target(), range(target().config.vocab_size), CPU)(greedy)
    assert isinstance(made.module, medusa.MedusaModule)
    acceptance = medusa.held_out(made.module, [check])
    assert len(acceptance) == 3
    assert acceptance[0] > 0.85
    assert acceptance == sorted(acceptance, reverse=True)


def test_held_out_acceptance_is_that_of_chains() -> None:
    """Against a plain loop: each row's chain counts as far as it is right."""
    made = task(heads=3)
    steps(made, examples()[6:], 10)
    module = made.module
    reached, total = [0, 0, 0], 0
    for e in examples()[:6]:
        normed = target().normed(e.last)
        for t in range(e.start - 1, len(e) - 1):
            total += 1
            guesses = module(normed[t]).argmax(-1).tolist()
            for head, guess in enumerate(guesses):
                row = t + 1 + head
                if row >= len(e) or guess != int(e.best[row]):
                    break
                reached[head] += 1
    assert made.held_out() == [r / total for r in reached]
    assert reached[0] > 0


def test_heads_go_to_disk_and_back(tmp_path: Path) -> None:
    ids = [3, 5, 8, 100]
    for shared in (True, False):
        module = task(ids=ids, shared=shared).module
        assert isinstance(module, medusa.MedusaModule)
        heads = medusa.weights_of(module, ids, torch.float16)
        checkpoint.write(tmp_path / "heads", heads)
        again = checkpoint.read(tmp_path / "heads", "heads")
        assert again.shape == module.shape
        assert again.target_ids.tolist() == ids
        for name, parameter in module.named_parameters():
            assert torch.equal(again.tensors[name], parameter.half())


def test_the_task_runs_in_the_training_loop(tmp_path: Path) -> None:
    class Held:
        """An entry that is in memory already."""

        def __init__(self, example: Example) -> None:
            self._example = example

        def __len__(self) -> int:
            return len(self._example)

        def load(self) -> Example:
            return self._example

    made = task()
    before = made.held_out()
    entries = [Held(e) for e in examples()[6:]]
    options = TrainOptions(epochs=12, tokens_per_step=256, learning_rate=3e-3)
    loop.fit(made, entries, tmp_path, options, lambda *_: None, device=CPU)  # type: ignore[arg-type]
    (row,) = loop.read_log(tmp_path / loop.LOG)
    assert row["tau"] == pytest.approx(1 + sum(made.held_out()), abs=0.02)  # bfloat16 in the loop
    assert sum(made.held_out()) > 2 * sum(before)
