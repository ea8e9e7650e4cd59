"""The ``slipstream`` command. Each subcommand checks its input before it loads anything heavy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.models.sources import DEFAULT_MODEL

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 1 a proof failed, 2 bad input, 130 Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        from slipstream import commands

        return int(getattr(commands, args.command)(args))
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("\nslipstream: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are two lines instead of all the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\ntry {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slipstream",
        description="Speculative decoding that proves it changes nothing.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)

    generate = command("generate", "Complete a prompt, speculatively.")
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument(
        "--compare", action="store_true", help="decode plainly too: text diff, both speeds"
    )
    generate.add_argument("--json", action="store_true", help="last line: one JSON object")
    generate.add_argument("--raw", action="store_true", help="no chat template")
    generate.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    chat = command("chat", "Talk with the model.")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    for sub in (generate, chat):
        _model_options(sub, max_num_seqs=1)
        _sampling_options(sub)

    verify = command("verify", "Prove on your model that speculation changes nothing.")
    _model_options(verify, max_num_seqs=8)
    verify.add_argument("--seed", type=int, default=0, help="another one is fresh evidence")
    verify.add_argument("--prompts", metavar="FILE", help="a prompt a line, or JSONL")
    verify.add_argument("--num-prompts", type=int, default=8, help="prompts used (default 8)")
    verify.add_argument("--max-tokens", type=int, default=64, help="an answer's (default 64)")
    verify.add_argument(
        "--temperature", type=float, default=1.0, help="of the sampled tests (default 1)"
    )
    verify.add_argument("--top-p", type=float, default=1.0)
    verify.add_argument("--top-k", type=int, default=0)
    verify.add_argument(
        "--repeats", type=int, default=100, help="samples of each counted prompt (default 100)"
    )
    verify.add_argument("--greedy-only", action="store_true", help="leave the sampled tests out")
    verify.add_argument("--json", action="store_true", help="last line: one JSON object")

    pull = command("pull", "Fetch a model now, so that later commands start at once.")
    pull.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    return parser


def _model_options(parser: argparse.ArgumentParser, max_num_seqs: int) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=DEFAULT_MODEL, help="hub id, folder, GGUF or built-in")
    group.add_argument("--runtime", default="auto", help="auto, native, torch")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    group.add_argument("--quantization", default="none", help="none, int8, int4, fp8")
    group.add_argument("--threads", type=int, help="native runtime's (default: physical cores)")
    group.add_argument("--kv-cache-dtype", default="auto", help="auto, float32, bfloat16")
    group.add_argument("--max-model-len", type=int, help="tokens of prompt and answer together")
    group.add_argument(
        "--max-num-seqs", type=int, default=max_num_seqs, help=f"at once (default {max_num_seqs})"
    )
    group = parser.add_argument_group("speculation")
    group.add_argument("--method", help="ngram (default), draft_model, or none")
    group.add_argument(
        "--draft-model", "--speculative-model", dest="draft_model", help="implies draft_model"
    )
    group.add_argument("--num-speculative-tokens", type=int, metavar="K", help="longest draft")
    group.add_argument(
        "--speculative-config", metavar="JSON", help="all of it, and a method's own options"
    )


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, help="default 256")
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--presence-penalty", type=float, default=0.0)
    group.add_argument("--frequency-penalty", type=float, default=0.0)
    group.add_argument("--logit-bias", type=_json_object, default={}, metavar="JSON")
    group.add_argument("--seed", type=int)
    group.add_argument("--stop", action="append", default=[], help="may be given several times")
    group.add_argument("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID")
    group.add_argument("--min-tokens", type=int, default=0)
    group.add_argument("--ignore-eos", action="store_true")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


if __name__ == "__main__":
    sys.exit(main())
