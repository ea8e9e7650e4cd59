"""The command line: what it prints and where, its exit status, and how it refuses."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_llm
import torch
from transformers import MambaConfig, T5Config

from slipstream import LLM, SamplingParams, cli, show
from slipstream.text import Piece

TARGET = str(tiny_llm.target())
NGRAM_K = ["--method", "ngram", "--num-speculative-tokens", "4"]
ESCAPE = "\x1b"
# SIGINT may be ignored in whoever runs the tests, and children inherit that
MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from slipstream.cli import main; sys.exit(main())"
)


@dataclasses.dataclass
class Result:
    status: int
    out: str
    err: str

    @property
    def last(self) -> dict[str, object]:
        """The last line of stdout."""
        found: dict[str, object] = json.loads(self.out.splitlines()[-1])
        return found


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        try:
            status = cli.main(list(arguments))
        except SystemExit as left:  # the argument parser's way out
            status = int(str(left.code))
        return Result(status, *capsys.readouterr())

    return call


@pytest.fixture
def generate(run: Run) -> Run:
    def call(*arguments: str) -> Result:
        return run("generate", "--model", TARGET, "--max-tokens", "24", *arguments)

    return call


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | variables


def spawn(*arguments: str, stdin: bytes = b"", **variables: str) -> Result:
    """Run a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        input=stdin,
        capture_output=True,
        env=environment(**variables),
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def refused(result: Result, *said: str) -> None:
    """Exit status 2, one or two lines on stderr that name what is wrong, nothing on stdout."""
    assert result.status == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    assert 1 <= len(result.err.splitlines()) <= 2, result.err
    for part in said:
        assert part in result.err


def answer(prompt: str, chat: bool = True, **params: object) -> str:
    """What the library says to it."""
    llm = tiny_llm.llm()
    given = SamplingParams(**{"temperature": 0, "max_tokens": 24, **params})  # type: ignore[arg-type]
    conversation = [{"role": "user", "content": prompt}]
    output = (llm.chat(conversation, given) if chat else llm.generate(prompt, given))[0]
    return output.outputs[0].text


# generate


def test_the_text_goes_to_stdout_and_the_figures_to_stderr(generate: Run) -> None:
    result = generate("the train")
    assert result.status == 0
    assert result.out == answer("the train") + "\n"
    assert re.search(r"tokens/s · τ \d\.\d\d · .* · 24 tokens in", result.err)
    assert ESCAPE not in result.out + result.err


def test_a_process_prints_what_the_library_says_and_no_colour_into_a_pipe() -> None:
    result = spawn("generate", "--model", TARGET, "--max-tokens", "24", "the träin 😀")
    assert (result.status, result.out) == (0, answer("the träin 😀") + "\n")
    assert ESCAPE not in result.out + result.err


def test_the_figures_say_what_speculation_did(generate: Run) -> None:
    assert "decoded plainly" in generate("--method", "none", "the train").err
    assert "ngram found nothing to draft from" in generate("--max-tokens", "1", "the train").err
    assert re.search(r"acceptance \d+% \(by position", generate(*NGRAM_K, "the train").err)


def test_json_is_the_last_line(generate: Run) -> None:
    result = generate("--json", *NGRAM_K, "the train")
    assert result.out.startswith(answer("the train") + "\n")
    assert set(result.last) == {
        "model",
        "method",
        "text",
        "tokens",
        "seconds",
        "tokens_per_second",
        "mean_tokens_per_step",
        "acceptance_rate",
        "acceptance_by_position",
        "steps",
        "drafted_tokens",
        "accepted_tokens",
    }
    assert (result.last["model"], result.last["method"]) == (TARGET, "ngram")
    assert (result.last["text"], result.last["tokens"]) == (answer("the train"), 24)


def test_json_holds_the_text_as_it_is(generate: Run) -> None:
    """:smile: stays a word; a terminal library may know it as a picture."""
    smile = tiny_llm.tokenizer_of().get_vocab()[tiny_llm.SMILE]
    result = generate("--json", "--max-tokens", "3", "--logit-bias", json.dumps({smile: 99}), "x")
    assert result.last["text"] == tiny_llm.SMILE * 3
    assert result.out.startswith(tiny_llm.SMILE * 3 + "\n")


