"""``slipstream train``: from a target to a head with its card, in stages that each go on where a
killed run left them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.config import SamplingParams
from slipstream.errors import SlipstreamError
from slipstream.metrics import Metrics
from slipstream.runtimes.native import physical_cores
from slipstream.train import eagle3, features, loop, medusa, text
from slipstream.train.card import draw, write_card
from slipstream.train.config import SELF, TrainConfig
from slipstream.train.features import Entry
from slipstream.train.questions import read_questions
from slipstream.train.recorder import Reader, Recorder, recording
from slipstream.train.target import TargetParts, read_target
from slipstream.train.text import Conversation

_HELD_OUT = 64  # conversations, or a tenth where there are few
_LEAST_SHARE = 10
_LEAST_TOKENS = 1000  # of answers
_CHECKED_TOGETHER = 8
_TREE = {"path_floor": 0.05}  # a measured one would be this machine's
_CHAINS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {"tree_width": 1, "path_floor": 0.0, "num_speculative_tokens": 4},
    "medusa": {"tree": [[0] * depth for depth in range(1, 5)]},
}


class HeadTask(loop.Task, Protocol):
    """What is trained, and how it is kept."""

    def write(self, folder: Path) -> None: ...

    def describe(self) -> str:
        """What it is, in a sentence."""
        ...


class Recipe(Protocol):
    """How a method's heads are trained: one of the modules of that name."""

    def taps_of(self, config: TrainConfig, layers: int) -> Sequence[int]:
        """The layers that a head looks at; layers: of the target. The last one's output is kept in
        any case."""
        ...

    def task_of(
        self,
        target: TargetParts,
        config: TrainConfig,
        learnt: Sequence[Entry],
        check: Sequence[Sequence[features.Example]],
        common: Callable[[int], Sequence[int]],
        device: torch.device,
    ) -> HeadTask:
        """A new head, or the one to train on. common: how many → the commonest tokens of the
        answers, ascending."""
        ...


_RECIPES: Mapping[str, Recipe] = {"eagle3": eagle3, "medusa": medusa}
Bar = Callable[[str, int], Any]
"""(what, total) → a context; its value takes (done, a word on how it goes)."""


def train(
    llm: Any, config: TrainConfig, command: str, bar: Bar, notify: Callable[[str], None]
) -> dict[str, Any]:
    """Make a head for the target that ``llm`` decodes plainly; returns its folder and its τ.

    command: the user's, for the card.
    """
    runtime = llm.model.runtime
    target = read_target(llm.model.name)
    recipe = _RECIPES[config.method]
    if config.init:  # what doesn't fit is said as where it drafts
        llm.with_speculation({"method": config.method, "model": config.init})
    taps = recipe.taps_of(config, runtime.layers)
    if not all(0 <= layer <= runtime.layers for layer in taps):
        raise SlipstreamError(f"--taps {taps}: {target.name} has {runtime.layers} layers")
    _begin(llm, config)
    conversations = _text(llm, target, config, taps, bar)
    learnt, check = _features(llm, conversations, config, taps, bar, notify)
    device = runtime.embedding.device if hasattr(runtime, "embedding") else torch.device("cpu")
    torch.set_num_threads(llm.runtime_config.threads or physical_cores())  # native left one
    torch.manual_seed(config.options.seed)
    common = partial(text.draft_vocabulary, conversations)
    task = recipe.task_of(target, config, learnt, check, common, device)
    with bar("training", loop.steps_of(learnt, config.options)) as show:
        loop.fit(task, learnt, config.out / "state", config.options, show, device=device)
    head = config.out / "head"
    task.write(head)
    prompts = [c.prompt for c in conversations[:: _every(len(conversations))]]
    tau = measure(llm, config.method, head, prompts, bar)
    log = config.out / "state" / loop.LOG
    shutil.copyfile(log, head / loop.LOG)
    draw(head / "curves.png", loop.read_log(log))
    card = write_card(target, task.describe(), conversations, tau, command)
    (head / "README.md").write_text(card, encoding="utf-8")
    return {"head": str(head), "mean_tokens_per_step": tau}


