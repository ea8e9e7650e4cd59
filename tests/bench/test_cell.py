"""A cell: the sides take turns, failures are counted and never timed, peers stand beside us."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_llm
from fake_peer import FakePeer

from slipstream import SamplingParams, SlipstreamError
from slipstream.bench import cell as cell_module
from slipstream.bench.cell import Cell, PeerSide, Side
from slipstream.bench.suite import Prompt
from slipstream.engine import Engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}
PROMPTS = [
    Prompt(category="a", token_ids=[10, 6, 7, 8, 6, 7]),
    Prompt(category="b", token_ids=[11, 9, 5]),
    Prompt(category="a", token_ids=[12, 20, 21, 20, 21]),
]


def make(
    temperature: float = 0.0,
    prompts: list[Prompt] = PROMPTS,
    concurrency: int = 1,
    peers: list[PeerSide] | None = None,
    notify: Callable[[str], None] = lambda line: None,
    **llm_options: Any,
) -> Cell:
    plain = tiny_llm.llm(**llm_options)
    return Cell(
        sides=[
            Side(method="plain", engine=plain.engine),
            Side(method="ngram", engine=plain.with_speculation(NGRAM).engine),
        ],
        peers=peers or [],
        prompts=prompts,
        params=lambda number: SamplingParams(
            temperature=temperature, max_tokens=16, seed=5 + number
        ),
        concurrency=concurrency,
        notify=notify,
    )


def spy(cell: Cell, monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    """Note each pass: the side's method, its prompts, the tokens asked for."""
    drive = cell_module.drive
    method_of = {id(side.engine): side.method for side in cell.sides}

    def noted(engine: Engine, prompts: Any, params: Any, *rest: Any, **more: Any) -> Any:
        wanted = {params(number).max_tokens for number in prompts}
        log.append((method_of[id(engine)], list(prompts), *wanted))
        return drive(engine, prompts, params, *rest, **more)

    monkeypatch.setattr(cell_module, "drive", noted)


def fail(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, method: str, first_token: int, at_least: int = 0
) -> None:
    """Let every step of a side fail in which this prompt takes part, once it has an output."""
    step = Engine.step
    engine = next(side.engine for side in cell.sides if side.method == method)

    def failing(self: Engine) -> Any:
        for request in self.scheduler.running if self is engine else []:
            if request.tokens[0] == first_token and request.output_length >= at_least:
                raise RuntimeError("no memory left")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)


def test_sides_take_turns_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, log, saved = make(), [], []  # type: ignore[var-annotated]
    spy(cell, monkeypatch, log)
    cell.measure(3, lambda: saved.append(len(cell.rounds)))
    both = [("plain", [0, 1, 2], 16), ("ngram", [0, 1, 2], 16)]
    assert log == [("plain", [0], 4), ("ngram", [0], 4), *both, *both, *both]
    assert saved == [1, 2, 3]


def test_runs_agree_with_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = make()
    assert cell.figures() == []
    cell.measure(3, lambda: None)
    plain, ngram = cell.figures()
    assert (plain["engine"], plain["method"], plain["failures"]) == ("slipstream", "plain", 0)
    assert (ngram["method"], ngram["identical_to_plain"]) == ("ngram", 3)
    assert plain["identical_to_plain"] is plain["speedup_vs_plain"] is None
    assert plain["mean_tokens_per_step"] == 1 < ngram["mean_tokens_per_step"]
    assert plain["acceptance_by_position"] == []
    assert len(ngram["acceptance_by_position"]) == 3
    ratios = sorted(a.seconds / b.seconds for a, b in cell.rounds)
    found = ngram["speedup_vs_plain"]
    assert [found["min"], found["median"], found["max"]] == pytest.approx(ratios, abs=1e-4)
    assert {name: part["prompts"] for name, part in ngram["by_category"].items()} == {
        "a": 2,
        "b": 1,
    }


def test_sampled_texts_are_not_called_identical_or_different() -> None:
    cell = make(temperature=1.0)
    cell.measure(1, lambda: None)
    assert [run["identical_to_plain"] for run in cell.figures()] == [None, None]
    plain, ngram = cell.rounds[0]
    texts = [[answer.token_ids for answer in found.answers.values()] for found in (plain, ngram)]
    assert texts[0] == texts[1]  # the same seed for a prompt on every side
    assert len({tuple(text or ()) for text in texts[0]}) == 3  # and another for each prompt


