"""ONNX Runtime GenAI, plain or with its n-gram drafts (see peer_worker.py).

It runs ONNX models, which its own builder makes from the model folder, once, into ``workspace``.
int8 and int4 are the builder's quantisation of those weights, by blocks of 32.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

NGRAM = {"ngram_size": 3, "max_draft_tokens": 5}
# As a Q4_1 file has it: a zero point a block, without which the default model's text falls apart,
# and a head of 8 bits. The builder can share the head with the embeddings only without those two.
INT4 = (
    "algo_config=rtn",
    "is_symmetric=false",
    "matmul_mixed_precision=last_matmul:int8",
    "shared_embeddings=false",
)


class Model:
    def __init__(
        self,
        *,
        model_folder: str,
        precision: str,
        threads: int,
        speculative: bool,
        workspace: str,
        **_: Any,
    ) -> None:
        import onnxruntime_genai as genai  # type: ignore[import-not-found]

        self.version = genai.__version__
        if speculative and not hasattr(genai.GeneratorParams, "set_speculative_options"):
            raise RuntimeError(f"version {self.version} has no speculation: 0.18 has")
        folder = f"{workspace}/onnx-{precision}-{self.version}"
        if not os.path.isdir(folder):
            build(model_folder, precision, folder)
        config = genai.Config(folder)
        config.overlay(json.dumps({"model": changes(folder, threads)}))
        self.model = genai.Model(config)
        self.tokenizer = genai.Tokenizer(self.model)
        self.method = "ngram" if speculative else "plain"

    def generate(self, *, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        import onnxruntime_genai as genai

        length = len(token_ids) + max_tokens
        params = genai.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, max_length=length)
        if self.method == "ngram":
            params.set_speculative_options(**NGRAM)
        start = time.perf_counter()
        generator = genai.Generator(self.model, params)
        generator.append_tokens(token_ids)
        generator.generate_next_token()
        first = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        tokens = [int(token) for token in generator.get_sequence(0)[len(token_ids) :]]
        return {
            "token_ids": tokens,
            "text": self.tokenizer.decode(tokens),
            "output_tokens": len(tokens),
            "seconds": seconds,
            "ttft_seconds": first - start,
        }


def changes(folder: str, threads: int) -> dict[str, Any]:
    """What we set beside the builder's configuration.

    An end-of-sequence id there must be, and it must be in the vocabulary: the last one is the
    rarest, and a text that did hit it would be short of tokens, which the count shows.
    """
    with open(f"{folder}/genai_config.json", encoding="utf-8") as file:
        vocab_size = json.load(file)["model"]["vocab_size"]
    session = {"intra_op_num_threads": threads}
    return {"eos_token_id": vocab_size - 1, "decoder": {"session_options": session}}


def build(model_folder: str, precision: str, folder: str) -> None:
    """Make the ONNX model; an unfinished one never stands under the final name."""
    unfinished = f"{folder}.{os.getpid()}"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", model_folder]
    command += ["-o", unfinished, "-p", precision, "-e", "cpu", "-c", f"{unfinished}/cache"]
    if precision == "int4":
        command += ["--extra_options", *INT4]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
