"""The curves as a picture: bytes read and hit rate over the budget, a line a policy, between demand and Belady."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError, UsageError
from moestream.replay.curves import POOLED, Point
from moestream.replay.run import BELADY

#: Told apart by people who see no red or no green (Okabe and Ito), and by their markers where printed grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
_MARKERS = "osD^vP*X"
_INCHES, _DPI = (8.0, 7.2), 100


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write the plot of one trace, or of several the pooled curves, as .svg or .png by the file's ending.

    Budgets at which a route was refused are left out: what was not counted would look like a gain. Raises UsageError
    without matplotlib (extra ``lab``) or a place to write, RefusedError when nothing is left to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'moestream[lab]'") from None
    pooled = [point for point in points if point.trace == POOLED] or list(points)
    shown = [point for point in pooled if point.figures.refused == 0]
    if not shown:
        raise RefusedError("nothing to draw: every budget is smaller than the widest route; name larger ones")
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    read, hits = figure.subplots(2, 1, sharex=True)
    _draw_lines(read, hits, shown)
    unit, scale = _unit(max(point.figures.demand_bytes for point in shown))
    read.yaxis.set_major_formatter(lambda value, _: f"{value / scale:g}")
    read.set_ylabel(f"read from disk ({unit})")
    hits.set_ylabel("routed experts that were there (%)")
    unit, scale = _unit(max(point.budget_bytes for point in shown))
    hits.xaxis.set_major_formatter(lambda value, _: f"{value / scale:g}")
    hits.set_xlabel(f"memory for experts ({unit})")
    for axes in (read, hits):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    share = read.secondary_xaxis("top", functions=_shares(shown))
    share.set_xlabel("share of all experts (%)")
    figure.suptitle(title, fontsize=11)
    figure.legend(
        *read.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    _save(figure, path)


def _draw_lines(read: Any, hits: Any, shown: list[Point]) -> None:
    policies = list(dict.fromkeys(point.policy for point in shown))
    others = [policy for policy in policies if policy != BELADY]
    first = [point for point in shown if point.policy == policies[0]]
    demand = sorted((point.budget_bytes, point.figures.demand_bytes) for point in first)
    read.plot(*zip(*demand, strict=True), color="black", linestyle=":", label="demand: nothing kept")
    for policy in policies:
        of_policy = sorted((p for p in shown if p.policy == policy), key=lambda p: p.budget_bytes)
        if policy == BELADY:
            style = {"color": "black", "linestyle": "--", "label": "belady: the least possible", "zorder": 3}
        else:
            number = others.index(policy)
            style = {
                "color": _COLOURS[number % len(_COLOURS)],
                "marker": _MARKERS[number % len(_MARKERS)],
                "linestyle": "-" if number < len(_COLOURS) else "-.",
                "markersize": 4,
                "linewidth": 1.2,
                "label": policy,
            }
        budgets = [point.budget_bytes for point in of_policy]
        read.plot(budgets, [point.figures.bytes_read for point in of_policy], **style)
        hits.plot(budgets, [100 * point.figures.hit_rate for point in of_policy], **style)


def _shares(shown: list[Point]) -> Any:
    whole = shown[-1].budget_bytes / shown[-1].share
    return (lambda size: 100 * size / whole, lambda share: share * whole / 100)


def _unit(largest: float) -> tuple[str, float]:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if largest >= scale:
            return unit, scale
    return "kB", 1e3


def _save(figure: Any, path: Path) -> None:
    """To a file beside it first: an error leaves no half of one."""
    part = path.with_name(path.name + ".part")
    try:
        figure.savefig(part, format=path.suffix.lower().removeprefix("."))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
