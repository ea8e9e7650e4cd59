"""The ``slipstream`` command. Each subcommand checks its input before it loads anything heavy."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.models.sources import DEFAULT_MODEL, find

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
_TOP_P = "sample among the likeliest tokens of this total probability (default 1: all)"
_TOP_K = "sample among this many likeliest tokens (default 0: all)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 1 a proof failed, 2 bad input, 130 Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        find(args.model)
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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The parser of the subcommand speaks of what nobody knows: it has the nearest option."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            found.parser.error(found.parser.nearest(unknown))
        return found

    def nearest(self, unknown: Sequence[str]) -> str:
        options = [word.split("=")[0] for word in unknown if word.startswith("-")]
        if not options:
            return f"one argument too many: {unknown[0]!r} (a text of several words needs quotes)"
        near = difflib.get_close_matches(options[0], self._option_string_actions, n=1)
        return f"unknown option {options[0]}" + "".join(f": did you mean {n}?" for n in near)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slipstream",
        description="Speculative decoding that proves it changes nothing.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        sub.set_defaults(parser=sub)
        return sub

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
    verify.add_argument("--top-p", type=float, default=1.0, help=_TOP_P)
    verify.add_argument("--top-k", type=int, default=0, help=_TOP_K)
    verify.add_argument(
        "--repeats", type=int, default=100, help="samples of each counted prompt (default 100)"
    )
    verify.add_argument("--greedy-only", action="store_true", help="leave the sampled tests out")
    verify.add_argument("--json", action="store_true", help="last line: one JSON object")

    bench = command("bench", "Measure speed beside plain decoding, round by round in one run.")
    _bench_options(bench)

    train = command("train", "Make a draft head for a model, on text of the model's own.")
    _train_options(train)

    pull = command("pull", "Fetch a model now, so that later commands start at once.")
    pull.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    return parser


def _model_options(parser: argparse.ArgumentParser, max_num_seqs: int) -> None:
    group = _runtime_options(parser)
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    group.add_argument("--quantization", default="none", help="none, int8, int4, fp8")
    group.add_argument(
        "--max-num-seqs", type=int, default=max_num_seqs, help=f"at once (default {max_num_seqs})"
    )
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--method",
        help="ngram, eagle3, medusa, draft_model, none (default: ngram, with a built-in head)",
    )
    group.add_argument(
        "--draft-model",
        "--speculative-model",
        dest="draft_model",
        help="or head of eagle3 and medusa (default: built-in); alone implies draft_model",
    )
    group.add_argument("--num-speculative-tokens", type=int, metavar="K", help="longest draft")
    group.add_argument(
        "--speculative-config",
        type=_json_of(dict, list),
        metavar="JSON",
        help="all of it, a method's own options, or a list of several that draft together",
    )


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", choices=("eagle3", "medusa"), help="kind of head")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="goes on there")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    group = _runtime_options(parser)
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    group.add_argument("--quantization", default="none", help="none, int8, int4, fp8")
    group.add_argument("--max-num-seqs", type=int, default=32, help="answers at once (default 32)")
    group = parser.add_argument_group("text")
    group.add_argument(
        "--data", default="self", metavar="FILE", help="JSONL of questions; self: the model asks"
    )
    group.add_argument("--tokens", type=int, default=1_000_000, help="of text (default 1,000,000)")
    group.add_argument("--max-answer", type=int, default=192, help="tokens (default 192)")
    group.add_argument(
        "--keep-answers", action="store_true", help="learn those of the file, not the model's own"
    )
    group = parser.add_argument_group("head")
    group.add_argument(
        "--init", default="", metavar="HEAD", help="train this one on, instead of a new one"
    )
    group.add_argument("--draft-vocab", type=int, help="tokens (default 4096)")
    group.add_argument(
        "--taps",
        type=_list_of(int),
        metavar="LIST",
        help="eagle3: layers, 0 is the embedding",
    )
    group.add_argument("--heads", type=int, help="medusa: drafted positions (default 4)")
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=int, default=3, help="default 3")
    group.add_argument("--passes", type=int, help="eagle3: of training-time test (default 3)")
    group.add_argument("--learning-rate", type=float, default=1e-3, help="its peak, default 0.001")
    group.add_argument("--tokens-per-step", type=int, default=2048, help="of a batch, 2048")
    group.add_argument("--loss", default="ce", help="ce (default), ce+l1")
    group.add_argument("--seed", type=int, default=0, help="the same seed, the same head")


def _runtime_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=DEFAULT_MODEL, help="hub id, folder, GGUF or built-in")
    group.add_argument("--runtime", default="auto", help="auto, native, torch")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    group.add_argument("--threads", type=int, help="native runtime's (default: physical cores)")
    group.add_argument("--kv-cache-dtype", default="auto", help="auto, float32, bfloat16")
    group.add_argument("--max-model-len", type=int, help="tokens of prompt and answer together")
    return group


def _bench_options(parser: argparse.ArgumentParser) -> None:
    """A LIST is separated by commas; every entry is measured with every other."""
    words, integers = _list_of(str), _list_of(int)
    group = _runtime_options(parser)
    group.add_argument("--dtype", type=words, default=["auto"], metavar="LIST", help="default auto")
    group.add_argument(
        "--quantization", type=words, default=["none"], metavar="LIST", help="none, int8, int4, fp8"
    )
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--methods",
        type=words,
        metavar="LIST",
        help="beside plain decoding (default: ngram, a built-in head, both together)",
    )
    group.add_argument("--draft-model", "--speculative-model", dest="draft_model")
    group.add_argument("--num-speculative-tokens", type=int, metavar="K", help="of --methods")
    group.add_argument(
        "--speculative-config",
        type=_json_of(dict, list),
        action="append",
        default=[],
        metavar="JSON",
        help="one more method, with its own options; may be given several times",
    )
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--suite", type=Path, metavar="FILE", help="JSONL: turns or prompt, category"
    )
    group.add_argument("--category", type=words, metavar="LIST", help="of the suite (default all)")
    group.add_argument("--num-prompts", type=int, help="evenly over the categories (default all)")
    group.add_argument("--turns", choices=("first", "all"), default="first", help="of a question")
    group.add_argument(
        "--temperature", type=_list_of(float), default=[0.0], metavar="LIST", help="default 0"
    )
    group.add_argument(
        "--concurrency", type=integers, default=[1], metavar="LIST", help="in flight (default 1)"
    )
    group.add_argument("--max-tokens", type=int, default=128, help="an answer's (default 128)")
    group.add_argument("--rounds", type=int, default=3, help="of every method (default 3)")
    group.add_argument("--seed", type=int, default=0, help="of sampled text")
    group.add_argument("--cost-curve", action="store_true", help="time of a step by its rows")
    group.add_argument("--context-lengths", type=integers, metavar="LIST", help="of the cost curve")
    group.add_argument("--rows", type=integers, metavar="LIST", help="of the cost curve")
    group.add_argument("--batch", type=integers, metavar="LIST", help="requests, of the cost curve")
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="another engine beside ours; may be given several times",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--json", action="store_true", help="last line: one JSON object")
    group.add_argument(
        "--out", type=Path, metavar="FILE", help="the same, written after every round"
    )
    group.add_argument("--png", type=Path, metavar="FILE", help="pictures (needs matplotlib)")


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, help="default 256")
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    group.add_argument("--top-p", type=float, default=1.0, help=_TOP_P)
    group.add_argument("--top-k", type=int, default=0, help=_TOP_K)
    group.add_argument(
        "--min-p", type=float, default=0.0, help="least probability, as a share of the highest"
    )
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: less of all text so far"
    )
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, help="above 0: fewer words said already"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, help="the same, by how often they were said"
    )
    group.add_argument(
        "--logit-bias", type=_json_of(dict), default={}, metavar="JSON", help='{"token id": added}'
    )
    group.add_argument("--seed", type=int, help="the same seed, the same text (default: a new one)")
    group.add_argument(
        "--stop", action="append", default=[], help="ends the text; may be given several times"
    )
    group.add_argument(
        "--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="end the text, too"
    )
    group.add_argument("--min-tokens", type=int, default=0, help="nothing ends the text before")
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on where the model would end its answer"
    )


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Of what commas separate."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"not {kind.__name__} values separated by commas: {text!r}"
            ) from None

    return parse


def _json_of(*kinds: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
        if not isinstance(value, kinds):
            what = " or list" if list in kinds else ""
            raise argparse.ArgumentTypeError(f"not a JSON object{what}: {text!r}")
        return value

    return parse


if __name__ == "__main__":
    sys.exit(main())
