"""Pictures of a group's arms: speed, where the time went, token by token, and what each lever brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from moestream.errors import MechanismError
from moestream.lab import bench_figures
from moestream.mechanism import Mechanism
from moestream.reports import figures
from moestream.reports.canvas import (
    COLOUR,
    DASHES,
    DISK_DASH,
    SERIES,
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
from moestream.reports.figures import Estimate, Split
from moestream.reports.records import Record
from moestream.reports.summary import Arm, Ceilings, Group, paired
from moestream.reports.tables import cap_text, name_of, with_interval

#: A token whose time is so many times the other arms' would leave them no room: its bar is cut, and says so.
_CUT = 4.0
#: More lines than this in one picture nobody can tell apart; more steps are no ladder.
_MOST_LINES, _MOST_STEPS = 9, 14
#: Tokens of the line drawn through the noise of single ones.
_SMOOTH = 9


@dataclass(frozen=True)
class Look:
    colour: str
    dash: Any


def looks(group: Group) -> dict[str, Look]:
    """One look for each label, the same in every picture of the group; stock is grey."""
    labels = dict.fromkeys(arm.label for arm in group.arms if not arm.is_stock)
    found = {
        label: Look(SERIES[number % len(SERIES)], DASHES[number // len(SERIES) % len(DASHES)])
        for number, label in enumerate(labels)
    }
    return {**found, **{arm.label: Look(COLOUR["stock"], "-") for arm in group.arms if arm.is_stock}}


def blocks(group: Group) -> list[tuple[str, list[Arm]]]:
    """The arms that ran, under their cap's name."""
    return [
        (cap_text(cap) if cap is None else f"{cap_text(cap)} cap", group.under(cap))
        for cap in group.caps
        if group.under(cap)
    ]


def speed(group: Group, name: str) -> Picture:
    """Tokens a second with intervals, single runs, each arm's floor and the ceilings."""
    look, ceilings = looks(group), group.ceilings

    def draw(figure: Any, narrow: bool) -> None:
        found = blocks(group)
        rows = Rows(
            figure,
            [(cap, [name_of(arm) for arm in arms]) for cap, arms in found],
            narrow=narrow,
            legend_inches=1.15 if narrow else 0.45,
        )
        axes, arms = rows.axes, [arm for _, arms in found for arm in arms]
        most = max(
            [figures.rate(r) or 0.0 for arm in arms for r in arm.runs] + [ceilings.compute_rate or 0.0]
        )
        most = edge_with(most, rate_limits(ceilings))
        for at, arm in zip(rows.positions, arms, strict=True):
            if arm.rate is None:
                continue
            axes.barh(at, arm.rate.value, rows.BAR, color=look[arm.label].colour, zorder=2)
            _interval(axes, at, arm.rate)
            rates = [figures.rate(record) for record in arm.runs]
            axes.scatter(
                rates, [at] * len(rates), s=13, color=COLOUR["card"], edgecolor=COLOUR["ink"], linewidth=0.8, zorder=4,
                label="a run (one prompt, one round)" if len(rates) > 1 else "",
            )  # fmt: skip
            end = max([arm.rate.value, *(rate or 0.0 for rate in rates)])
            if arm.floor_s:
                mark_across(
                    axes, at, 1 / arm.floor_s, "this arm's floor: its bytes, this disk, these processors"
                )
                # Where the mark would run through the figure, the figure goes behind it.
                reach = end + (0.15 if narrow else 0.06) * most
                end = max(end, 1 / arm.floor_s) if 1 / arm.floor_s < reach else end
            value_at(axes, end + 0.012 * most, at, f"{arm.rate.value:.2f}")
        draw_limits(axes, rate_limits(ceilings), most)
        axes.set_xlim(0, most * (1.16 if narrow else 1.08))
        axes.set_xlabel("tokens a second")
        legend_below(figure, axes, narrow, 2)

    caption = (
        "Bars: the mean of the runs; whiskers: its 95 % bootstrap interval. Red marks: the fastest it could be, by "
        "the longer of computing with everything in memory and reading the arm's bytes at the disk's best rate."
    )
    return picture(name, "Speed", caption, draw)


