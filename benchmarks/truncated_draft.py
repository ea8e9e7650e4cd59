"""A draft model for want of a smaller sibling: the target's first layers, its norm and its head.

    python benchmarks/truncated_draft.py OUT --layers 20

Poor guesses, but a real second model of the same tokenizer with a distribution of its own.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from transformers import AutoModelForCausalLM

from slipstream.models.sources import DEFAULT_MODEL, resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--layers", type=int, required=True)
    args = parser.parse_args()
    folder = resolve(args.model)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers = model.model.layers[: args.layers]
    model.config.num_hidden_layers = args.layers
    model.save_pretrained(args.out)
    for file in folder.glob("*token*"):
        shutil.copy(file, args.out)


if __name__ == "__main__":
    main()
