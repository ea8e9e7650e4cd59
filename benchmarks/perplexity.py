"""What a precision costs in quality: perplexity of a fixed text, window by window.

    python benchmarks/perplexity.py PROMPTS.jsonl --out benchmarks/results/perplexity.json

The text: the prompts one after the other, cut into windows that start with nothing before them.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

from slipstream import LLM
from slipstream.prompts import read_prompts
from slipstream.types import chain_rows

PRECISIONS = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
CHUNK = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, float] = {}
    for name, options in PRECISIONS.items():
        llm = LLM(args.model, **options)
        ids = llm.tokenizer("\n\n".join(read_prompts(args.prompts)))["input_ids"][: args.tokens]
        windows = [ids[i : i + args.window] for i in range(0, len(ids), args.window)]
        losses = [_losses(llm, window) for window in windows if len(window) > 1]
        found[name] = math.exp(float(torch.cat(losses).mean()))
        print(f"{name:6}{found[name]:10.4f}  {found[name] / found['fp32'] - 1:+.3%}", flush=True)
    record = {"model": args.model, "tokens": args.tokens, "window": args.window}
    if args.out:
        args.out.write_text(json.dumps(record | {"perplexity": found}, indent=1) + "\n")


def _losses(llm: LLM, window: list[int]) -> torch.Tensor:
    """-log p of each token but the first."""
    runtime = llm.engine.runtime
    cache = runtime.new_cache(1, len(window))
    slot, parts = cache.allocate(), []
    for start in range(0, len(window) - 1, CHUNK):
        chunk = window[start : min(start + CHUNK, len(window) - 1)]
        output = runtime.step([chain_rows(slot, chunk, range(len(chunk)))], cache)
        cache.commit(output, [slot], [range(len(chunk))])
        logprobs = output.logits.double().log_softmax(-1)
        following = torch.tensor(window[start + 1 : start + 1 + len(chunk)])
        parts.append(-logprobs.gather(-1, following[:, None])[:, 0])
    return torch.cat(parts)


if __name__ == "__main__":
    main()
