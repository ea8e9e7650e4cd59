"""``slipstream bench``: options in, the bench, a table, a picture and JSON out."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.bench import picture, suite
from slipstream.bench.settings import PLAIN, Curve, Settings, label, precisions
from slipstream.config import require_integer
from slipstream.drafters import SpeculativeConfig
from slipstream.errors import SlipstreamError
from slipstream.models.head_sources import default_config


def run(args: Namespace) -> int:
    settings, questions = settings_of(args), _questions(args)
    if args.png is not None:
        picture.require_matplotlib()
    for path in (args.out, args.png):
        if path is not None and not os.access(path.parent, os.W_OK):
            raise SlipstreamError(
                f"{path} can't be written: {path.parent} is no folder to write in"
            )
    from slipstream import show
    from slipstream.bench import table
    from slipstream.bench.run import Bench

    def save(document: Mapping[str, Any]) -> None:
        if args.out is not None:
            write_json(args.out, document)

    document = Bench(
        settings=settings, questions=questions, progress=show.progress, save=save
    ).run()
    out, _ = show.consoles()
    table.show(out, document)
    if args.png is not None:
        picture.draw(args.png, document)
    if args.json:
        print(json.dumps(document))
    return 0


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Under a temporary name first: whoever reads ``path``, or kills us, finds a whole document."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def settings_of(args: Namespace) -> Settings:
    require_integer("--seed", args.seed, 0)
    given = {"contexts": args.context_lengths, "rows": args.rows, "batches": args.batch}
    curve = {name: values for name, values in given.items() if values is not None}
    return Settings(
        model=args.model,
        methods=label(_speculative_configs(args)),
        precisions=precisions(
            args.dtype,
            args.quantization,
            runtime=args.runtime,
            device=args.device,
            threads=args.threads,
            kv_cache_dtype=args.kv_cache_dtype,
        ),
        temperatures=args.temperature,
        concurrencies=args.concurrency,
        max_tokens=args.max_tokens,
        rounds=args.rounds,
        seed=args.seed,
        max_model_len=args.max_model_len,
        all_turns=args.turns == "all",
        curve=Curve(**curve) if curve or args.cost_curve else None,
        peers=_peers(args.peer),
    )


def _questions(args: Namespace) -> list[suite.Question]:
    questions = suite.read_suite(args.suite) if args.suite else suite.built_in()
    return suite.choose(questions, args.category, args.num_prompts)


def _speculative_configs(args: Namespace) -> list[SpeculativeConfig]:
    """Of --methods, then of --speculative-config; without either the draft model, or what drafts by
    default: each drafter alone, and all together."""
    methods: Sequence[str] | None = args.methods
    together: list[SpeculativeConfig] = []
    if methods is None and not args.speculative_config:
        own = default_config(args.model) if args.draft_model is None else []
        methods = [part["method"] for part in own] or ["draft_model"]
        together = [own] if len(own) > 1 else []
    methods = [name for name in methods or () if name not in (PLAIN, "none")]
    if "draft_model" in methods and args.draft_model is None:
        raise SlipstreamError("the method draft_model needs --draft-model: name one")
    if args.draft_model is not None and "draft_model" not in methods:
        raise SlipstreamError("--draft-model is for draft_model: add it to --methods")
    configs: list[SpeculativeConfig] = []
    for name in methods:
        config: dict[str, Any] = {"method": name}
        if name == "draft_model":
            config["model"] = args.draft_model
        if args.num_speculative_tokens is not None:
            config["num_speculative_tokens"] = args.num_speculative_tokens
        configs.append(config)
    return [*configs, *together, *args.speculative_config]


def _peers(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, separator, path = text.partition("=")
        if not (name and separator and path):
            raise SlipstreamError(f"--peer takes NAME=PATH, got {text!r}")
        if name in found:
            raise SlipstreamError(f"the peer {name} is there twice: leave one out")
        found[name] = path
    return found
