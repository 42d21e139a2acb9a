"""Pictures as SVG for the page: two widths of each, in the page's own colours. Knows nothing of what is drawn.

matplotlib draws in placeholder colours, which then become the style sheet's variables: one picture serves a light
and a dark page. Text stays text.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from moestream.extras import lacking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What the style sheet calls a colour, by a colour nobody would draw with.
_ROLES = (
    "ink", "soft", "line", "grid", "card", "limit", "accent",
    "stall", "compute", "work", "mixed", "stock", "gain", "loss",
    "s0", "s1", "s2", "s3", "s4", "s5", "s6",
)  # fmt: skip
COLOUR = {role: f"#{number:02x}fe{number:02x}" for number, role in enumerate(_ROLES, 1)}
SERIES = tuple(COLOUR[f"s{number}"] for number in range(7))
#: Lines of one colour are told apart by these, and series without colour at all by the first few.
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_WIDE_INCHES, _NARROW_INCHES = 10.4, 4.1
#: A longer name in a legend takes two lines: a phone has room for no more.
_LEGEND_CHARACTERS = 46
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    # Names come from records: a dollar is no formula.
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": COLOUR["ink"],
    "axes.labelcolor": COLOUR["soft"],
    "axes.edgecolor": COLOUR["line"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": 8.5,
    "figure.facecolor": "none",
    "grid.color": COLOUR["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOUR["line"],
    "ytick.color": COLOUR["line"],
    "xtick.labelcolor": COLOUR["soft"],
    "ytick.labelcolor": COLOUR["soft"],
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True)
class Picture:
    """``wide`` and ``narrow`` are SVG elements of the same; ``caption`` says how to read it."""

    title: str
    caption: str
    wide: str
    narrow: str


#: ``draw(figure, narrow)`` fills a figure whose width is set, and may set its height.
Draw = Callable[["Figure", bool], None]


def picture(name: str, title: str, caption: str, draw: Draw) -> Picture:
    """Draw both widths. ``name`` must be the picture's own: what is inside refers to itself by it. Raises RefusedError
    where matplotlib is missing."""
    return Picture(
        title,
        caption,
        *(_svg(f"{name}-{'narrow' if narrow else 'wide'}", title, draw, narrow) for narrow in (False, True)),
    )


@contextmanager
def _drawing(name: str) -> Iterator[type[Figure]]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise lacking(error, "pictures", "matplotlib") from None
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield Figure


def _svg(name: str, title: str, draw: Draw, narrow: bool) -> str:
    with _drawing(name) as make:
        figure = make(figsize=(_NARROW_INCHES if narrow else _WIDE_INCHES, 4.0), layout="constrained")
        draw(figure, narrow)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _inline(file.getvalue(), title)


def _inline(text: str, title: str) -> str:
    """The SVG element alone, in the page's colours and letters, without names that nothing refers to."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    for role, colour in COLOUR.items():
        text = text.replace(colour, f"var(--{role})")
    text = re.sub(r"'DejaVu Sans'[^;\"]*", _FONT.replace("\\", ""), text)
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", text)
    # The page gives the size: 100 % of where it stands.
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text, count=1)
    text = re.sub(r">\s+<", "><", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1).strip()


