"""What the README tells a reader to type exists and is understood."""

import re
import shlex
from pathlib import Path

import pytest

from slipstream import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The lines of bash blocks that begin with a program, as words, continued lines joined."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line and line[0] == program]


def test_there_is_something_to_type() -> None:
    assert commands("make")
    assert commands("slipstream")
    assert blocks("python")


@pytest.mark.parametrize("arguments", commands("make"), ids=" ".join)
def test_make_targets_exist(arguments: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    wanted = [word for word in arguments if "=" not in word and not word.startswith("-")]
    assert wanted
    assert set(wanted) <= set(targets)


@pytest.mark.parametrize("arguments", commands("slipstream"), ids=" ".join)
def test_commands_are_understood(arguments: list[str]) -> None:
    if {"--help", "--version"}.isdisjoint(arguments):  # these leave at once
        assert cli._parser().parse_args(arguments).command == arguments[0]


@pytest.mark.parametrize("block", blocks("python"))
def test_python_compiles(block: str) -> None:
    compile(block, "README.md", "exec")


def test_no_placeholder_is_left() -> None:
    assert re.findall(r"@[A-Z]+@", README) == []