def _interval(axes: Any, at: float, found: Estimate) -> None:
    if found.low is None or found.high is None:
        return
    axes.errorbar(
        found.value, at, xerr=[[found.value - found.low], [found.high - found.value]],
        color=COLOUR["ink"], elinewidth=1.1, capsize=3, zorder=3.5,
    )  # fmt: skip


def rate_limits(ceilings: Ceilings) -> list[Limit]:
    """What bounds tokens a second: computing alone, and the disk where it reads all that a token asks for."""
    limits = []
    if ceilings.compute_rate:
        limits.append(Limit(ceilings.compute_rate, f"compute alone: {ceilings.compute_rate:.1f} tok/s"))
    if ceilings.disk_s:
        rate = 1 / ceilings.disk_s
        limits.append(Limit(rate, f"disk alone, nothing kept: {rate:.1f} tok/s", DISK_DASH))
    return limits


def time_limits(ceilings: Ceilings) -> list[Limit]:
    """The same in milliseconds a token."""
    limits = []
    if ceilings.compute_s:
        ms = ceilings.compute_s * 1e3
        limits.append(Limit(ms, f"compute alone: {ms:.0f} ms"))
    if ceilings.disk_s:
        ms = ceilings.disk_s * 1e3
        limits.append(Limit(ms, f"disk alone, nothing kept: {ms:.0f} ms", DISK_DASH))
    return limits


def time_split(group: Group, name: str) -> Picture:
    """A token's time as a stack of stall, compute and memory work."""

    def draw(figure: Any, narrow: bool) -> None:
        found = [(cap, [arm for arm in arms if arm.split is not None]) for cap, arms in blocks(group)]
        rows = Rows(
            figure,
            [(cap, [name_of(arm) for arm in arms]) for cap, arms in found],
            narrow=narrow,
            legend_inches=1.15 if narrow else 0.45,
        )
        arms = [arm for _, arms in found for arm in arms]
        splits = [arm.split for arm in arms if arm.split is not None]
        edge = _edge([split.total_s for split in splits])
        for at, split, arm in zip(rows.positions, splits, arms, strict=True):
            _stack(rows, at, split, edge)
            disk = _disk_s(arm, group)
            if disk is not None and disk < edge:
                mark_across(rows.axes, at, disk * 1e3, "the disk alone for this arm's bytes")
        draw_limits(rows.axes, time_limits(group.ceilings), edge * 1e3)
        rows.axes.set_xlim(0, edge * 1e3 * (1.2 if narrow else 1.1))
        rows.axes.set_xlabel("milliseconds a token (the mean one)")
        legend_below(figure, rows.axes, narrow, 3)

    caption = (
        "stall: a matmul waited for bytes. memory work: moving pages, submitting reads or advice, deciding. Where "
        "the engine sees no route, waits for page faults cannot be told from computing. Reads overlap with computing: "
        "the disk's mark may lie right of the stall."
    )
    return picture(name, "Where a token's time goes", caption, draw)


def _edge(totals: Sequence[float]) -> float:
    """Where the time axis ends: the longest token, but for those far beyond all others."""
    ordered = sorted(totals)
    edge = ordered[0] if ordered else 1.0
    for total in ordered:
        if total > _CUT * edge:
            break
        edge = total
    return edge


def _disk_s(arm: Arm, group: Group) -> float | None:
    read, rate = arm.of(bench_figures.bytes_per_token), group.ceilings.disk_bytes_per_s
    return read / rate if read and rate else None


