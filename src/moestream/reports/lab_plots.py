"""A picture for an experiment: the arms' judged figure as bars with their ranges, and what would agree as marks."""

from __future__ import annotations

from typing import Any

from moestream.lab.experiment_figures import FIGURES
from moestream.reports.canvas import COLOUR, Picture, Rows, legend_below, mark_across, picture, value_at
from moestream.reports.labs import Outcome, value_text

#: More arms than this (a probe's grid) are a table's business.
_MOST = 40
_FEWEST = 2


def bars(outcome: Outcome, name: str) -> Picture | None:
    """None where there is nothing to compare."""
    if not outcome["figures"]:
        return None
    figure = str(outcome["figures"][0])
    found = {str(arm): of[figure] for arm, of in outcome["table"].items() if figure in of}
    if not _FEWEST <= len(found) <= _MOST:
        return None
    bounds = _bounds(outcome, figure, found)

    def draw(drawing: Any, narrow: bool) -> None:
        rows = Rows(drawing, [("", list(found))], narrow=narrow, legend_inches=0.45)
        axes = rows.axes
        most = max([abs(of["high"]) for of in found.values()] + [bound for _, bound in bounds]) or 1.0
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
        axes.set_xlim(0, most * (1.25 if narrow else 1.12))
        axes.xaxis.set_major_formatter(lambda value, _: value_text(value, figure))
        axes.locator_params(axis="x", nbins=4 if narrow else 7)
        axes.set_xlabel(FIGURES[figure].what if figure in FIGURES else figure)
        if bounds:
            legend_below(drawing, axes, narrow, 2)

    caption = "Bars: means; whiskers: the range of what was seen." + (
        " Red marks: where a claim's bound lies for that arm." if bounds else ""
    )
    return picture(name, figure.replace("_", " "), caption, draw)


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
