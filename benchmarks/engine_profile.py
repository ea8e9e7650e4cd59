"""Where the time of a step goes: drafting, the target's forward pass, everything else.

    python benchmarks/engine_profile.py

Median of several rounds over one prompt, greedy and sampled, plain and with n-gram drafts.
"""

from __future__ import annotations

import json
import statistics

from slipstream import LLM, SamplingParams
from slipstream.metrics import Clock

PROMPT = "Write a Python function that reverses a list, then one that reverses a string."
ROUNDS = 3
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
    "top-p 0.9, T 0.8": SamplingParams(
        temperature=0.8, top_p=0.9, seed=1, max_tokens=64, ignore_eos=True
    ),
    "penalties, top-k 50, T 0.8": SamplingParams(
        temperature=0.8,
        top_k=50,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        seed=1,
        max_tokens=64,
        ignore_eos=True,
    ),
}


def main() -> None:
    speculative = LLM(speculative_config={"method": "ngram"})
    results = []
    print(f"{'':34}{'ms a step':>10}{'forward':>9}{'draft':>8}{'other':>8}")
    for name, params in SETTINGS.items():
        for method, llm in (("plain", speculative.with_speculation(None)), ("ngram", speculative)):
            rounds = [_round(llm, params) for _ in range(ROUNDS)]
            row = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
            results.append({"setting": name, "method": method} | row)
            shares = "".join(f"{row[key]:>8.2%}" for key in ("forward", "draft", "other"))
            print(f"{name + ', ' + method:34}{row['ms_per_step']:>10.1f} {shares}")
    print(json.dumps(results))


def _round(llm: LLM, params: SamplingParams) -> dict[str, float]:
    llm.engine.clock = clock = Clock()
    output = llm.chat([{"role": "user", "content": PROMPT}], params)[0]
    total = clock.draft + clock.forward + clock.other
    return {
        "ms_per_step": 1e3 * total / output.metrics.steps,
        "forward": clock.forward / total,
        "draft": clock.draft / total,
        "other": clock.other / total,
    }


if __name__ == "__main__":
    main()
