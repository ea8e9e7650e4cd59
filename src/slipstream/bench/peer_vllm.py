"""vLLM on a CPU, plain or with its n-gram drafts (see peer_worker.py)."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
OURS = "blocks.safetensors"  # of a converted GGUF; vLLM would take it for a shard of the model


class Model:
    def __init__(
        self,
        *,
        model_folder: str,
        precision: str,
        threads: int,
        speculative: bool,
        context: int,
        workspace: str,
        **_: Any,
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; else half of the memory
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: nothing between the two
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm  # type: ignore[import-not-found]

        self.llm = vllm.LLM(
            model=links(model_folder, f"{workspace}/vllm"),
            dtype=DTYPES[precision],
            max_model_len=context,
            max_num_seqs=1,
            enable_prefix_caching=False,  # or a prompt's second round would be free
            disable_log_stats=False,  # the time of the first token is among them
            speculative_config=NGRAM if speculative else None,
        )
        self.version = vllm.__version__
        self.method = "ngram" if speculative else "plain"

    def generate(self, *, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        import vllm

        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        output = self.llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)[0]
        seconds = time.perf_counter() - start
        tokens = list(output.outputs[0].token_ids)
        return {
            "token_ids": tokens,
            "text": output.outputs[0].text,
            "output_tokens": len(tokens),
            "seconds": seconds,
            "ttft_seconds": getattr(output.metrics, "first_token_latency", None),
        }


def links(model_folder: str, place: str) -> str:
    """The model folder without the file that isn't vLLM's; always in the same place, by which vLLM
    finds what it compiled for the model."""
    os.makedirs(place, exist_ok=True)
    for entry in os.scandir(model_folder):
        if entry.name != OURS:
            with contextlib.suppress(FileExistsError):
                os.symlink(os.path.abspath(entry.path), f"{place}/{entry.name}")
    return place
