"""A picture for an experiment: the arms' judged figure as bars with their ranges, and what would agree as marks."""

from __future__ import annotations

from typing import Any

from moestream.lab.experiment_figures import FIGURES
from moestream.reports.canvas import (
    COLOUR,
    DISK_DASH,
    Limit,
    Picture,
    Rows,
    draw_limits,
    edge_with,
    legend_below,
    mark_across,
    picture,
    value_at,
)
from moestream.reports.labs import Outcome, value_text
from moestream.reports.plots import rate_limits
from moestream.reports.summary import Ceilings

#: More arms than this (a probe's grid) are a table's business.
_MOST = 40
_FEWEST = 2


def bars(outcome: Outcome, ceilings: Ceilings, name: str) -> Picture | None:
    """None where there is nothing to compare."""
    if not outcome["figures"]:
        return None
    figure = str(outcome["figures"][0])
    found = {str(arm): of[figure] for arm, of in outcome["table"].items() if figure in of}
    if not _FEWEST <= len(found) <= _MOST:
        return None
    bounds, limits = _bounds(outcome, figure, found), _limits(figure, ceilings)

    def draw(drawing: Any, narrow: bool) -> None:
        rows = Rows(drawing, [("", list(found))], narrow=narrow, legend_inches=0.9 if narrow else 0.45)
        axes = rows.axes
        most = max([abs(of["high"]) for of in found.values()] + [bound for _, bound in bounds]) or 1.0
        most = edge_with(most, limits)
        for at, (arm, of) in zip(rows.positions, found.items(), strict=True):
            axes.barh(at, of["value"], rows.BAR, color=COLOUR["compute"], zorder=2)
            if of["low"] < of["high"]:
                axes.errorbar(
                    of["value"], at, xerr=[[of["value"] - of["low"]], [of["high"] - of["value"]]],
                    color=COLOUR["ink"], elinewidth=1.1, capsize=3, zorder=3.5,
                )  # fmt: skip
            end = max(of["value"], of["high"])
            for mine, bound in bounds:
                if mine == arm:
                    mark_across(axes, at, bound, "a bound of what was expected")
                    end = max(end, bound)
            value_at(axes, end + 0.012 * most, at, value_text(of["value"], figure))
        draw_limits(axes, limits, most)
        axes.set_xlim(0, most * (1.25 if narrow else 1.12))
        axes.xaxis.set_major_formatter(lambda value, _: value_text(value, figure))
        axes.locator_params(axis="x", nbins=4 if narrow else 7)
        axes.set_xlabel(FIGURES[figure].what if figure in FIGURES else figure)
        if bounds or limits:
            legend_below(drawing, axes, narrow, 2)

    caption = "Bars: means; whiskers: the range of what was seen." + (
        " Red marks: where a claim's bound lies for that arm." if bounds else ""
    )
    caption += " Dashed lines: what this box allows." if limits else ""
    return picture(name, figure.replace("_", " "), caption, draw)


def _limits(figure: str, ceilings: Ceilings) -> list[Limit]:
    """What bounds a figure on this box; [] for one that nothing but itself bounds."""
    if figure == "tok_per_s":
        return rate_limits(ceilings)
    disk, found = ceilings.disk_bytes_per_s, []
    if figure in ("bytes_per_token", "asked_per_token"):
        if ceilings.demand_bytes:
            label = f"nothing kept: {value_text(ceilings.demand_bytes, figure)}"
            found.append(Limit(ceilings.demand_bytes, label, DISK_DASH))
        if ceilings.even_bytes:
            label = f"the disk takes as long as computing: {value_text(ceilings.even_bytes, figure)}"
            found.append(Limit(ceilings.even_bytes, label))
    elif figure == "asked_bytes_per_s" and disk:
        found.append(Limit(disk, f"the disk's best rate: {value_text(disk, figure)}", DISK_DASH))
    elif figure == "compute_s_per_token" and ceilings.compute_s:
        seconds = ceilings.compute_s
        found.append(Limit(seconds, f"all in memory: {value_text(seconds, figure)}"))
    elif figure == "of_floor":
        found.append(Limit(1.0, "the floor: as fast as disk and processors allow"))
    return found


def _bounds(outcome: Outcome, figure: str, found: dict[str, Any]) -> list[tuple[str, float]]:
    """Arms and where a claim of the figure ends for each: a ratio's bound times the arm it is held against."""
    marks = []
    for claim in outcome["claims"]:
        scale = 1.0 if claim["over"] is None else found.get(claim["over"], {}).get("value")
        if claim["figure"] != figure or claim["of"] not in found or scale is None:
            continue
        marks += [
            (claim["of"], bound * scale)
            for bound in (claim["at_least"], claim["at_most"])
            if bound is not None
        ]
    return marks