def test_raw_leaves_the_template_out(generate: Run) -> None:
    assert generate("--raw", "the train").out == answer("the train", chat=False) + "\n"


def test_a_system_message_is_heard(generate: Run) -> None:
    llm = tiny_llm.llm()
    conversation = [
        {"role": "system", "content": "one in on"},
        {"role": "user", "content": "the train"},
    ]
    expected = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=24))[0]
    assert generate("--system", "one in on", "the train").out == expected.outputs[0].text + "\n"
    refused(generate("--system", "one", "--raw", "x"), "--system", "--raw")


def test_a_dash_reads_standard_input(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the träin\nin on"))
    assert generate("-").out == answer("the träin\nin on") + "\n"


def test_options_reach_the_sampling_parameters(generate: Run) -> None:
    sampled = generate("--temperature", "1", "--seed", "3", "--top-k", "9", "the train")
    assert sampled.out == answer("the train", temperature=1, seed=3, top_k=9) + "\n"
    whole = answer("the train")
    stopped = generate("--stop", "nothing", "--stop", whole[6:8], "the train")
    assert stopped.out == answer("the train", stop=["nothing", whole[6:8]]) + "\n" != whole + "\n"
    penalised = generate("--repetition-penalty", "1.5", "--min-tokens", "3", "the train")
    assert penalised.out == answer("the train", repetition_penalty=1.5, min_tokens=3) + "\n"
    token = str(tiny_llm.llm().tokenizer.encode(whole)[4])
    ended = generate("the train", "--json", "--stop-token-ids", token)
    assert ended.last["text"] == answer("the train", stop_token_ids=[int(token)])


@pytest.mark.parametrize(
    "options",
    [
        NGRAM_K,
        ["--draft-model", str(tiny_llm.draft())],
        ["--speculative-model", str(tiny_llm.draft()), "--num-speculative-tokens", "2"],
        ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}'],
        ["--speculative-config", json.dumps({"model": str(tiny_llm.draft())})],
        ["--method", "ngram", "--speculative-config", '{"num_speculative_tokens": 2}'],
        ["--method", "none"],
    ],
)
def test_no_way_of_speculating_changes_the_text(generate: Run, options: list[str]) -> None:
    result = generate("--json", *options, "the train")
    assert result.last["text"] == answer("the train")
    assert bool(result.last["drafted_tokens"]) == (options != ["--method", "none"])


def test_compare_shows_both_texts_and_both_speeds(generate: Run) -> None:
    result = generate("--compare", "--json", *NGRAM_K, "the train")
    assert result.status == 0
    text = answer("the train")
    expected = f"── plain \n{text}\n── speculative \n{text}\n"
    assert result.out.startswith(expected)
    assert f"identical, all {len(text)} characters" in result.err
    assert "plain" in result.err
    assert ESCAPE not in result.out + result.err


def test_compare_has_its_documented_json(generate: Run) -> None:
    found = generate("--compare", "--json", *NGRAM_K, "the train").last
    assert set(found) == {"model", "method", "plain", "speculative", "identical", "speedup"}
    assert (found["model"], found["method"], found["identical"]) == (TARGET, "ngram", True)
    plain, speculative = found["plain"], found["speculative"]
    assert isinstance(plain, dict)
    assert isinstance(speculative, dict)
    assert set(plain) == {"text", "tokens", "seconds", "tokens_per_second"}
    assert {
        "mean_tokens_per_step",
        "acceptance_rate",
        "acceptance_by_position",
        *plain,
    } <= set(speculative)
    assert plain["text"] == speculative["text"] == answer("the train")
    assert plain["tokens"] == speculative["tokens"] == 24
    ratio = speculative["tokens_per_second"] / plain["tokens_per_second"]
    assert found["speedup"] == pytest.approx(ratio, rel=0.01)


def test_compare_of_sampled_text_uses_one_seed(generate: Run) -> None:
    found = generate("--compare", "--json", "--temperature", "1", *NGRAM_K, "the train").last
    assert found["identical"] is True