def _begin(llm: Any, config: TrainConfig) -> None:
    """What a folder is made with is written into it; another run can't go on from it."""
    of_model = {"model": llm.model.name} | {
        key: getattr(llm.runtime_config, key) for key in ("runtime", "dtype", "quantization")
    }
    words = json.loads(json.dumps(of_model | config.as_dict()))
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / "run.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else words
    for key in words:
        if before.get(key) != words[key]:
            raise SlipstreamError(
                f"{config.out} holds a run with {key} {before.get(key)!r}, not {words[key]!r}: "
                "choose another --out"
            )
    path.write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def _text(
    llm: Any, target: TargetParts, config: TrainConfig, taps: Sequence[int], bar: Bar
) -> list[Conversation]:
    path = config.out / "text.jsonl"
    if config.data == SELF:
        recorder, reader = Recorder(taps, llm.model.runtime.layers), Reader(target)

        def example(conversation: Conversation) -> features.Example | None:
            rows = recorder.take(conversation)
            return None if rows is None else reader.example(conversation, rows)

        def keep(made: Sequence[Conversation]) -> None:
            features.keep(made, taps, config.out / "features", example)

        with bar("text of the model's own", config.tokens) as show:
            text.make(
                llm,
                path,
                answerer=recording(llm, recorder),
                on_round=keep,
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
    if len(found) < 2 or sum(len(c.answer) for c in found) < _LEAST_TOKENS:
        raise SlipstreamError(
            f"{config.data}: fewer than {_LEAST_TOKENS} tokens of answers to learn from; nothing "
            "was trained"
        )
    return found


def _features(
    llm: Any,
    conversations: Sequence[Conversation],
    config: TrainConfig,
    taps: Sequence[int],
    bar: Bar,
    notify: Callable[[str], None],
) -> tuple[list[Entry], list[list[features.Example]]]:
    """What is learnt, and what is held out, in batches."""
    folder = config.out / "features"
    needed = features.bytes_needed(conversations, llm.model.runtime.hidden_size, len(taps))
    notify(
        f"{len(conversations)} conversations, {sum(map(len, conversations)):,} tokens; their "
        f"features take {needed / 1e9:.1f} GB of {folder}"
    )
    with bar("features", len(conversations)) as show:
        for ready in features.compute(llm, conversations, taps, folder):
            show(ready, "")
    entries = list(features.entries(conversations, taps, folder))
    every = _every(len(entries))
    check = sorted((entry.load() for entry in entries[::every]), key=len)
    batches = [check[i : i + _CHECKED_TOGETHER] for i in range(0, len(check), _CHECKED_TOGETHER)]
    return [entry for i, entry in enumerate(entries) if i % every], batches


def _every(conversations: int) -> int:
    """One of so many is held out."""
    return max(conversations // _HELD_OUT, _LEAST_SHARE)


def measure(
    llm: Any, method: str, head: Path, prompts: Sequence[Sequence[int]], bar: Bar
) -> dict[str, float]:
    """τ of the head at work on held-out prompts, 128 tokens each: chain and tree, T = 0 and 1."""
    torch.set_num_threads(1)
    found = {}
    with bar("measuring", 4 * len(prompts)) as show:
        for shape, options in (("chain", _CHAINS[method]), ("tree", _TREE)):
            fast = llm.with_speculation({"method": method, "model": str(head), **options})
            for temperature in (0, 1):
                fast.engine.metrics = Metrics()
                params = SamplingParams(temperature=temperature, max_tokens=128, seed=0)
                for prompt in prompts:
                    fast.generate({"prompt_token_ids": list(prompt)}, params)
                    show(None, "")
                tau = fast.engine.metrics.mean_tokens_per_step
                found[f"{shape}, T={temperature}"] = round(tau, 3)
    return found
