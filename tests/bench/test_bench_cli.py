"""``slipstream bench`` as a user types it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tiny_llm

from slipstream import cli
from slipstream.bench import picture, run, table
from slipstream.bench.command import write_json

TARGET, DRAFT = str(tiny_llm.target()), str(tiny_llm.draft())
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.bench.curve._STREAM_BYTES", 400_000)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    suite = tmp_path / "suite.jsonl"
    lines = [{"turns": ["the train the train"], "category": c} for c in ("qa", "math", "qa")]
    suite.write_text("\n".join(map(json.dumps, lines)))

    def call(*arguments: str) -> tuple[int, str, str]:
        small = ["--suite", str(suite), "--max-tokens", "8", "--rounds", "2", "--runtime", "torch"]
        capsys.readouterr()
        try:
            status = cli.main(["bench", "--model", TARGET, *small, *arguments])
        except SystemExit as left:  # the argument parser's way out
            status = int(str(left.code))
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(run, "LLM", load)


def test_tables_then_json_as_the_last_line(bench: Run, tmp_path: Path) -> None:
    out_file = tmp_path / "out.json"
    options = ["--methods", "ngram,draft_model", "--draft-model", DRAFT, "--json"]
    curve = ["--rows", "1,2", "--context-lengths", "8"]
    status, out, _ = bench(*options, *curve, "--concurrency", "1,2", "--out", str(out_file))
    assert status == 0
    found = json.loads(out.splitlines()[-1])
    assert [r["method"] for r in found["runs"]] == ["plain", "ngram", "draft_model"] * 2
    assert found["cost_curve"]["fp32"]["8"].keys() == {"1", "2"}
    assert json.loads(out_file.read_text()) == found
    assert [file.name for file in tmp_path.iterdir() if "part" in file.name] == []
    for text in ("fp32, temperature 0, 2 at once", "draft_model", "3/3", "speedup", "math"):
        assert text in out
    assert "milliseconds of a step" in out
    assert "memory streams at" in out


def test_the_table_shows_the_documents_numbers(bench: Run) -> None:
    _, out, _ = bench("--json")
    found = json.loads(out.splitlines()[-1])
    ngram = found["runs"][1]
    ratio = ngram["speedup_vs_plain"]
    row = next(line for line in out.splitlines() if line.startswith("│ ngram"))
    assert f"{ngram['tokens_per_second']:.1f}" in row
    assert f"{ratio['median']:.2f}× ({ratio['min']:.2f}–{ratio['max']:.2f})" in row
    assert max(map(len, out.splitlines()[:-1])) < 100


def test_without_json_there_is_no_json(bench: Run) -> None:
    _, out, _ = bench("--methods", "none", "--num-prompts", "2", "--category", "qa")
    assert "{" not in out
    assert "plain" in out
    assert "ngram" not in out


def test_a_failing_prompt_is_named_on_stderr_and_counted(bench: Run, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "one"}\n' + json.dumps({"prompt": "x" * 99, "category": "long"}))
    status, out, err = bench("--suite", str(path), "--max-model-len", "90", "--json")
    assert status == 0
    assert "prompt 2 (long) failed with every method: the prompt has" in err
    runs = json.loads(out.splitlines()[-1])["runs"]
    assert [(r["prompts"], r["failures"]) for r in runs] == [(1, 1), (1, 1)]


def test_k_goes_to_the_methods_and_configs_stand_beside_them(bench: Run) -> None:
    more = json.dumps({"method": "ngram", "num_speculative_tokens": 1})
    _, out, _ = bench(
        "--methods",
        "ngram",
        "--num-speculative-tokens",
        "2",
        "--speculative-config",
        more,
        "--max-tokens",
        "64",
        "--json",
    )
    found = json.loads(out.splitlines()[-1])
    names = [f"ngram num_speculative_tokens={k}" for k in (2, 1)]
    assert [r["method"] for r in found["runs"]] == ["plain", *names]
    lengths = [len(r["acceptance_by_position"]) for r in found["runs"]]
    assert lengths == [0, 2, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "/no/such/file"], "can't be read"),
        (["--category", "cooking"], "unknown category 'cooking'"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--methods", "ngrm"], "did you mean 'ngram'"),
        (["--methods", "draft_model"], "needs --draft-model"),
        (["--methods", "ngram", "--draft-model", DRAFT], "add it to --methods"),
        (["--methods", "ngram,ngram"], "there twice"),
        (["--speculative-config", '{"method": "ngram", "k": 3}'], "'k'"),
        (["--speculative-config", "[]"], "a list of such, got []"),
        (["--speculative-config", "3"], "not a JSON object or list"),
        (["--dtype", "float64"], "unknown dtype 'float64'"),
        (["--quantization", "int8,int3"], "unknown quantization 'int3'"),
        (["--dtype", "auto,float32"], "--dtype auto"),
        (["--temperature", "0,hot"], "not float values separated by commas"),
        (["--temperature=-1"], "temperature"),
        (["--concurrency", "0"], "--concurrency"),
        (["--rounds", "0"], "--rounds"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--seed=-1"], "--seed"),
        (["--rows", "0"], "--rows"),
        (["--context-lengths", "x"], "not int values"),
        (["--peer", "vllm"], "NAME=PATH"),
        (["--peer", "wllm=/bin/false"], "unknown peer"),
        (["--peer", "vllm=/no/such/python"], "/no/such/python"),
        (["--peer", "vllm=/bin/false", "--peer", "vllm=/bin/true"], "there twice"),
        (["--out", "/no/such/folder/x.json"], "can't be written"),
        (["--turns", "second"], "--turns"),
        (["--device", "gpu"], "device"),
    ],
)
@pytest.mark.usefixtures("nothing_loads")
def test_bad_input_is_refused_before_a_model_is_loaded(
    bench: Run, options: list[str], said: str
) -> None:
    status, out, err = bench(*options)
    assert (status, out) == (2, "")
    assert said in err
    assert 1 <= len(err.splitlines()) <= 2, err


@pytest.mark.usefixtures("nothing_loads")
def test_a_bad_line_of_the_suite_is_named(bench: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n{"question": "?"}\n')
    status, _, err = bench("--suite", str(path))
    assert status == 2
    assert f"{path}:2" in err


@pytest.mark.usefixtures("nothing_loads")
def test_a_picture_needs_matplotlib(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    status, _, err = bench("--png", str(tmp_path / "x.png"))
    assert status == 2
    assert "pip install 'slipstream[bench]'" in err


def test_the_picture_is_drawn(bench: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, curve in (("with", ["--cost-curve", "--context-lengths", "8"]), ("without", [])):
        path = tmp_path / f"{name}.png"
        assert bench("--png", str(path), *curve)[0] == 0
        image = import_module("matplotlib.image").imread(path)
        assert image.shape[1] > 1000
        assert image[..., :3].std() > 0.02  # something is on it


def test_bars_are_the_documents_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib: what would be drawn."""
    drawn: list[tuple[Any, ...]] = []

    class Axis:
        def bar(self, *arguments: Any, **options: Any) -> None:
            drawn.append((*arguments, options["yerr"], options["label"]))

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments, **options: None

    ratio = {"median": 2.0, "min": 1.5, "max": 3.0}
    plain = {"speedup_vs_plain": None}
    ngram = {
        "engine": "slipstream",
        "method": "ngram",
        "precision": "int8",
        "temperature": 0,
        "concurrency": 1,
        "speedup_vs_plain": ratio,
        "by_category": {"qa": {"speedup_vs_plain": dict.fromkeys(ratio, 4.0)}},
    }
    picture._speedups(Axis(), {"runs": [plain, ngram]})
    assert drawn == [
        ([0, 1], [2, 4], 0.8, [[0.5, 0], [1, 0]], "ngram int8"),
    ]
    drawn.clear()
    picture._speedups(Axis(), {"runs": [ngram, ngram | {"temperature": 0.7}]})
    assert [bars[-1] for bars in drawn] == [
        "ngram int8, T=0, 1 at once",
        "ngram int8, T=0.7, 1 at once",
    ]


def test_an_unfinished_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"rounds": 1})

    def no_room(self: Path, text: str, **options: Any) -> None:
        raise OSError("no room left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no_room)
        with pytest.raises(OSError, match="no room left"):
            write_json(path, {"rounds": 2})
    assert json.loads(path.read_text()) == {"rounds": 1}
    write_json(path, {"rounds": 2})
    assert json.loads(path.read_text()) == {"rounds": 2}


def test_a_killed_bench_leaves_its_rounds(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["bench", "--model", TARGET, "--runtime", "torch", "--rounds", "100000"]
    code = "import sys; from slipstream.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--max-tokens", "4", "--out", str(path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while not path.exists():
            assert process.poll() is None, process.returncode
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = json.loads(path.read_text())
    assert found["complete"] is False
    assert [r["method"] for r in found["runs"]] == ["plain", "ngram"]
    assert len(found["runs"][0]["round_seconds"]) >= 1


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys\nfrom slipstream.cli import main\n"
        "try:\n    main(['bench', '--help'])\n"
        "finally:\n    heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_that_are_not_known_are_dashes() -> None:
    assert (table._number(None), table._wait(None), table._ratio(None)) == ("–", "–", "–")
