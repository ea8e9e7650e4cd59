"""OpenVINO GenAI on a GGUF file, plain or with its prompt lookup (see peer_worker.py).

fp32 and bf16 set the arithmetic; int8 and int4 keep the weights as the file has them and leave the
arithmetic to OpenVINO, as well as the precision of the KV cache: its own choice is its fastest.
"""

from __future__ import annotations

import time
from typing import Any

LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}  # as in its own sample
ARITHMETIC = {"fp32": "f32", "bf16": "bf16"}


class Model:
    def __init__(
        self, *, gguf: str, precision: str, threads: int, speculative: bool, **_: Any
    ) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found]

        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # or a prompt's second round would be free
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "scheduler_config": scheduler}
        if precision in ARITHMETIC:
            options["INFERENCE_PRECISION_HINT"] = ARITHMETIC[precision]
        if speculative:
            options["prompt_lookup"] = True
        self.pipeline = genai.LLMPipeline(gguf, "CPU", **options)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.version = genai.__version__.split("-")[0]
        self.method = "prompt_lookup" if speculative else "plain"
        self.options = LOOKUP if speculative else {}

    def generate(self, *, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        import numpy as np
        import openvino  # type: ignore[import-not-found]
        import openvino_genai as genai

        config = genai.GenerationConfig(
            max_new_tokens=max_tokens,
            ignore_eos=True,
            do_sample=False,
            apply_chat_template=False,
            **self.options,
        )
        prompt = openvino.Tensor(np.array([token_ids], dtype=np.int64))
        start = time.perf_counter()
        output = self.pipeline.generate(prompt, config)
        seconds = time.perf_counter() - start
        tokens = [int(token) for token in output.tokens[0]]
        return {
            "token_ids": tokens,
            "text": str(self.tokenizer.decode(tokens)),
            "output_tokens": len(tokens),
            "seconds": seconds,
            "ttft_seconds": output.perf_metrics.get_ttft().mean / 1e3,
        }
