"""``slipstream train``: from a target to a head with its card, in stages that each go on where a
killed run left them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.config import SamplingParams, require, require_integer, unknown
from slipstream.errors import SlipstreamError
from slipstream.metrics import Metrics
from slipstream.models import eagle3 as checkpoint
from slipstream.models.eagle3 import Eagle3Weights
from slipstream.runtimes.native import physical_cores
from slipstream.train import eagle3, features, loop, text
from slipstream.train.card import draw, write_card
from slipstream.train.features import Entry
from slipstream.train.loop import TrainOptions
from slipstream.train.questions import read_questions
from slipstream.train.target import TargetParts, read_target
from slipstream.train.text import Conversation

SELF = "self"
LOSSES = {"ce": 0.0, "ce+l1": 0.9}
_HELD_OUT = 64  # conversations, or a tenth where there are few
_LEAST_SHARE = 10
_LEAST_TOKENS = 1000  # of answers
_CHECKED_TOGETHER = 8
_CHAIN = {"tree_width": 1, "path_floor": 0.0, "num_speculative_tokens": 4}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """out: folder of the head and of everything that a resumed run needs. data: "self" or a JSONL
    file. tokens: of the training text where it is the target's own. keep_answers: those of the
    file. passes: of the training-time test. taps: layers to look at; () for the paper's."""

    out: Path
    data: str = SELF
    tokens: int = 700_000
    max_answer: int = 192
    keep_answers: bool = False
    draft_vocab: int = 8192
    passes: int = 4
    taps: Sequence[int] = ()
    loss: str = "ce"
    options: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("max_answer", 8), ("draft_vocab", 2), ("passes", 1)):
            require_integer(name, getattr(self, name), least)
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, tuple(LOSSES))
        for name, least in (("epochs", 1), ("tokens_per_step", 64)):
            require_integer(name, getattr(self.options, name), least)
        rate = self.options.learning_rate
        require(0 < rate < 1, "learning_rate", rate, "in (0, 1)")
        if self.keep_answers and self.data == SELF:
            raise SlipstreamError("--keep-answers is of a file: name it with --data")


Bar = Callable[[str, int], Any]
"""(what, total) → a context; its value takes (done, a word on how it goes)."""


def train(
    llm: Any, config: TrainConfig, command: str, bar: Bar, notify: Callable[[str], None]
) -> dict[str, Any]:
    """Make a head for the target that ``llm`` decodes plainly; returns its folder and its τ.

    command: the user's, for the card.
    """
    target = read_target(llm.model.name)
    taps = tuple(config.taps) or checkpoint.default_taps(llm.model.runtime.layers)
    config.out.mkdir(parents=True, exist_ok=True)
    conversations = _text(llm, config, bar)
    needed = features.bytes_needed(conversations, llm.model.runtime.hidden_size, len(taps))
    notify(
        f"{len(conversations)} conversations, {sum(map(len, conversations)):,} tokens; their "
        f"features take {needed / 1e9:.1f} GB of {config.out / 'features'}"
    )
    with bar("features", len(conversations)) as show:
        for ready in features.compute(llm, conversations, taps, config.out / "features"):
            show(ready, "")
    entries = list(features.entries(conversations, taps, config.out / "features"))
    head = _fit(target, taps, conversations, entries, config, bar)
    return _finish(llm, config, head, conversations, command, bar)


def _text(llm: Any, config: TrainConfig, bar: Bar) -> list[Conversation]:
    path = config.out / "text.jsonl"
    if config.data == SELF:
        with bar("text of the model's own", config.tokens) as show:
            text.make(
                llm,
                path,
                tokens=config.tokens,
                max_tokens=config.max_answer,
                seed=config.options.seed,
                report=lambda tokens: show(tokens, "tokens"),
            )
    else:
        questions = read_questions(Path(config.data))
        with bar("answers", len(questions)) as show:
            text.answer_all(
                llm,
                path,
                questions,
                max_tokens=config.max_answer,
                keep=config.keep_answers,
                seed=config.options.seed,
                report=lambda done: show(done, ""),
            )
    found = list(text.read(path))
    if sum(len(c.answer) for c in found) < _LEAST_TOKENS:
        raise SlipstreamError(
            f"{config.data}: fewer than {_LEAST_TOKENS} tokens of answers to learn from; nothing "
            "was trained"
        )
    return found


def _fit(
    target: TargetParts,
    taps: Sequence[int],
    conversations: Sequence[Conversation],
    entries: Sequence[Entry],
    config: TrainConfig,
    bar: Bar,
) -> Eagle3Weights:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(physical_cores())  # the native runtime left one
    torch.manual_seed(config.options.seed)
    ids = eagle3.draft_vocabulary(conversations, config.draft_vocab)
    module = eagle3.initial(target, eagle3.config_of(target, taps, len(ids)), ids).to(device)
    every = max(len(entries) // _HELD_OUT, _LEAST_SHARE)
    check = sorted((e.load() for e in entries[::every]), key=len)
    task = eagle3.Eagle3Task(
        module,
        eagle3.Collate(target, ids, config.passes, device),
        [check[i : i + _CHECKED_TOGETHER] for i in range(0, len(check), _CHECKED_TOGETHER)],
        passes=config.passes,
        l1=LOSSES[config.loss],
    )
    learnt = [entry for i, entry in enumerate(entries) if i % every]
    folder = config.out / "state"
    with bar("training", loop.steps_of(learnt, config.options)) as show:
        loop.fit(task, learnt, folder, config.options, show, device=device)
    return eagle3.weights_of(module, ids, torch.float16)


def _finish(
    llm: Any,
    config: TrainConfig,
    head: Eagle3Weights,
    conversations: Sequence[Conversation],
    command: str,
    bar: Bar,
) -> dict[str, Any]:
    """Write the head, measure it at work, and tell about it in a card beside it."""
    folder = config.out / "head"
    checkpoint.write(folder, head, speculative_tokens=config.passes)
    every = max(len(conversations) // _HELD_OUT, _LEAST_SHARE)
    tau = measure(llm, folder, [c.prompt for c in conversations[::every]], bar)
    log = config.out / "state" / loop.LOG
    shutil.copyfile(log, folder / loop.LOG)
    draw(folder / "curves.png", loop.read_log(log))
    card = write_card(head.config, conversations, tau, command)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return {"head": str(folder), "mean_tokens_per_step": tau}


def measure(llm: Any, folder: Path, prompts: Sequence[Sequence[int]], bar: Bar) -> dict[str, float]:
    """τ of the head at work on held-out prompts, 128 tokens each: chain and tree, T = 0 and 1."""
    torch.set_num_threads(1)
    found = {}
    with bar("measuring", 4 * len(prompts)) as show:
        for shape, options in (("chain", _CHAIN), ("tree", {})):
            fast = llm.with_speculation({"method": "eagle3", "model": str(folder), **options})
            for temperature in (0, 1):
                fast.engine.metrics = Metrics()
                params = SamplingParams(temperature=temperature, max_tokens=128, seed=0)
                for prompt in prompts:
                    fast.generate({"prompt_token_ids": list(prompt)}, params)
                    show(None, "")
                tau = fast.engine.metrics.mean_tokens_per_step
                found[f"{shape}, T={temperature}"] = round(tau, 3)
    return found
