"""The bench as a PNG: speedup by category, and the cost curve if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise SlipstreamError("--png needs matplotlib: pip install 'slipstream[bench]'")


def draw(path: Path, document: Mapping[str, Any]) -> None:
    import_module("matplotlib").use("Agg")  # no display asked for
    pyplot = import_module("matplotlib.pyplot")
    panels = [_speedups, _cost] if document["cost_curve"] else [_speedups]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(8 * len(panels), 6), squeeze=False, layout="constrained"
    )
    for panel, axis in zip(panels, axes[0], strict=True):
        panel(axis, document)
        axis.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{document['model']} on {document['machine']['cpu']}", fontsize="medium")
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


def _speedups(axis: Any, document: Mapping[str, Any]) -> None:
    """A group of bars a category, with the spread over the rounds; 1 is plain decoding."""
    runs = [run for run in document["runs"] if run["speedup_vs_plain"]]
    names = list(dict.fromkeys(name for run in runs for name in run["by_category"]))
    width = 0.8 / max(len(runs), 1)
    settings = {(run["temperature"], run["concurrency"]) for run in runs}
    for n, run in enumerate(runs):
        groups = [{"speedup_vs_plain": run["speedup_vs_plain"]}]
        groups += [run["by_category"].get(name, {}) for name in names]
        found = [
            (at, group["speedup_vs_plain"])
            for at, group in enumerate(groups)
            if group.get("speedup_vs_plain")
        ]
        axis.bar(
            [at + (n - (len(runs) - 1) / 2) * width for at, _ in found],
            [ratio["median"] for _, ratio in found],
            width,
            yerr=[
                [ratio["median"] - ratio["min"] for _, ratio in found],
                [ratio["max"] - ratio["median"] for _, ratio in found],
            ],
            error_kw={"elinewidth": 0.8},
            label=_label(run, setting=len(settings) > 1),
        )
    axis.axhline(1, color="black", linewidth=0.8, label="plain decoding")
    axis.set_xticks(range(len(names) + 1), ["all", *names], rotation=30, ha="right")
    axis.set_ylabel("plain seconds / speculative seconds")
    axis.set_title("speedup by category")


def _label(run: Mapping[str, Any], *, setting: bool) -> str:
    engine = "" if run["engine"] == "slipstream" else f"{run['engine']} "
    label = f"{engine}{run['method']} {run['precision']}"
    return f"{label}, T={run['temperature']:g}, {run['concurrency']} at once" if setting else label


def _cost(axis: Any, document: Mapping[str, Any]) -> None:
    for precision, contexts in document["cost_curve"].items():
        for context, times in contexts.items():
            points = sorted((int(count), value) for count, value in times.items())
            axis.plot(
                *zip(*points, strict=True), marker="o", label=f"{precision}, {context} tokens"
            )
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows of a step")
    axis.set_ylabel("milliseconds")
    axis.set_title("cost curve t(1, n), behind so many tokens")
