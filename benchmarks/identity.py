"""Is greedy text with a drafter the same as without, on many prompts?

    python benchmarks/identity.py QUESTIONS.jsonl --out benchmarks/results/identity.json

Decodes every prompt (``prompt``, or the first of ``turns``) plainly and speculatively, several at
once, and compares the texts; differences are listed and classified. Written after every group: a
run that is cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from slipstream import LLM, SamplingParams
from slipstream.prompts import read_prompts
from slipstream.proof.identity import compare_prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculative-config", type=json.loads, default={"method": "ngram"})
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    setting = {k: v for k, v in vars(args).items() if k not in ("prompts", "out")}
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    if done.get("setting") != setting:
        done = {"setting": setting, "compared": 0, "tokens": 0, "identical": 0, "different": []}
    llm = LLM(
        args.model,
        speculative_config=args.speculative_config,
        dtype=args.dtype,
        quantization=args.quantization,
        runtime=args.runtime,
        max_num_seqs=args.concurrency,
    )
    plain = llm.with_speculation(None)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    prompts = read_prompts(args.prompts)
    started = time.perf_counter()
    while done["compared"] < len(prompts):
        first = done["compared"]
        _compare(plain, llm, prompts[first : first + args.concurrency], params, done)
        _write(args.out, done)
        minutes = (time.perf_counter() - started) / 60
        print(f"\r{done['compared']}/{len(prompts)}, {minutes:.0f} min", end="", file=sys.stderr)
    print(f"\n{json.dumps(done)}")
    return int(any(found["kind"] == "fault" for found in done["different"]))


def _compare(plain: LLM, llm: LLM, prompts: list[str], params: SamplingParams, done: dict) -> None:
    """Decode a group both ways and add it to what is done."""
    for count, found in compare_prompts(plain, llm, prompts, params):
        if found is not None:
            done["different"].append({"index": done["compared"]} | asdict(found))
        done["compared"] += 1
        done["tokens"] += count
        done["identical"] += found is None


def _write(path: Path, data: dict) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
