"""What is imported when: nothing heavy before it is needed."""

import subprocess
import sys

import pytest
import tiny_llm

from slipstream.runtimes import native

HEAVY = ["torch", "transformers", "numpy", "rich", "jinja2", "tokenizers", "huggingface_hub"]


def imported(code: str, *arguments: str) -> set[str]:
    """The heavy modules that are there after some code."""
    code = f"import sys\n{code}\nprint('imported', *(sys.modules.keys() & {HEAVY}))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


COMMAND = """
from slipstream.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as left:
    status = left.code
assert status == {status}, status
"""
REFUSED, DONE = COMMAND.format(status=2), COMMAND.format(status=0)


def test_the_command_line_is_there_at_once() -> None:
    assert imported("import slipstream.cli") == set()


@pytest.mark.parametrize("command", ["generate", "verify", "chat", "bench", "pull"])
def test_a_wrong_model_is_refused_before_anything_is_imported(command: str) -> None:
    prompt = ["x"] if command == "generate" else []
    named = ["/does/not/exist"] if command == "pull" else ["--model", "/does/not/exist"]
    assert imported(REFUSED, command, *named, *prompt) == set()


@pytest.mark.parametrize(
    "options",
    [
        ["--no-such-option"],
        ["--method", "ngrm"],
        ["--method", "draft_model"],
        ["--draft-model", "/does/not/exist"],
        ["--speculative-config", '{"prompt_lookup_min": 0}'],
        ["--top-p", "7"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_refused_before_torch_is_there(options: list[str]) -> None:
    found = imported(REFUSED, "generate", "--model", str(tiny_llm.target()), *options, "x")
    assert found <= {"numpy"}


@pytest.mark.skipif(native.MISSING is not None, reason=str(native.MISSING))
@pytest.mark.parametrize(
    "options", [[], ["--method", "ngram", "--compare"]], ids=["plain", "ngram"]
)
def test_a_plain_llama_generates_without_transformers(options: list[str]) -> None:
    model = ["--model", str(tiny_llm.target()), "--max-tokens", "8"]
    found = imported(DONE, "generate", *model, *options, "in on")
    assert {"torch", "tokenizers"} <= found
    assert "transformers" not in found
