"""What a person sees of a bench."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Run = Mapping[str, Any]
NONE = "–"


def show(out: Console, document: Mapping[str, Any]) -> None:
    """Runs side by side, speedup by category, the cost curve, and the memory behind it."""

    def cell(run: Run) -> tuple[Any, ...]:
        return run["precision"], run["temperature"], run["concurrency"]

    for (precision, temperature, concurrency), group in groupby(document["runs"], cell):
        runs = list(group)
        out.print(
            f"[bold]{escape(document['model'])}, {precision}, temperature {temperature:g}, "
            f"{concurrency} at once[/]"
        )
        _speeds(out, runs)
        _latencies(out, runs)
        _categories(out, runs)
    _curves(out, document["cost_curve"], "")
    for precision, batches in document["cost_curve_batched"].items():
        for batch, contexts in batches.items():
            _curves(out, {precision: contexts}, f" of {batch} requests")
    _memory(out, document)


def _print(out: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table()
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _name(run: Run) -> str:
    ours = run["engine"] == "slipstream"
    return escape(run["method"] if ours else f"{run['engine']} {run['method']}")


def _speeds(out: Console, runs: Sequence[Run]) -> None:
    rows = []
    for run in runs:
        same = run["identical_to_plain"]
        rates = (run[name] for name in ("tokens_per_second", "decode_tokens_per_second"))
        counts = (NONE if same is None else f"{same}/{run['prompts']}", str(run["failures"]))
        rows.append((_name(run), *map(_number, rates), _ratio(run["speedup_vs_plain"]), *counts))
    _print(out, ("", "tokens/s", "decode", "speedup", "same text", "failed"), rows)
    out.print(
        "speedup: median (least–most) of the rounds, against the same engine's plain decoding"
    )


def _latencies(out: Console, runs: Sequence[Run]) -> None:
    rows = []
    for run in runs:
        acceptance = " ".join(f"{a:.2f}" for a in run["acceptance_by_position"] or ())
        waits = (_wait(run["ttft_ms"]), _wait(run["itl_ms"]))
        rows.append((_name(run), *waits, _number(run["mean_tokens_per_step"], 2), acceptance))
    _print(out, ("p50 / p95", "TTFT ms", "ITL ms", "τ", "acceptance by position"), rows)


def _categories(out: Console, runs: Sequence[Run]) -> None:
    compared = [run for run in runs if run["speedup_vs_plain"]]
    names = list(dict.fromkeys(name for run in compared for name in run["by_category"]))
    if len(names) > 1:
        found = [[run["by_category"].get(name, {}) for run in compared] for name in names]
        ratios = [[_ratio(part.get("speedup_vs_plain")) for part in parts] for parts in found]
        rows = [(escape(name), *row) for name, row in zip(names, ratios, strict=True)]
        _print(out, ("speedup", *map(_name, compared)), rows)


def _curves(out: Console, curves: Mapping[str, Any], more: str) -> None:
    for precision, contexts in curves.items():
        counts = list(next(iter(contexts.values())))
        out.print(f"[bold]{precision}: milliseconds of a step{more} by its rows[/]")
        rows = [(c, *(f"{times[n]:.2f}" for n in counts)) for c, times in contexts.items()]
        _print(out, ("context", *counts), rows)


def _memory(out: Console, document: Mapping[str, Any]) -> None:
    bandwidth = document["bandwidth_gb_s"]
    for precision, peak in document["peak_memory_gb"].items():
        reached = bandwidth["reached"][precision]
        step = f"; a step of one row reads weights at {reached:.1f} GB/s" if reached else ""
        out.print(f"{precision}: peak memory {peak:.2f} GB{step}")
    out.print(f"memory streams at {bandwidth['stream']:.1f} GB/s")


def _number(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _wait(value: Mapping[str, float] | None) -> str:
    return NONE if value is None else f"{value['p50']:.1f} / {value['p95']:.1f}"


def _ratio(value: Mapping[str, float] | None) -> str:
    return NONE if value is None else "{median:.2f}× ({min:.2f}–{max:.2f})".format(**value)
