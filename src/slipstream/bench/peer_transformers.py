"""Hugging Face transformers: ``generate``, plain or with its prompt lookup (see peer_worker.py)."""

from __future__ import annotations

import time
from typing import Any

LOOKUP_TOKENS = 10  # drafted at once, as in its documentation


class FirstToken:
    """A streamer that notes when the first new token comes; the first put is the prompt."""

    def __init__(self) -> None:
        self.puts = 0
        self.at: float | None = None

    def put(self, tokens: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Model:
    def __init__(
        self, *, model_folder: str, precision: str, threads: int, speculative: bool, **_: Any
    ) -> None:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None  # the text goes on to its full length
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self.version = f"{transformers.__version__} (torch {torch.__version__})"
        self.method = "prompt_lookup" if speculative else "plain"
        self.options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if speculative else {}

    def generate(self, *, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        import torch

        prompt, first = torch.tensor([token_ids]), FirstToken()
        start = time.perf_counter()
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            streamer=first,
            **self.options,
        )
        seconds = time.perf_counter() - start
        tokens = output[0, len(token_ids) :].tolist()
        return {
            "token_ids": tokens,
            "text": self.tokenizer.decode(tokens, skip_special_tokens=True),
            "output_tokens": len(tokens),
            "seconds": seconds,
            "ttft_seconds": None if first.at is None else first.at - start,
        }