def _stack(rows: Rows, at: float, split: Split, edge: float) -> None:
    parts = [("stall", "stall", split.stall_s or 0.0)]
    parts.append(
        ("mixed", "compute and page faults, not told apart", split.compute_s)
        if split.stall_s is None
        else ("compute", "compute", split.compute_s)
    )
    parts.append(("work", "memory work", split.memory_work_s))
    left, room = 0.0, edge * 1.03
    for role, label, seconds in parts:
        shown = min(seconds, max(0.0, room - left))
        if shown > 0:
            rows.axes.barh(
                at, shown * 1e3, rows.BAR, left=left * 1e3, color=COLOUR[role], label=label, zorder=2
            )
            left += shown
    cut = split.total_s > room
    text = f"{split.total_s * 1e3:.0f}" + (" →" if cut else "")
    value_at(rows.axes, left * 1e3 + edge * 12, at, text)


def series(group: Group, cap: int | None, name: str) -> Picture | None:
    """Each token's time, a panel a prompt, of each arm the first valid run; None of nothing to draw."""
    arms, look = _told_apart(group.under(cap)), looks(group)
    left_out = len(group.under(cap)) - len(arms)
    prompts = list(dict.fromkeys(str(record["prompt"]) for arm in arms for record in arm.runs))
    if not prompts:
        return None

    def draw(figure: Any, narrow: bool) -> None:
        from matplotlib.ticker import LogLocator, NullLocator

        count = len(prompts)
        across = 1 if narrow else min(count, 3)
        down = -(-count // across)
        figure.set_figheight(
            down * (2.3 if narrow else 2.9) + 0.2 * (len(arms) if narrow else -(-len(arms) // 2)) + 0.9
        )
        panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
        for axes, prompt in zip(panels, prompts, strict=False):
            axes.grid(True, axis="y")
            axes.grid(False, axis="x")
            # Before anything is drawn: an axis that looks for its own limits fails where all tokens took equally long.
            axes.set_yscale("log")
            axes.set_ylim(_time_limits(arms, group))
            axes.set_title(prompt, fontsize=9.5, loc="left", weight="bold")
            for arm in arms:
                mine = [record for record in arm.runs if record["prompt"] == prompt]
                if mine:
                    _line(axes, min(mine, key=lambda record: record["round"]), arm, look[arm.label])
            draw_limits(axes, time_limits(group.ceilings), axes.get_ylim()[1], vertical=False)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        for axes in panels[count:]:
            axes.set_axis_off()
        for axes in panels[max(0, count - across) : count]:
            axes.set_xlabel("token")
        panels[0].set_ylabel("milliseconds")
        legend_below(figure, panels[0], narrow, 2)

    caption = (
        f"Pale: single tokens; strong: the median of {_SMOOTH} around each. The first valid run of each arm."
    ) + (f" {left_out} slower arms are left out." if left_out else "")
    return picture(name, f"Token by token, {cap_text(cap)}", caption, draw)


def _told_apart(arms: Sequence[Arm]) -> list[Arm]:
    """At most so many as can be told apart, in their order: stock, the default, and the fastest."""

    def rank(arm: Arm) -> tuple[bool, float]:
        return not (arm.is_stock or arm.default), -(arm.rate.value if arm.rate is not None else 0.0)

    kept = sorted(arms, key=rank)[:_MOST_LINES]
    return [arm for arm in arms if arm in kept]


def _line(axes: Any, record: Record, arm: Arm, look: Look) -> None:
    ms = np.asarray(record["document"]["decode"]["step_ms"], float)
    ms = np.where(ms > 0, ms, np.nan)
    tokens = np.arange(1, len(ms) + 1)
    axes.plot(tokens, ms.round(2), color=look.colour, alpha=0.28, linewidth=0.7, zorder=2)
    width = min(_SMOOTH, len(ms))
    padded = np.pad(ms, width // 2, mode="edge")
    smooth = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)[: len(ms)]
    axes.plot(
        tokens,
        smooth.round(2),
        color=look.colour,
        linestyle=look.dash,
        linewidth=1.7,
        label=name_of(arm),
        zorder=3,
    )


def _time_limits(arms: Sequence[Arm], group: Group) -> tuple[float, float]:
    """Where a logarithmic axis of milliseconds begins and ends, so that it shows all tokens and ceilings."""
    steps = [ms for arm in arms for record in arm.runs for ms in record["document"]["decode"]["step_ms"]]
    lines = [limit.at for limit in time_limits(group.ceilings)]
    values = [value for value in (*steps, *lines) if value > 0] or [1.0]
    return min(values) / 1.25, max(values) * 1.25


def waterfall(group: Group, cap: int | None, name: str) -> Picture | None:
    """From arm to arm under one cap, in their order, stock first; None of fewer than three or too many. A step whose
    interval holds no change at all is drawn as none shown."""
    arms = [arm for arm in group.under(cap) if arm.rate is not None]
    if not 3 <= len(arms) <= _MOST_STEPS:
        return None
    rates = [arm.rate.value for arm in arms if arm.rate is not None]
    steps = [figures.estimate(paired(arm.runs, before.runs)) for before, arm in pairwise(arms)]
    names = [name_of(arms[0]), *(arm.lever or lever(before, arm) for before, arm in pairwise(arms))]

    def draw(figure: Any, narrow: bool) -> None:
        rows = Rows(figure, [("", names)], narrow=narrow, legend_inches=1.15 if narrow else 0.45)
        axes, at = rows.axes, rows.positions
        limits = rate_limits(group.ceilings)
        most = edge_with(max([*rates, group.ceilings.compute_rate or 0.0]), limits)
        axes.barh(at[0], rates[0], rows.BAR, color=COLOUR["stock"], zorder=2)
        value_at(axes, rates[0] + 0.012 * most, at[0], f"{rates[0]:.2f}")
        for number, step in enumerate(steps, 1):
            before, after = rates[number - 1], rates[number]
            shown = step is not None and step.low is not None and not (step.low <= 1 <= (step.high or 0))
            kind = "mixed" if not shown else "gain" if after > before else "loss"
            label = {"mixed": "no difference shown", "gain": "faster", "loss": "slower"}[kind]
            axes.barh(
                at[number], after - before, rows.BAR, left=before, color=COLOUR[kind], label=label, zorder=2
            )
            axes.plot(
                [before] * 2,
                [at[number - 1] - Rows.BAR / 2, at[number] + Rows.BAR / 2],
                color=COLOUR["soft"],
                linewidth=0.8,
                zorder=1,
            )
            text = f"{after:.2f}"
            if step is not None:
                text += f"  (x {step.value:.2f})" if narrow else f"  (x {with_interval(step)})"
            value_at(axes, max(before, after) + 0.012 * most, at[number], text)
        draw_limits(axes, limits, most)
        axes.set_xlim(0, most * (1.3 if narrow else 1.2))
        axes.set_xlabel("tokens a second")
        legend_below(figure, axes, narrow, 3)

    caption = (
        "Each bar goes from the arm above to this one; its name is what changed. x is the mean ratio of runs of "
        "the same prompt and round, with its 95 % interval."
    )
    return picture(name, f"What each step brought, {cap_text(cap)}", caption, draw)


def lever(before: Arm, after: Arm) -> str:
    """In words what changes from one arm to the next: ``store mapped → arena, policy none → lru``."""
    try:
        old = Mechanism.parse("mapped+fault" if before.is_stock else before.mechanism)
        new = Mechanism.parse("mapped+fault" if after.is_stock else after.mechanism)
    except MechanismError:
        # Made by a version that knew other words.
        return name_of(after)
    parts = []
    for part in ("store", "variants", "reader", "policy", "predictor", "dense"):
        was, now = getattr(old, part), getattr(new, part)
        if part == "variants":
            was, now = "/".join(was) or "plain", "/".join(now) or "plain"
        if was != now:
            parts.append(f"{part} {was} → {now}")
    if not parts:
        return f"{name_of(after)}: the same, through the engine" if before.is_stock else name_of(after)
    return ", ".join(parts)
