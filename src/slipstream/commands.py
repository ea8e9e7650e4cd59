"""What the subcommands do: options in, one of the library's functions, something to look at out."""

from __future__ import annotations

import dataclasses
import gc
import json
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.config import SamplingParams, require_integer
from slipstream.drafters import SpeculativeConfig
from slipstream.errors import SlipstreamError
from slipstream.speculation_options import method_of, speculative_config

EXIT_OK, EXIT_FAULT, EXIT_INTERRUPTED = 0, 1, 130


def pull(args: Namespace) -> int:
    from slipstream.models.sources import resolve

    print(resolve(args.model))
    return EXIT_OK


def generate(args: Namespace) -> int:
    prompt = _prompt(args.prompt)
    params, config = _sampling_params(args), speculative_config(args)
    if args.compare and config is None:
        raise SlipstreamError("--compare needs a drafter: leave --method none out")
    if args.raw and args.system is not None:
        raise SlipstreamError("--system is part of the chat template: leave --raw out")
    from slipstream import show

    llm = _llm(args, config)
    given = prompt if args.raw else _conversation(args.system, prompt)
    method = method_of(config)
    if args.compare:
        return _compare(llm, method, given, params, args.json)
    _, err = show.consoles()
    run, interrupted = _stream(llm, given, params)
    err.print(show.summary(run, method))
    if args.json:
        from slipstream.compare import run_dict

        figures = {"model": args.model, "method": method} | run_dict(run) | run.metrics.as_dict()
        print(json.dumps(figures))
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


def _compare(llm: Any, method: str, prompt: Any, params: SamplingParams, as_json: bool) -> int:
    from slipstream import show
    from slipstream.compare import compare

    out, err = show.consoles()
    shown = ""

    def on_piece(run: str, piece: Any) -> None:
        nonlocal shown
        if run != shown:
            out.print(f"\n── {run} " if shown else f"── {run} ")
            shown = run
        show.piece(out, piece)

    with _stop_asked() as asked:
        found = compare(llm, method, prompt, params, on_piece, asked)
    out.print()
    show.comparison(err, found)
    if out.is_terminal:
        out.print(show.LEGEND)
    if as_json:
        print(json.dumps(found.as_dict()))
    if found.cut:
        return EXIT_INTERRUPTED
    return EXIT_FAULT if found.mismatch and found.mismatch.kind == "fault" else EXIT_OK


def chat(args: Namespace) -> int:
    params, config = _sampling_params(args), speculative_config(args)
    from slipstream import show

    llm = _llm(args, config)
    out, err = show.consoles()
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    err.print("Ctrl-C cuts an answer short, Ctrl-D ends.")
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            out.print()
            return EXIT_OK
        except UnicodeDecodeError:
            err.print("that was not text: encode it in UTF-8")
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            run, _ = _stream(llm, messages, params)
        except SlipstreamError as error:  # a conversation too long for the context, say
            err.print(str(error), markup=False)
            messages.pop()
            continue
        err.print(show.summary(run, method_of(config)), style="dim")
        messages.append({"role": "assistant", "content": run.outputs[0].text})


def verify(args: Namespace) -> int:
    from slipstream.prompts import BUILT_IN, read_prompts

    config = speculative_config(args)
    if config is None:
        raise SlipstreamError("verify needs a drafter: leave --method none out")
    for name, least in (("num_prompts", 1), ("max_tokens", 1), ("repeats", 1), ("seed", 0)):
        require_integer("--" + name.replace("_", "-"), getattr(args, name), least)
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_tokens,
    )
    if params.greedy and not args.greedy_only:
        raise SlipstreamError("the sampled tests need --temperature above 0, or --greedy-only")
    prompts = read_prompts(Path(args.prompts)) if args.prompts else list(BUILT_IN)
    llm = _llm(args, config)
    from slipstream import show
    from slipstream.proof.run import prove

    proof = prove(
        llm,
        method_of(config),
        prompts[: args.num_prompts],
        params,
        repeats=0 if args.greedy_only else args.repeats,
        first_seed=args.seed,
        progress=show.progress,
    )
    out, _ = show.consoles()
    show.proof(out, proof)
    if args.json:
        print(json.dumps(proof.as_dict()))
    return EXIT_OK if proof.passed else EXIT_FAULT


def bench(args: Namespace) -> int:
    from slipstream.bench.command import run

    return run(args)


def train(args: Namespace) -> int:
    from slipstream import show
    from slipstream.models.sources import say
    from slipstream.train.config import TrainConfig, TrainOptions
    from slipstream.train.run import train as make

    names = ("epochs", "learning_rate", "tokens_per_step", "seed")
    own = [f.name for f in dataclasses.fields(TrainConfig) if f.name != "options"]
    config = TrainConfig(
        **{name: getattr(args, name) for name in own},
        options=TrainOptions(**{name: getattr(args, name) for name in names}),
    )
    command = " ".join(["slipstream", *sys.argv[1:]])
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        found = make(_llm(args, None), config, command, show.progress_to, say)
    except OSError as error:
        raise SlipstreamError(
            f"{error}: what is finished is kept; put it right and run the same command again"
        ) from error
    out, _ = show.consoles()
    out.print(f"{found['head']}: use it with --method {args.method} --draft-model {found['head']}")
    for name, tau in found["mean_tokens_per_step"].items():
        out.print(f"  τ {tau:.2f}  {name}")
    if args.json:
        print(json.dumps(found))
    return EXIT_OK


def _llm(args: Namespace, config: SpeculativeConfig | None) -> Any:
    first = "slipstream.llm" not in sys.modules
    from slipstream.llm import LLM

    if first:  # or what torch's import left is searched for cycles, half a second long, at the end
        gc.freeze()
    return LLM(
        args.model,
        speculative_config=config,
        runtime=args.runtime,
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        threads=args.threads,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
    )


def _stream(llm: Any, prompt: Any, params: SamplingParams) -> tuple[Any, bool]:
    """Print an answer as it comes; (RequestOutput, whether Ctrl-C cut it short)."""
    from slipstream import show

    out, _ = show.consoles()
    with _stop_asked() as asked:
        run = llm.stream(prompt, params).read(lambda piece: show.piece(out, piece), asked)
        out.print()
        return run, asked()


@contextmanager
def _stop_asked() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed: it ends the text after the step at hand, so that what is
    shown and what is counted agree. A second one ends everything at once."""
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _prompt(given: str) -> str:
    """The prompt itself, or what standard input holds if it is "-"."""
    try:
        prompt = sys.stdin.read() if given == "-" else given
        prompt.encode()
    except UnicodeError:
        raise SlipstreamError("the prompt is not text: encode it in UTF-8") from None
    if not prompt.strip():
        raise SlipstreamError("the prompt is empty: give some text")
    return prompt


def _conversation(system: str | None, prompt: str) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": prompt}]


def _sampling_params(args: Namespace) -> SamplingParams:
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    given["logit_bias"] = _token_ids(args.logit_bias)
    return SamplingParams(**given)


def _token_ids(bias: dict[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise SlipstreamError(
            f"--logit-bias maps token ids to numbers, got {json.dumps(bias)}"
        ) from None
