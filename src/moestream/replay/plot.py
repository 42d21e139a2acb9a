"""The curves as a picture: bytes read and hit rate over the budget, a line a policy, between demand and Belady."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError
from moestream.files import printable
from moestream.make.output import new_file
from moestream.replay.curves import POOLED, Point
from moestream.replay.run import BELADY

#: Told apart by people who see no red or no green (Okabe and Ito), and by their markers where printed grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
_MARKERS = "osD^vP*X"
_INCHES, _DPI = (8.0, 7.2), 100
#: Enough for any plot this makes.
_ROOM_BYTES = 8 << 20


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write the plot of one trace, or of several the pooled curves; its format is the file's ending. Needs matplotlib.

    Budgets at which a route was refused are left out: what was not counted would look like a gain. Raises RefusedError
    without a place to write and when nothing is left to draw.
    """
    from matplotlib.figure import Figure

    pooled = [point for point in points if point.trace == POOLED] or list(points)
    shown = [point for point in pooled if point.figures.refused == 0]
    if not shown:
        raise RefusedError("nothing to draw: every budget is smaller than the widest route; name larger ones")
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    read, hits = figure.subplots(2, 1, sharex=True)
    _draw_lines(read, hits, shown)
    early = ", early reads too" if any(point.figures.early for point in shown) else ""
    read.set_ylabel(
        f"read from disk{early} ({_scale(read.yaxis, max(p.figures.demand_bytes for p in shown))})"
    )
    hits.set_ylabel("routed experts that were there (%)")
    hits.set_xlabel(f"memory for experts ({_scale(hits.xaxis, max(p.budget_bytes for p in shown))})")
    for axes in (read, hits):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    share = read.secondary_xaxis("top", functions=_shares(shown))
    share.set_xlabel("share of all experts (%)")
    # A dollar in a name begins no formula.
    figure.suptitle(printable(title), fontsize=11, parse_math=False)
    figure.legend(
        *read.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    with new_file(path, _ROOM_BYTES, "--plot") as temporary:
        figure.savefig(temporary, format=path.suffix.lower().removeprefix("."))


def _draw_lines(read: Any, hits: Any, shown: list[Point]) -> None:
    policies = list(dict.fromkeys(point.policy for point in shown))
    others = [policy for policy in policies if policy != BELADY]
    # Where nothing is refused the demand is the same at every budget.
    read.axhline(shown[0].figures.demand_bytes, color="black", linestyle=":", label="demand: nothing kept")
    for policy in policies:
        of_policy = sorted((p for p in shown if p.policy == policy), key=lambda p: p.budget_bytes)
        if policy == BELADY:
            style = {
                "color": "black",
                "linestyle": "--",
                "label": "belady: the fewest reads, none early",
                "zorder": 3,
            }
        else:
            number = others.index(policy)
            style = {
                "color": _COLOURS[number % len(_COLOURS)],
                "marker": _MARKERS[number % len(_MARKERS)],
                "linestyle": "-" if number < len(_COLOURS) else "-.",
                "markersize": 4,
                "linewidth": 1.2,
                "label": printable(policy).replace("$", r"\$"),
            }
        budgets = [point.budget_bytes for point in of_policy]
        read.plot(budgets, [point.figures.bytes_read for point in of_policy], **style)
        hits.plot(budgets, [100 * point.figures.hit_rate for point in of_policy], **style)


def _shares(shown: list[Point]) -> Any:
    whole = shown[-1].budget_bytes / shown[-1].share
    return (lambda size: 100 * size / whole, lambda share: share * whole / 100)


def _scale(axis: Any, largest: float) -> str:
    """Have an axis of bytes show its ticks in a unit that suits the largest value; the unit's name."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, size = next((pair for pair in units if largest >= pair[1]), units[-1])
    axis.set_major_formatter(lambda value, _: f"{value / size:g}")
    return unit