class Rows:
    """Horizontal bars, each under its name, under headings: room for long names at any width. The axes' y is in inches
    from the top; ``positions`` are the bars' middles."""

    BAR = 0.155
    _LINE, _HEADING, _GAP = 0.15, 0.3, 0.1
    _CHARACTERS, _NARROW_CHARACTERS = 140, 52

    def __init__(
        self, figure: Any, blocks: Sequence[tuple[str, Sequence[str]]], narrow: bool, legend_inches: float
    ) -> None:
        """``blocks``: a heading ('' for none) and the names under it. The figure becomes as high as they need."""
        self.positions: list[float] = []
        texts: list[tuple[float, str, bool]] = []
        y = 0.0
        for heading, names in blocks:
            if heading:
                texts.append((y + self._HEADING / 2, heading, True))
                y += self._HEADING
            for name in names:
                for line in textwrap.wrap(name, self._NARROW_CHARACTERS if narrow else self._CHARACTERS):
                    texts.append((y + self._LINE / 2, line, False))
                    y += self._LINE
                self.positions.append(y + 0.02 + self.BAR / 2)
                y += 0.02 + self.BAR + self._GAP
        figure.set_figheight(y + legend_inches + 0.6)
        self.axes = figure.add_subplot()
        self.axes.set_ylim(y, -0.05)
        self.axes.set_yticks([])
        self.axes.spines["left"].set_visible(False)
        for at, text, is_heading in texts:
            self._text(at, text, is_heading)

    def _text(self, at: float, text: str, is_heading: bool) -> None:
        shown = self.axes.text(
            0.0,
            at,
            text,
            transform=self.axes.get_yaxis_transform(),
            va="center",
            weight="bold" if is_heading else "normal",
            fontsize=9.5 if is_heading else 8.5,
            color=COLOUR["ink" if is_heading else "soft"],
            bbox=BEHIND,
            zorder=6,
        )
        # A name may be wider than the bars; it must not push them aside.
        shown.set_in_layout(False)


#: What lies under a text, so that no line runs through it.
BEHIND = {"facecolor": COLOUR["card"], "edgecolor": "none", "pad": 0.6}


def value_at(axes: Any, x: float, y: float, text: str) -> None:
    """A bar's figure behind its end."""
    axes.text(x, y, text, va="center", weight="bold", bbox=BEHIND, zorder=5)


def mark_across(axes: Any, at: float, x: float, label: str) -> None:
    """A short mark across a bar, in the limits' colour."""
    half = Rows.BAR * 0.78
    axes.plot(
        [x, x],
        [at - half, at + half],
        color=COLOUR["limit"],
        linewidth=2,
        solid_capstyle="butt",
        label=label,
        zorder=4,
    )


@dataclass(frozen=True)
class Limit:
    """A ceiling of what an axis shows: where, and its name in the legend."""

    at: float
    label: str
    dash: Any = (0, (4, 2.5))


#: The dash of what the disk alone allows; the other is the processors'.
DISK_DASH = (0, (1, 1.6))
#: A ceiling so many times beyond everything else would leave the bars no room: only the legend names it.
_REACH = 4.0


def edge_with(most: float, limits: Sequence[Limit]) -> float:
    """Where an axis of values up to ``most`` ends, so that the ceilings within reach are seen."""
    return max([most, *(limit.at for limit in limits if limit.at <= _REACH * most)])


def draw_limits(axes: Any, limits: Sequence[Limit], edge: float, *, vertical: bool = True) -> None:
    """Each as a line, or where it lies beyond the edge by its name alone."""
    for limit in limits:
        if limit.at <= edge:
            ceiling(axes, limit.at, limit.label, vertical=vertical, dash=limit.dash)
        else:
            label = f"{limit.label} (beyond the edge)"
            axes.plot([], [], color=COLOUR["limit"], linewidth=1.2, linestyle=limit.dash, label=label)


def ceiling(axes: Any, at: float, label: str, *, vertical: bool = True, dash: Any = (0, (4, 2.5))) -> None:
    """A line that nothing passes, in the limits' colour, named in the legend."""
    line = axes.axvline if vertical else axes.axhline
    line(at, color=COLOUR["limit"], linewidth=1.2, linestyle=dash, label=label, zorder=1.5)


def legend_below(figure: Any, axes: Any, narrow: bool, columns: int = 4) -> None:
    """One legend under everything, each name once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(),
        [textwrap.fill(label, _LEGEND_CHARACTERS) for label in unique],
        loc="outside lower left",
        ncols=1 if narrow else columns,
        handlelength=1.8,
        columnspacing=1.6,
        borderaxespad=0.2,
    )
