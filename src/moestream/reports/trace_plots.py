"""Pictures of what traces say: bytes over budget, and which experts do how much of the work."""

from __future__ import annotations

from typing import Any

import numpy as np

from moestream.lab import bench_figures
from moestream.replay import BELADY
from moestream.reports import figures
from moestream.reports.canvas import BEHIND, COLOUR, DASHES, SERIES, Picture, ceiling, legend_below, picture
from moestream.reports.summary import Group
from moestream.reports.tables import cap_text
from moestream.reports.traces import Routing

_MARKERS = "osD^vP*X"


def byte_curves(group: Group, found: Routing, name: str) -> Picture:
    """MB read a token over the memory for experts, a line a policy; the measured arms beside them."""

    def draw(figure: Any, narrow: bool) -> None:
        figure.set_figheight(5.4 if narrow else 4.9)
        axes = figure.add_subplot()
        axes.grid(True, axis="both")
        others = [curve for curve in found.curves if curve.policy != BELADY]
        for curve in found.curves:
            x = np.asarray(curve.budget_bytes) / 1e9
            y = np.asarray(curve.read_bytes) / 1e6
            if curve.policy == BELADY:
                axes.plot(
                    x,
                    y,
                    color=COLOUR["ink"],
                    linestyle=(0, (4, 2)),
                    linewidth=1.6,
                    label="belady: the fewest",
                )
                axes.fill_between(x, 0, y, color=COLOUR["ink"], alpha=0.05, linewidth=0)
                continue
            at = others.index(curve)
            axes.plot(
                x, y, color=SERIES[at % len(SERIES)], linestyle=DASHES[at // len(SERIES) % len(DASHES)],
                marker=_MARKERS[at % len(_MARKERS)], markersize=3.6, linewidth=1.4, label=curve.policy,
            )  # fmt: skip
        axes.axhline(
            found.demand_bytes / 1e6, color=COLOUR["soft"], linewidth=1, linestyle=":", label="nothing kept"
        )
        if group.ceilings.even_bytes:
            even = group.ceilings.even_bytes / 1e6
            ceiling(axes, even, f"{even:.0f} MB: the disk takes as long as computing", vertical=False)
        _measured(axes, group)
        axes.set_ylim(0, found.demand_bytes / 1e6 * 1.08)
        axes.set_xlim(left=0)
        axes.set_xlabel("memory for experts (GB)")
        axes.set_ylabel("read for a decoded token (MB)")
        legend_below(figure, axes, narrow, 4)

    caption = (
        f"Lines: the routes of {len(found.traces)} traces replayed through the engine's own cache, nothing read early. "
        "Below belady nothing can go: it knows the routes to come. Below the red line computing takes longer than the "
        "disk. Stars: what the runs themselves read, early reads included."
    )
    return picture(name, "Bytes over budget", caption, draw)


def _measured(axes: Any, group: Group) -> None:
    """The arms that keep experts themselves, where their budget and their bytes put them; a cap is named once."""
    named: set[int | None] = set()
    for arm in group.arms:
        budgets = [(record["document"].get("budget") or {}).get("expert_bytes") for record in arm.runs]
        known = [budget for budget in budgets if budget]
        read = arm.of(bench_figures.bytes_per_token)
        if not known or read is None or not any(figures.saw_routes(record) for record in arm.runs):
            continue
        x, y = float(np.median(known)) / 1e9, read / 1e6
        axes.plot(
            [x], [y], marker="*", markersize=10, linestyle="none", color=COLOUR["card"], markeredgecolor=COLOUR["ink"],
            markeredgewidth=1.1, label="measured", zorder=6,
        )  # fmt: skip
        if arm.cap_bytes not in named:
            named.add(arm.cap_bytes)
            axes.annotate(
                cap_text(arm.cap_bytes), (x, y), textcoords="offset points", xytext=(7, 7), fontsize=8, bbox=BEHIND,
                zorder=5,
            )  # fmt: skip


def heat_map(found: Routing, name: str) -> Picture:
    """Experts of each layer by how much of its work they do."""

    def draw(figure: Any, narrow: bool) -> None:
        layers, experts = found.usage.shape
        figure.set_figheight(min(6.5, 1.5 + 0.13 * layers) + (0.6 if narrow else 0))
        axes = figure.add_subplot()
        axes.grid(False)
        share = found.usage * 100
        # A few experts take most tokens: the colours are spent on where the others are.
        top = max(float(np.nanquantile(share, 0.99)), 1e-9)
        image = axes.imshow(share, aspect="auto", cmap="cividis", vmin=0, vmax=top, interpolation="nearest")
        edge = np.asarray(found.needed) - 0.5
        axes.step(
            np.append(edge, edge[-1:]), np.arange(layers + 1) - 0.5, where="pre", color="white", linewidth=1.6,
            solid_joinstyle="miter",
        )  # fmt: skip
        step = -(-layers // 12)
        axes.set_yticks(range(0, layers, step), [str(layer) for layer in found.layers[::step]])
        axes.set_xlabel("experts of the layer, the most used first")
        axes.set_ylabel("layer")
        axes.set_xlim(-0.5, experts - 0.5)
        axes.set_ylim(layers - 0.5, -0.5)
        bar = figure.colorbar(
            image, ax=axes, location="bottom" if narrow else "right", extend="max", pad=0.015, aspect=30
        )
        bar.set_label("tokens that chose it (%)")
        bar.outline.set_visible(False)

    caption = (
        "Left of the white line lie the fewest experts that take 80 % of a layer's activations. A layer whose colours "
        "end early has hot experts that are worth keeping; an even one leaves every policy little to choose."
    )
    return picture(name, "Which experts do the work", caption, draw)
