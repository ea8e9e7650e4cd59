"""The whole bench: its document, what is saved on the way, precisions, peers, settings refused."""

import copy
import gc
import json
import re
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_llm
from fake_peer import FakePeer

from slipstream import SlipstreamError
from slipstream.bench import peers, run
from slipstream.bench.run import Bench
from slipstream.bench.settings import Curve, Settings, label, precisions
from slipstream.bench.suite import Question

QUESTIONS = [
    Question(category="a", turns=["the train in on the train"]),
    Question(category="b", turns=["one two"]),
]
RUN = {
    "engine",
    "method",
    "failures",
    "precision",
    "temperature",
    "concurrency",
    "prompts",
    "output_tokens",
    "seconds",
    "round_seconds",
    "tokens_per_second",
    "decode_tokens_per_second",
    "ttft_ms",
    "itl_ms",
    "mean_tokens_per_step",
    "acceptance_rate",
    "acceptance_by_position",
    "steps",
    "drafted_tokens",
    "accepted_tokens",
    "speedup_vs_plain",
    "identical_to_plain",
    "by_category",
}


def settings(**more: Any) -> Settings:
    given = {
        "model": str(tiny_llm.target()),
        "methods": {"ngram": {"method": "ngram"}},
        "precisions": precisions(["float32"], ["none"], runtime="torch"),
        "max_tokens": 8,
        "rounds": 2,
        **more,
    }
    return Settings(**given)


@pytest.fixture(autouse=True)
def small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.bench.curve._STREAM_BYTES", 400_000)


def test_the_document() -> None:
    curve = Curve(contexts=[8, 16], rows=[1, 3], batches=[2])
    more = {"temperatures": [0, 1], "concurrencies": [1, 2], "curve": curve}
    found = Bench(settings=settings(**more), questions=QUESTIONS).run()
    json.dumps(found, allow_nan=False)
    assert found["complete"] is True
    key = ("method", "precision", "temperature", "concurrency")
    assert [tuple(r[name] for name in key) for r in found["runs"]] == [
        (method, "fp32", temperature, concurrency)
        for temperature in (0, 1)
        for concurrency in (1, 2)
        for method in ("plain", "ngram")
    ]
    for one in found["runs"]:
        assert set(one) == RUN
        assert (one["engine"], one["prompts"], one["failures"]) == ("slipstream", 2, 0)
        assert one["output_tokens"] == 16
        assert one["tokens_per_second"] == pytest.approx(16 / one["seconds"], rel=1e-3)
        assert len(one["round_seconds"]) == 2
        assert set(one["ttft_ms"]) == set(one["itl_ms"]) == {"p50", "p95"}
        assert set(one["by_category"]) == {"a", "b"}
    assert [r["identical_to_plain"] for r in found["runs"]] == [None, 2] * 2 + [None] * 4
    assert {c: list(rows) for c, rows in found["cost_curve"]["fp32"].items()} == {
        "8": ["1", "3"],
        "16": ["1", "3"],
    }
    assert list(found["cost_curve_batched"]["fp32"]) == ["2"]
    assert found["cost_curve_batched"]["fp32"]["2"]["16"]["3"] > 0
    assert found["bandwidth_gb_s"]["stream"] > 0
    assert found["peak_memory_gb"]["fp32"] > 0.05
    assert {"cpu", "cores", "memory_gb", "runtimes"} <= set(found["machine"])
    assert found["machine"]["runtimes"]["fp32"]["runtime"] == "TorchRuntime"
    assert set(found["provenance"]) == {"commit", "versions", "command", "date"}
    assert set(found["provenance"]["versions"]) == {"slipstream", "torch", "transformers", "python"}
    commit = found["provenance"]["commit"]
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)


def test_what_was_measured_is_saved_after_every_round() -> None:
    saved: list[dict[str, Any]] = []
    bench = Bench(
        settings=settings(concurrencies=[1, 2], curve=Curve(contexts=[8], rows=[1])),
        questions=QUESTIONS,
        save=lambda document: saved.append(copy.deepcopy(document)),
    )
    final = bench.run()
    assert [[len(r["round_seconds"]) for r in document["runs"]] for document in saved] == [
        [1, 1],
        [2, 2],
        [2, 2, 1, 1],
        [2, 2, 2, 2],
        [2, 2, 2, 2],
        [2, 2, 2, 2],
    ]
    assert [bool(document["cost_curve"]) for document in saved] == [False] * 4 + [True] * 2
    assert [document["complete"] for document in saved] == [False] * 5 + [True]
    assert saved[-1] == final
    assert saved[1]["runs"] == final["runs"][:2]


def test_each_precision_is_loaded_after_the_one_before_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[weakref.ref[Any]] = []
    llm = run.LLM

    def loading(*arguments: Any, **options: Any) -> Any:
        assert all(reference() is None for reference in alive)
        made = llm(*arguments, **options)
        alive.append(weakref.ref(made.model.runtime))
        return made

    monkeypatch.setattr(run, "LLM", loading)
    both = precisions(["float32", "bfloat16"], ["none"], runtime="torch")
    gc.disable()  # nothing but the bench itself may free it
    try:
        found = Bench(settings=settings(precisions=both, rounds=1), questions=QUESTIONS).run()
    finally:
        gc.enable()
    assert len(alive) == 2
    assert [r["precision"] for r in found["runs"]] == ["fp32", "fp32", "bf16", "bf16"]
    assert list(found["peak_memory_gb"]) == ["fp32", "bf16"]