@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_a_prompt_that_fails_is_counted_and_timed_nowhere(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    cell = make(notify=said.append)
    fail(cell, monkeypatch, method, first_token=11, at_least=5)  # beyond the warm-up
    cell.measure(2, lambda: None)
    assert all(list(found.answers) == [0, 2] for passes in cell.rounds for found in passes)
    assert len(cell.rounds) == 2
    runs = {run["method"]: run for run in cell.figures()}
    assert {name: run["failures"] for name, run in runs.items()} == {
        "plain": int(method == "plain"),
        "ngram": int(method == "ngram"),
    }
    assert all(run["prompts"] == 2 for run in runs.values())
    assert set(runs["plain"]["by_category"]) == {"a"}
    assert said == [f"prompt 2 (b) failed with {method}: RuntimeError: no memory left"]


def test_a_late_failure_throws_the_earlier_rounds_away(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, saved = make(), []

    def on_round() -> None:
        saved.append([len(found.answers) for found in cell.rounds[-1]] if cell.rounds else [])
        if len(saved) == 1:
            fail(cell, monkeypatch, "ngram", first_token=12)

    cell.measure(2, on_round)
    assert saved == [[3, 3], [], [2, 2], [2, 2]]


def test_a_prompt_beyond_the_context_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    long = Prompt(category="long", token_ids=[5] * 40)
    cell = make(prompts=[PROMPTS[0], long], notify=said.append, max_model_len=32)
    log: list[Any] = []
    spy(cell, monkeypatch, log)
    cell.measure(1, lambda: None)
    assert all(numbers == [0] for _, numbers, _ in log)
    assert [(run["prompts"], run["failures"]) for run in cell.figures()] == [(1, 1), (1, 1)]
    assert len(said) == 1
    assert "prompt 2 (long) failed" in said[0]
    with pytest.raises(SlipstreamError, match="every prompt failed"):
        make(prompts=[long], max_model_len=32).measure(1, lambda: None)


def test_nothing_is_measured_if_everything_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = make()
    for prompt in PROMPTS:
        fail(cell, monkeypatch, "ngram", prompt.token_ids[0])
    with pytest.raises(SlipstreamError, match=r"every prompt failed.*no memory left"):
        cell.measure(2, lambda: None)


def test_peers_take_their_turn_with_texts_of_our_length(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    peers = [
        PeerSide(name="other", peer=FakePeer(seconds=4.0, log=log)),
        PeerSide(name="other", peer=FakePeer("lookup", seconds=2.0, log=log)),
    ]
    cell = make(peers=peers)
    spy(cell, monkeypatch, log)
    cell.measure(2, lambda: None)
    round_ = ["plain", "ngram", *["peer plain"] * 3, *["peer lookup"] * 3]
    warm_up = ["plain", "ngram", "peer plain", "peer lookup"]
    assert [entry[0] for entry in log] == [*warm_up, *round_, *round_]
    lengths = [answer.output_tokens for answer in cell.rounds[0][0].answers.values()]
    asked = [(tokens, count) for name, tokens, count in log[6:9]]
    assert asked == [
        (prompt.token_ids, length) for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]


def test_a_peer_is_compared_with_itself_and_with_us() -> None:
    peers = [
        PeerSide(name="other", peer=FakePeer(seconds=4.0)),
        PeerSide(name="other", peer=FakePeer("lookup", seconds=2.0)),
        PeerSide(name="lone", peer=FakePeer("lookup", seconds=1.0)),
    ]
    cell = make(peers=peers)
    cell.measure(2, lambda: None)
    ours, _, plain, lookup, lone = cell.figures()
    assert (plain["engine"], plain["method"], plain["version"]) == ("other", "plain", "7.1")
    assert plain["speedup_vs_plain"] is None
    assert lookup["speedup_vs_plain"] == {"median": 2, "min": 2, "max": 2}
    assert lookup["identical_to_plain"] == 3
    assert lone["speedup_vs_plain"] is lone["identical_to_plain"] is None
    assert lookup["identical_to_slipstream_plain"] == 0
    rates = [a.seconds / a.tokens / 2 for a, *_ in cell.rounds]
    ratio = lookup["ratio_to_slipstream_plain"]
    assert ratio["min"] == pytest.approx(min(rates), abs=1e-4)
    assert ratio["max"] == pytest.approx(max(rates), abs=1e-4)
    assert "ratio_to_slipstream_plain" not in ours
    assert plain["decode_tokens_per_second"] == pytest.approx(0.25)
    assert plain["ttft_ms"]["p50"] == 4000
    assert plain["itl_ms"] is plain["mean_tokens_per_step"] is None


def test_a_peers_failure_is_its_own() -> None:
    said: list[str] = []
    peers = [
        PeerSide(name="other", peer=FakePeer(seconds=4.0)),
        PeerSide(name="other", peer=FakePeer("lookup", seconds=1.0, fails=(11,))),
        PeerSide(name="broken", peer=FakePeer(fails=(10, 11, 12))),
    ]
    cell = make(peers=peers, notify=said.append)
    cell.measure(2, lambda: None)
    plain, ngram, whole, part, broken = cell.figures()
    assert [run["failures"] for run in (plain, ngram, whole, part, broken)] == [0, 0, 0, 1, 3]
    assert [run["prompts"] for run in (plain, ngram, whole, part, broken)] == [3, 3, 3, 2, 0]
    assert part["speedup_vs_plain"]["median"] == 4
    assert broken["tokens_per_second"] is broken["ratio_to_slipstream_plain"] is None
    assert "prompt 2 failed with other: the peer stumbled" in said
