"""What a person sees: tinted text, a diff, tables, progress."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from slipstream.metrics import Metrics
from slipstream.stream import RequestOutput, tokens_per_second
from slipstream.text import Piece

if TYPE_CHECKING:
    from slipstream.compare import Comparison
    from slipstream.proof.identity import Mismatch
    from slipstream.proof.run import Proof

_TOLD_EVERY = 15  # seconds, where stderr is no terminal
TINT = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": ""}
LEGEND = "[green]accepted draft[/] · [yellow]recovered[/] · [cyan]bonus[/]"


def consoles() -> tuple[Console, Console]:
    """(out, err): text goes to stdout; what accompanies it too on a terminal, else to stderr."""

    def console(stderr: bool) -> Console:
        return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)

    out = console(False)
    return out, out if out.is_terminal else console(True)


def piece(out: Console, item: Piece) -> None:
    """Print text as it comes, tinted by origin on a terminal."""
    if out.is_terminal:
        out.print(Text(item.text, style=TINT[item.origin]), end="")
    else:
        sys.stdout.write(item.text)
        sys.stdout.flush()


def summary(run: RequestOutput, method: str) -> str:
    """The figures of an answer in a line."""
    tokens = len(run.outputs[0].token_ids)
    speed = f"{tokens_per_second(run):.1f} tokens/s"
    return f"{speed} · {speculation(run.metrics, method)} · {tokens} tokens in {run.seconds:.1f} s"


def speculation(metrics: Metrics, method: str) -> str:
    """τ and acceptance."""
    if method == "none":
        return "decoded plainly"
    by_position = " ".join(f"{a:.2f}" for a in metrics.acceptance_by_position)
    positions = f" (by position {by_position})" if by_position else ""
    rate = f"acceptance {metrics.acceptance_rate:.0%}{positions}"
    if not metrics.drafted:
        rate = f"{method} found nothing to draft from"
    return f"τ {metrics.mean_tokens_per_step:.2f} · {rate}"


def comparison(err: Console, found: Comparison) -> None:
    """Both speeds, and whether the texts are the same; of texts cut short only the speeds."""
    if found.speculative is None or found.cut:
        for method, part in (("none", found.plain), (found.method, found.speculative)):
            if part is not None:
                err.print(summary(part, method))
        return
    table = Table(
        title=f"{escape(found.model)}: plain against {found.method}", title_justify="left"
    )
    for column in ("", "tokens/s", "tokens", "seconds", "τ", "acceptance"):
        table.add_column(column, justify="left" if not column else "right")
    for name, run in (("plain", found.plain), (found.method, found.speculative)):
        metrics = run.metrics
        table.add_row(
            name,
            f"{tokens_per_second(run):.2f}",
            str(len(run.outputs[0].token_ids)),
            f"{run.seconds:.2f}",
            f"{metrics.mean_tokens_per_step:.2f}",
            f"{metrics.acceptance_rate:.0%}" if metrics.drafted else "–",
        )
    err.print(table)
    plain, other = found.plain.outputs[0].text, found.speculative.outputs[0].text
    verdict = f"identical, all {len(plain)} characters" if found.identical else "different"
    err.print(f"text: {verdict} · speedup {found.speedup:.2f}×")
    if not found.identical:
        err.print(diff(plain, other))
        if found.mismatch is None:
            err.print("sampled: the texts share a distribution; each is as likely as the other")
        else:
            err.print(mismatch(found.mismatch))


def diff(plain: str, other: str) -> Text:
    """A character diff: [-only plain-], {+only speculative+}, red and green on a terminal."""
    text = Text()
    for kind, a, b, c, d in difflib.SequenceMatcher(None, plain, other, False).get_opcodes():
        if kind == "equal":
            same = plain[a:b]
            text.append(same if len(same) <= 80 else f"{same[:40]} … {same[-40:]}")
            continue
        if a != b:
            text.append(f"[-{plain[a:b]}-]", style="red")
        if c != d:
            text.append(f"{{+{other[c:d]}+}}", style="green")
    return text


def mismatch(found: Mismatch) -> str:
    return (
        f"{found.kind} at output token {found.position}: {found.plain_token} plain, "
        f"{found.other_token} speculative, logit gap {found.gap:.2g}"
    )


def proof(out: Console, found: Proof) -> None:
    """The proof as a table of tests and a verdict."""
    same = found.prompts - len(found.mismatches)
    near = len(found.mismatches) - found.faults
    table = Table(title=f"{escape(found.model)} with {found.method}", title_justify="left")
    for column in ("test", "samples", "result", "p", ""):
        table.add_column(column, justify="left" if column in ("test", "") else "right")
    states = {True: "[green]passed[/]", False: "[red]FAULT[/]"}
    near_ties = f", {near} near-tie" + "s" * (near > 1) if near else ""
    table.add_row(
        "greedy identity",
        f"{found.tokens} tokens",
        f"{same}/{found.prompts} identical{near_ties}",
        "–",
        states[not found.faults],
    )
    for test in found.tests:
        state = states[test.p_value >= found.alarm_below]
        row = (test.name, str(test.samples), f"{test.statistic:.3g}", f"{test.p_value:.2g}", state)
        table.add_row(*row)
    out.print(table)
    for difference in found.mismatches:
        out.print(mismatch(difference), markup=False)
    if found.tests:
        out.print(
            f"sampled tests alarm below p = {found.alarm_below:.1e}: "
            f"{found.false_alarm:.0e} false alarms in all"
        )
    out.print("passed: nothing changed" if found.passed else "[red]FAULT: the text changed[/]")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; gives the function that moves it on by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def progress_to(what: str, total: int) -> Iterator[Callable[[int | None, str], None]]:
    """A bar on stderr; gives the function that moves it to a place (None: on by one) with a word on
    how it goes. Where stderr is no terminal, a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    told = time.monotonic()
    note = TextColumn("{task.fields[note]}")
    with Progress(*columns, TimeRemainingColumn(), note, console=console) as bar:
        task = bar.add_task(what, total=total, note="")

        def move(done: int | None, word: str) -> None:
            nonlocal told
            if done is None:
                bar.advance(task)
            else:
                bar.update(task, completed=done, note=word)
            if not console.is_terminal and time.monotonic() - told > _TOLD_EVERY:
                told = time.monotonic()
                print(f"{what}: {bar.tasks[0].completed:,.0f} of {total:,} {word}", file=sys.stderr)

        yield move
