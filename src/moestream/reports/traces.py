"""What the traces beside a group's records say: bytes over budget by policy, between demand and Belady, and skew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moestream.analyze.choices import from_trace
from moestream.errors import MoestreamError, UsageError
from moestream.mechanism import Mechanism
from moestream.replay import (
    Options,
    Point,
    Recording,
    check_same_model,
    curves,
    parse_budgets,
    parse_policies,
    prepare,
)
from moestream.replay.curves import DEFAULT_POLICIES, POOLED
from moestream.reports.figures import saw_routes
from moestream.reports.records import Record
from moestream.reports.summary import Group
from moestream.reports.tables import Table, megabytes
from moestream.trace.read import read_trace
from moestream.trace.trace import Trace
from moestream.units import format_bytes

#: Policies whose replay needs a file, or says nothing of a budget.
_NOT_REPLAYED = ("pinned", "dontneed", "none")


@dataclass(frozen=True)
class Curve:
    """One policy: bytes of experts held, and MB read for a decoded token."""

    policy: str
    budget_bytes: tuple[int, ...]
    read_bytes: tuple[float, ...]


@dataclass(frozen=True)
class Routing:
    """``curves`` over all ``traces`` together, without early reads; ``demand_bytes`` a token when nothing is kept;
    ``usage`` [layers, experts]: the share of its layer's tokens that each expert took, the most used first (nan where a
    layer has fewer); ``needed``: by layer the fewest experts that take 80 % of the activations."""

    traces: tuple[str, ...]
    curves: tuple[Curve, ...]
    demand_bytes: float
    expert_bytes: int
    layers: tuple[int, ...]
    usage: NDArray[np.float64]
    needed: tuple[int, ...]


def read_routing(group: Group) -> tuple[Routing | None, list[str]]:
    """What the group's traces say, and a sentence for each that was left out. One trace a prompt, all of one arm: with
    equal tokens the arms' routes are equal too, and none counts twice. None where no trace can be used."""
    notes: list[str] = []
    traces: list[tuple[str, Trace, Recording]] = []
    for record in _chosen(group):
        path = _path(group, record)
        try:
            trace = read_trace(path, notes.append)
            recording = prepare(trace, path.name)
            if recording.identity != group.model.get("identity"):
                raise UsageError("it is of another model")
            check_same_model([*(other for *_, other in traces), recording])
        except MoestreamError as error:
            notes.append(f"the trace {path.name} was left out: {error}")
            continue
        if recording.decode.any():
            traces.append((path.name, trace, recording))
    if not traces:
        return None, notes
    found = _curves([recording for *_, recording in traces])
    usage, needed, layers = _usage([trace for _, trace, _ in traces])
    first = traces[0][2]
    return (
        Routing(
            traces=tuple(name for name, *_ in traces),
            curves=found[0],
            demand_bytes=found[1],
            expert_bytes=first.geometry.frame_bytes_total,
            layers=layers,
            usage=usage,
            needed=needed,
        ),
        notes,
    )


def _path(group: Group, record: Record) -> Path:
    # A record names a file beside it; whatever else its text says leads nowhere.
    return group.directory / Path(str(record["trace"])).name


def _chosen(group: Group) -> list[Record]:
    """The records whose traces are read: of the arm that saw routes on most prompts, the first valid run of each."""
    best: dict[str, Record] = {}
    for arm in group.arms:
        mine: dict[str, Record] = {}
        for record in arm.runs:
            if record["trace"] and saw_routes(record) and _path(group, record).exists():
                mine.setdefault(str(record["prompt"]), record)
        if len(mine) > len(best):
            best = mine
    return list(best.values())


def _curves(recordings: Sequence[Recording]) -> tuple[tuple[Curve, ...], float]:
    names = [*DEFAULT_POLICIES]
    own = Mechanism.parse(recordings[0].mechanism).policy
    canonical = [Mechanism.parse(f"arena+{name}").policy for name in names if name != "belady"]
    if own.partition(":")[0] not in _NOT_REPLAYED and own not in canonical:
        names.insert(0, own)

    def no_file(path: str) -> NDArray[np.float64]:
        raise UsageError(f"no policy of a report needs a file such as {path}")

    points = list(
        curves(
            recordings,
            parse_policies(",".join(names), no_file),
            parse_budgets(None, recordings),
            Options(speculation=False),
        )
    )
    pooled = [point for point in points if point.trace == POOLED] or points
    shown = [point for point in pooled if point.figures.refused == 0 and point.figures.decode_tokens]
    policies = dict.fromkeys(point.policy for point in shown)
    found = tuple(_curve(policy, [point for point in shown if point.policy == policy]) for policy in policies)
    return found, _demand(recordings)


def _curve(policy: str, points: list[Point]) -> Curve:
    ordered = sorted(points, key=lambda point: point.budget_bytes)
    return Curve(
        policy,
        tuple(point.budget_bytes for point in ordered),
        tuple(point.figures.decode_bytes / point.figures.decode_tokens for point in ordered),
    )


def _demand(recordings: Sequence[Recording]) -> float:
    """Bytes of all routed experts of a decoded token, movable pages only, as the curves count."""
    total = tokens = 0
    for recording in recordings:
        of = recording.decode
        total += int((recording.widths * recording.expert_bytes[recording.bank])[of].sum())
        _, first = np.unique(recording.step[of], return_index=True)
        tokens += int(recording.tokens[of][first].sum())
    return total / max(1, tokens)


def _usage(traces: Sequence[Trace]) -> tuple[NDArray[np.float64], tuple[int, ...], tuple[int, ...]]:
    choices = [from_trace(trace) for trace in traces]
    layers = choices[0].layers
    width = max(choices[0].experts)
    table = np.full((len(layers), width), np.nan)
    needed = []
    for layer, experts in enumerate(choices[0].experts):
        counts = sum(np.asarray(one.hot(layer).sum(axis=0), np.int64) for one in choices)
        ranked = np.sort(np.asarray(counts))[::-1]
        seen = sum(int(one.seen(layer).sum()) for one in choices)
        table[layer, :experts] = ranked / max(1, seen)
        # In whole numbers: a share of a sum of floats can miss its own value.
        needed.append(int(np.searchsorted(np.cumsum(ranked) * 100, int(ranked.sum()) * 80)) + 1)
    return table, tuple(needed), tuple(layers)


def curve_table(found: Routing) -> Table:
    """The curves as a table, a budget a row; policies that could not be replayed at a budget have no figure there."""
    budgets = sorted({budget for curve in found.curves for budget in curve.budget_bytes})
    rows = []
    for budget in budgets:
        cells = [
            dict(zip(curve.budget_bytes, curve.read_bytes, strict=True)).get(budget) for curve in found.curves
        ]
        rows.append(
            (
                f"{format_bytes(budget)} ({budget / found.expert_bytes:.0%})",
                *map(megabytes, cells),
            )
        )
    notes = (
        f"MB read for a decoded token, replayed over the routes of {', '.join(found.traces)}, nothing read early; with "
        f"nothing kept it would be {found.demand_bytes / 1e6:.0f}. belady knows the routes to come.",
    )
    columns = ("budget (of all experts)", *(curve.policy for curve in found.curves))
    return Table("What other budgets and policies would read", columns, tuple(rows), heads=1, notes=notes)


def routing_lines(found: Routing) -> list[str]:
    """Skew in a sentence."""
    experts = int((~np.isnan(found.usage)).sum(axis=1).max())
    return [
        f"80 % of a layer's activations take {min(found.needed)} to {max(found.needed)} of its {experts} experts "
        f"(an even router's would take {-(-experts * 4 // 5)})"
    ]