def test_compare_of_another_sampled_text_is_no_fault(generate: Run) -> None:
    draft = ["--draft-model", str(tiny_llm.draft()), "--temperature", "1", "--seed", "1"]
    result = generate("--compare", "--json", *draft, "the train")
    assert result.status == 0
    assert result.last["identical"] is False
    assert "sampled: the texts share a distribution" in result.err


def test_compare_of_another_greedy_text_is_a_fault(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream import engine, verify

    def follow(draft, choose):  # type: ignore[no-untyped-def]
        verdict = verify.follow(draft, choose)
        return dataclasses.replace(verdict, next_token=77) if draft else verdict

    monkeypatch.setattr(engine, "follow", follow)
    result = generate("--compare", "--json", *NGRAM_K, "the train")
    assert result.status == 1
    assert result.last["identical"] is False
    assert "text: different" in result.err
    assert "fault at output token" in result.err


def test_a_gguf_file_is_a_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "models"))
    from tiny_gguf import tiny, write_gguf

    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"))
    arguments = ["--model", str(path), "--max-tokens", "8", "--json", "hello"]
    result = run("generate", *arguments)
    assert result.status == 0
    assert result.last["tokens"] == 8


# The other commands


def test_chat_answers_line_by_line_and_remembers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the train\n\nin on\n"))
    result = run("chat", "--model", TARGET, "--max-tokens", "9", "--system", "one")
    assert result.status == 0
    llm = tiny_llm.llm()
    messages = [{"role": "system", "content": "one"}]
    for line in ("the train", "in on"):
        messages.append({"role": "user", "content": line})
        output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=9))[0]
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        assert output.outputs[0].text + "\n" in result.out
    assert result.err.count("tokens/s") == 2


def test_chat_goes_on_after_a_line_that_is_too_long(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 100 + "\nin on\n"))
    result = run("chat", "--model", TARGET, "--max-tokens", "9", "--max-model-len", "64")
    assert result.status == 0
    assert "the context holds 64" in result.err
    assert answer("in on", max_tokens=9) in result.out


def test_pull_prints_the_folder(run: Run) -> None:
    assert run("pull", TARGET) == Result(0, TARGET + "\n", "")


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("slipstream 0.")


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["verify"], ["pull"]])
def test_help_needs_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\nfrom slipstream.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: slipstream")