def test_the_progress_bar_ends_full() -> None:
    bars: list[list[Any]] = []

    @contextmanager
    def progress(what: str, total: int) -> Any:
        bar = [what, total, 0]
        bars.append(bar)

        def advance() -> None:
            bar[2] += 1

        yield advance

    Bench(settings=settings(), questions=QUESTIONS, progress=progress).run()
    assert bars == [["fp32, temperature 0, 1 at once", 8, 8]]


def test_peers_run_greedily_one_at_a_time_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[dict[str, Any], FakePeer]] = []

    def start(name: str, path: str, **options: Any) -> FakePeer:
        assert (name, path) == ("vllm", "/somewhere")
        peer = FakePeer("lookup" if options["speculative"] else "plain")
        started.append((options, peer))
        return peer

    monkeypatch.setattr(peers, "check", lambda name, path: None)
    monkeypatch.setattr(peers, "start", start)
    given = settings(
        peers={"vllm": "/somewhere"}, temperatures=[0, 1], concurrencies=[1, 2], rounds=1
    )
    found = Bench(settings=given, questions=QUESTIONS).run()
    theirs = [r for r in found["runs"] if r["engine"] == "vllm"]
    setting = ("method", "temperature", "concurrency")
    assert [tuple(r[name] for name in setting) for r in theirs] == [
        ("plain", 0, 1),
        ("lookup", 0, 1),
    ]
    more = {"version", "ratio_to_slipstream_plain", "identical_to_slipstream_plain"}
    assert all(
        set(r) == RUN - {"steps", "drafted_tokens", "accepted_tokens"} | more for r in theirs
    )
    options = started[0][0]
    assert options["model_folder"] == tiny_llm.target()
    assert (options["precision"], options["gguf"]) == ("fp32", None)
    assert options["max_tokens_hint"] == 8
    assert all(peer.closed for _, peer in started)


def test_a_peer_that_does_not_start_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, path: str, *, speculative: bool, **options: Any) -> FakePeer:
        if speculative:
            raise SlipstreamError("it has no drafts")
        return FakePeer()

    monkeypatch.setattr(peers, "check", lambda name, path: None)
    monkeypatch.setattr(peers, "start", start)
    said: list[str] = []
    given = settings(peers={"vllm": "/somewhere"}, rounds=1)
    found = Bench(settings=given, questions=QUESTIONS, notify=said.append).run()
    assert found["skipped"] == [
        {
            "engine": "vllm",
            "method": "speculative",
            "precision": "fp32",
            "reason": "it has no drafts",
        }
    ]
    assert said == ["vllm, speculative, fp32 is left out: it has no drafts"]
    assert [r["engine"] for r in found["runs"]] == ["slipstream", "slipstream", "vllm"]


def test_a_context_beyond_the_model_is_refused_before_a_round() -> None:
    saved: list[object] = []
    given = settings(curve=Curve(contexts=[tiny_llm.CONTEXT], rows=[1]))
    with pytest.raises(SlipstreamError, match="--context-lengths 4096 with 1 rows"):
        Bench(settings=given, questions=QUESTIONS, save=saved.append).run()
    assert saved == []


def test_quantised_weights_count_once_and_each_dtype_for_itself() -> None:
    def names(dtypes: list[str], quantizations: list[str]) -> list[tuple[str, str]]:
        return [(p.dtype, p.quantization) for p in precisions(dtypes, quantizations)]

    assert names(["float32", "bfloat16"], ["none", "int8", "int4"]) == [
        ("float32", "none"),
        ("bfloat16", "none"),
        ("auto", "int8"),
        ("auto", "int4"),
    ]
    assert names(["bfloat16"], ["int8"]) == [("bfloat16", "int8")]
    assert names(["float32", "float32"], ["none", "none"]) == [("float32", "none")]
    for dtypes, quantizations in (
        [["auto", "float32"], ["none"]],
        [[], ["none"]],
        [["x"], ["none"]],
    ):
        with pytest.raises(SlipstreamError):
            precisions(dtypes, quantizations)


def test_methods_are_told_apart_by_their_options() -> None:
    three, five = ({"method": "ngram", "num_speculative_tokens": k} for k in (3, 5))
    assert label([three]) == {"ngram": three}
    assert label([three, five]) == {
        "ngram num_speculative_tokens=3": three,
        "ngram num_speculative_tokens=5": five,
    }
    with pytest.raises(SlipstreamError, match="there twice"):
        label([three, three])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rounds": 0}, "--rounds"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"concurrencies": [1, 0]}, "--concurrency"),
        ({"concurrencies": []}, "--concurrency"),
        ({"temperatures": []}, "--temperature"),
        ({"temperatures": [0, -1]}, "temperature"),
        ({"methods": {"x": {"method": "x"}}}, "unknown speculative method"),
        ({"peers": {"vllm": "/bin/false"}, "temperatures": [1]}, "peers run greedily"),
        ({"peers": {"vllm": "/bin/false"}, "concurrencies": [2]}, "peers run greedily"),
        ({"peers": {"nobody": "/bin/false"}}, "unknown peer"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(more: dict[str, Any], said: str) -> None:
    with pytest.raises(SlipstreamError, match=said):
        settings(**more)


@pytest.mark.parametrize("field", ["contexts", "rows", "batches"])
def test_the_curve_is_checked_too(field: str) -> None:
    for values in ([], [0], [1, -3]):
        with pytest.raises(SlipstreamError):
            Curve(**{field: values})
    assert Curve(batches=[4]).batches == (1, 4)


def test_a_default_of_everything_is_no_error() -> None:
    assert settings().curve is None
    assert Path(settings().model).is_dir()
