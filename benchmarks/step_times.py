"""The time of one step beside llama.cpp's, on the same weights, in the same minutes.

    python benchmarks/step_times.py LLAMA_CPP [--out FILE]

LLAMA_CPP: the folder of llama-bench. For each precision our steps and llama-bench take turns; a
ratio is the median over rounds of theirs / ours within a round: above 1 ours is faster. llama-bench
asks for the last row's logits alone; "8 verified" is our step with the logits of all eight, as
verification needs them, beside its step with one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM
from slipstream.bench import machine, peer_gguf, peer_llama_cpp, peers
from slipstream.models.sources import DEFAULT_MODEL, default_gguf
from slipstream.runtimes import Runtime
from slipstream.types import StepRows, chain_rows

STEPS = {"1": (1, 1), "8": (8, 1), "8 verified": (8, 8), "512": (512, 1)}  # rows, logits
ROWS = sorted({rows for rows, _ in STEPS.values()})
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
# llama.cpp's four bits are measured twice: as the file has them, the same weights as ours, and as
# Q4_0, another model but the one that llama.cpp has its fastest kernels for.
GGUFS = {"fp32": ("F32",), "int8": ("Q8_0",), "int4": ("Q4_1", "Q4_0")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("llama_cpp")
    parser.add_argument("--runtime", default="native", help="ours: native or torch")
    parser.add_argument("--precision", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=64, help="committed tokens before the step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5, help="of a step in a round")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_times.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = {key: value for key, value in vars(args).items() if key not in ("llama_cpp", "out")}
    document: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "llama_cpp": peer_llama_cpp.version(args.llama_cpp),
        "settings": settings,
        "machine": machine.machine(torch.device("cpu")),
        "provenance": machine.provenance() | {"command": "python benchmarks/step_times.py"},
        "results": [],
    }
    print(f"{'':6}{'rows':12}{'ours ms':>10}{'llama.cpp':>18}{'ratio':>8}")
    for precision in args.precision:
        for row in measure(precision, args):
            document["results"].append(row)
            theirs = f"{row['gguf']} {row['llama_cpp_ms']:.2f}"
            ours = f"{precision:6}{row['step']:12}{row['ours_ms']:>10.2f}"
            print(f"{ours}{theirs:>18}{row['ratio']:>8.2f}", flush=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(precision: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each GGUF and step of ours."""
    llm = LLM(DEFAULT_MODEL, runtime=args.runtime, threads=args.threads, **OPTIONS[precision])
    ours = OurSteps(llm.model.runtime, args.context)
    files = {kind: gguf_file(kind) for kind in GGUFS[precision]}
    rounds = []
    for _ in range(args.rounds):
        theirs = {kind: llama_cpp(file, args) for kind, file in files.items()}
        rounds.append((ours.milliseconds(args.repeats), theirs))
    results = []
    for kind in files:
        for step, (rows, _) in STEPS.items():
            pairs = [(mine[step], theirs[kind][rows]) for mine, theirs in rounds]
            results.append(
                {
                    "precision": precision,
                    "gguf": kind,
                    "step": step,
                    "ours_ms": statistics.median(mine for mine, _ in pairs),
                    "llama_cpp_ms": statistics.median(their for _, their in pairs),
                    "ratio": statistics.median(their / mine for mine, their in pairs),
                }
            )
    return results


def gguf_file(kind: str) -> Path:
    return peer_gguf.variant(default_gguf(), kind)


def llama_cpp(file: Path, args: argparse.Namespace) -> dict[int, float]:
    return peers.llama_bench(
        args.llama_cpp,
        file,
        threads=args.threads,
        rows=ROWS,
        context=args.context,
        repetitions=args.repeats,
    )


class OurSteps:
    """Steps behind committed tokens; a step changes nothing, so none has to be put back."""

    def __init__(self, runtime: Runtime, context: int) -> None:
        self._runtime = runtime
        self._cache = runtime.new_cache(1, context + max(ROWS))
        slot = self._cache.allocate()
        tokens = [1 + i * 7919 % (runtime.vocab_size - 1) for i in range(context + max(ROWS))]
        if context:
            output = self._run(chain_rows(slot, tokens[:context]))
            self._cache.commit(output, [slot], [range(context)])
        self._steps = {
            name: chain_rows(slot, tokens[context : context + rows], range(rows - logits, rows))
            for name, (rows, logits) in STEPS.items()
        }

    def milliseconds(self, repeats: int) -> dict[str, float]:
        """The median of each step, after one to warm up."""
        found = {}
        for name, step in self._steps.items():
            self._run(step)
            found[name] = statistics.median(self._seconds(step) for _ in range(repeats)) * 1e3
        return found

    def _seconds(self, step: StepRows) -> float:
        start = time.perf_counter()
        self._run(step)
        return time.perf_counter() - start

    @torch.inference_mode()
    def _run(self, step: StepRows) -> Any:
        return self._runtime.step([step], self._cache)


if __name__ == "__main__":
    main()