# Bad input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tempreture", "1", "x"], ["--tempreture: did you mean --temperature?"]),
        (["--max-tok", "5", "x"], ["generate: unknown option --max-tok: did you mean --max-token"]),
        (["--max-token=5", "x"], ["--max-token: did", "try slipstream generate --help"]),
        (["--zzz", "x"], ["unknown option --zzz\n"]),
        (["why", "is", "it"], ["one argument too many: 'is'", "quotes"]),
        (["--method", "ngrm", "x"], ["unknown speculative method 'ngrm'", "'ngram'"]),
        (["--method", "draft_model", "x"], ["--method draft_model needs a model", "--draft-model"]),
        (["--speculative-config", "{", "x"], ["--speculative-config", "not JSON"]),
        (["--speculative-config", "3", "x"], ["--speculative-config", "not a JSON object or list"]),
        (["--speculative-config", "[]", "x"], ["a list of such, got []"]),
        (["--speculative-config", "[3]", "x"], ["a list of such, got [3]"]),
        (
            ["--speculative-config", '[{"method": "ngram"}]', "--method", "ngram", "x"],
            ["lists several drafters: put method into them"],
        ),
        (["--speculative-config", '{"methd": 1}', "x"], ["'methd'"]),
        (["--speculative-config", '{"method": {}}', "x"], ["unknown speculative method"]),
        (["--speculative-config", '{"method": "ngram", "k": 1}', "x"], ["ngram option 'k'"]),
        (
            ["--speculative-config", '{"method": "ngram"}', "--method", "draft_model", "x"],
            ["'ngram'", "'draft_model'", "give one of them"],
        ),
        (["--num-speculative-tokens", "0", "x"], ["num_speculative_tokens", "at least 1"]),
        (["--num-speculative-tokens", "two", "x"], ["--num-speculative-tokens", "two"]),
        (["--temperature", "-0.1", "x"], ["temperature must be 0 (greedy) or more"]),
        (["--temperature", "nan", "x"], ["temperature"]),
        (["--top-p", "0", "x"], ["top_p must be in (0, 1]"]),
        (["--top-p", "1.5", "x"], ["top_p must be in (0, 1]"]),
        (["--top-k", "-2", "x"], ["top_k"]),
        (["--min-p", "2", "x"], ["min_p"]),
        (["--max-tokens", "0", "x"], ["max_tokens"]),
        (["--min-tokens", "25", "x"], ["min_tokens must be at most max_tokens (24)"]),
        (["--repetition-penalty", "0", "x"], ["repetition_penalty"]),
        (["--seed", "-1", "x"], ["seed"]),
        (["--stop", "", "x"], ["stop"]),
        (["x", "--stop-token-ids", "265"], ["a token id must be", "265"]),
        (["--logit-bias", "{", "x"], ["--logit-bias", "not JSON"]),
        (["--logit-bias", "3", "x"], ["--logit-bias", "not a JSON object"]),
        (["--logit-bias", '{"the": 1}', "x"], ["--logit-bias maps token ids to numbers"]),
        (["--logit-bias", '{"1": "x"}', "x"], ["logit_bias"]),
        (["--logit-bias", '{"9999": 1}', "x"], ["a token id must be", "265"]),
        ([""], ["the prompt is empty"]),
        ([" \n"], ["the prompt is empty"]),
        ([], ["prompt"]),
        (["--max-model-len", "9", "the train"], ["tokens, the context holds 9"]),
        (["x" * tiny_llm.CONTEXT], [f"the context holds {tiny_llm.CONTEXT}"]),
        (["--max-model-len", "99999", "x"], ["max_model_len 99999 is more than"]),
        (["--max-model-len", "1", "x"], ["max_model_len"]),
        (["--dtype", "int8", "x"], ["unknown dtype 'int8'"]),
        (["--device", "gpu", "x"], ["unknown device 'gpu'"]),
        (["--compare", "--method", "none", "x"], ["--compare needs a drafter"]),
        (["--method", "none", "--draft-model", "m", "x"], ["--method none takes no other"]),
        (["--draft-model", "/no/such", "x"], ["no such file or folder: /no/such"]),
        (["--draft-model", str(tiny_llm.stranger()), "x"], ["another tokenizer: token 263"]),
        (["--model", "/no/such", "x"], ["no such file or folder: /no/such"]),
        (["--model", "nothing like it", "x"], ["no model 'nothing like it'", "smollm2-135m"]),
        (["--model", str(tiny_llm.without_template()), "x"], ["no chat template", "--raw"]),
    ],
)
def test_bad_input_is_refused_in_a_line_or_two(
    generate: Run, options: list[str], said: list[str]
) -> None:
    refused(generate(*options), *said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "none"], "verify needs a drafter"),
        (["--repeats", "0"], "--repeats must be"),
        (["--num-prompts", "0"], "--num-prompts must be"),
        (["--max-tokens", "0"], "--max-tokens must be"),
        (["--prompts", "/no/such.txt"], "prompts file /no/such.txt can't be read"),
        (["--top-p", "0"], "top_p"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_bad_input_of_verify_is_refused(run: Run, options: list[str], said: str) -> None:
    refused(run("verify", "--model", TARGET, *options), said)


@pytest.mark.parametrize("command", [[], ["generat"]])
def test_no_or_an_unknown_command_is_refused(run: Run, command: list[str]) -> None:
    refused(run(*command))


def test_cuda_without_a_gpu_is_refused(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(generate("--device", "cuda", "x"), "cuda", "GPU", "--device cpu")


def test_truncated_weights_are_refused(generate: Run, tmp_path: Path) -> None:
    folder = tiny_llm.copy_of(tiny_llm.target(), tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(generate("--model", str(folder), "x"), str(weights), "cut short")


def test_a_corrupt_gguf_is_refused(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "bad.gguf"
    for content in (b"", b"GGUF", b"GGUF" + bytes(range(200)), b"nothing like it" * 50):
        file.write_bytes(content)
        refused(generate("--model", str(file), "x"), "bad.gguf")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            MambaConfig(
                vocab_size=265,
                hidden_size=16,
                num_hidden_layers=2,
                architectures=["MambaForCausalLM"],
            ),
            "(mamba) has layers that are neither full nor sliding-window attention: 0 (linear",
        ),
        (
            T5Config(
                vocab_size=265,
                d_model=16,
                d_ff=16,
                num_layers=2,
                num_heads=2,
                architectures=["T5ForConditionalGeneration"],
            ),
            "encoder-decoder model (t5)",
        ),
    ],
)
def test_an_architecture_that_cannot_run_is_refused_by_name(
    generate: Run, tmp_path: Path, config: MambaConfig | T5Config, said: str
) -> None:
    folder = tiny_llm.copy_of(tiny_llm.target(), tmp_path / "other", **config.to_dict())
    refused(generate("--model", str(folder), "x"), said)


def test_a_hub_out_of_reach_is_refused(tmp_path: Path) -> None:
    result = spawn(
        *["generate", "--model", "nobody/nothing", "x"],
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HOME=str(tmp_path),
    )
    refused(result, "nobody/nothing could not be fetched", "http://127.0.0.1:9")


@pytest.mark.parametrize(("stdin", "said"), [(b"\xff\xfe\x00\x80", "UTF-8"), (b"", "is empty")])
def test_standard_input_that_holds_no_text_is_refused(
    generate: Run, monkeypatch: pytest.MonkeyPatch, stdin: bytes, said: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    refused(generate("-"), said)


def test_an_argument_that_is_not_text_is_refused(generate: Run) -> None:
    refused(generate(os.fsdecode(b"\xff\xfe")), "UTF-8")


# Interruptions


def long_run(*options: str) -> subprocess.Popen[bytes]:
    """A text that would go on for long."""
    command = ["generate", "--model", TARGET, "--max-tokens", "4000", "--ignore-eos", "the train"]
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # nothing may stay behind in a buffer of ours
        env=environment(PYTHONUNBUFFERED="1"),
    )


@pytest.mark.parametrize("options", [["--json"], ["--compare"], ["--compare", "--json"]])
def test_ctrl_c_ends_a_text_with_130_and_keeps_what_came(options: list[str]) -> None:
    with long_run(*options) as process:
        assert process.stdout is not None
        first = b""
        while len(first) < 40:
            first += process.stdout.read(24)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    shown = (first + out).decode().removeprefix("── plain \n").rstrip("\n")
    if "--json" in options:
        shown, _, last = shown.rpartition("\n")
        found = json.loads(last)
        assert found.get("plain", found)["text"] == shown
    if options == ["--compare", "--json"]:
        assert (found["speculative"], found["identical"], found["speedup"]) == (None, None, None)
    assert shown
    whole = answer("the train", max_tokens=min(len(shown), 4000), ignore_eos=True)
    assert whole.startswith(shown)
    assert b"Traceback" not in err
    assert len(err.splitlines()) <= 2


def test_ctrl_c_in_the_second_text_of_a_comparison_says_nothing_of_their_likeness(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = []

    def piece(out: object, item: Piece) -> None:
        pieces.append(item.text)
        if len(pieces) == 30:  # of the second text: the first has 24
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(show, "piece", piece)
    result = generate("--compare", "--json", "the train")
    assert result.status == 130
    assert (result.last["identical"], result.last["speedup"]) == (None, None)
    plain, cut = result.last["plain"], result.last["speculative"]
    assert isinstance(plain, dict)
    assert isinstance(cut, dict)
    assert plain["text"] + cut["text"] == "".join(pieces)
    assert 0 < cut["tokens"] < plain["tokens"] == 24
    assert "different" not in result.err
    assert result.err.count("tokens/s") == 2


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    with long_run() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(4)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err


def test_ctrl_c_while_loading_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "__init__", interrupted)
    result = run("generate", "--model", TARGET, "x")
    assert result.status == 130
    assert result.err.strip() == "slipstream: interrupted"
