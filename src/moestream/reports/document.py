"""The report as one plain document, for `report --json`: what the tables and pictures show, before it is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moestream.lab import bench_figures
from moestream.reports.labs import Lab
from moestream.reports.repeat import commands, lab_commands
from moestream.reports.summary import Arm, Ceilings, Group
from moestream.reports.tables import cpu_s_per_gb, headline

if TYPE_CHECKING:
    from moestream.reports.traces import Routing

SCHEMA = 1


def document(
    groups: Sequence[Group], routings: Sequence[Routing | None], labs: Sequence[Lab]
) -> dict[str, Any]:
    """Times in seconds, sizes in bytes, None for what is not known (docs/formats/runs.md)."""
    return {
        "schema": SCHEMA,
        "groups": [_group(group, routing) for group, routing in zip(groups, routings, strict=True)],
        "labs": [_lab(lab) for lab in labs],
    }


def _group(group: Group, routing: Routing | None) -> dict[str, Any]:
    ceilings = group.ceilings
    return {
        "name": group.name,
        "box": group.facts,
        "model": {name: value for name, value in group.model.items() if name != "paths"},
        "ceilings": {**asdict(ceilings), "even_bytes": ceilings.even_bytes, "disk_s": ceilings.disk_s},
        "answers": headline(group),
        "notes": list(group.notes),
        "doubts": [{**asdict(doubt), "kind": doubt.kind.value} for doubt in group.doubts],
        "arms": [_arm(arm, ceilings) for arm in group.arms],
        "routing": _routing(routing) if routing is not None else None,
        "commands": commands(group),
    }


def _arm(arm: Arm, ceilings: Ceilings) -> dict[str, Any]:
    return {
        "name": arm.name,
        "mechanism": arm.mechanism,
        "default": arm.default,
        "cap_bytes": arm.cap_bytes,
        "experiment": arm.experiment,
        "runs": len(arm.runs),
        "excluded": [
            {"prompt": record["prompt"], "round": record["round"], "why": record["invalid"]}
            for record in arm.excluded
        ],
        "tok_per_s": asdict(arm.rate) if arm.rate is not None else None,
        "against_stock": asdict(arm.ratio) if arm.ratio is not None else None,
        **dict(zip(("p50_s", "p95_s", "p99_s"), arm.percentiles, strict=True)),
        "split": asdict(arm.split) if arm.split is not None else None,
        "hit_rate": arm.of(bench_figures.hit_rate),
        "bytes_per_token": {
            "read": arm.of(bench_figures.bytes_per_token),
            "asked": arm.of(bench_figures.asked_per_token),
            "wasted": arm.of(bench_figures.wasted_per_token),
        },
        "majflt": arm.of(bench_figures.per_token("majflt")),
        "minflt": arm.of(bench_figures.per_token("minflt")),
        "cpu_s_per_token": arm.of(bench_figures.cpu_per_token),
        "cpu_s_per_gb": cpu_s_per_gb(arm, ceilings),
        "peak_bytes": arm.peak_bytes,
        "energy_j_per_token": arm.of(bench_figures.energy_per_token),
        "floor_s": arm.floor_s,
        "floor_share": arm.floor_share,
    }


def _routing(found: Routing) -> dict[str, Any]:
    return {
        "traces": list(found.traces),
        "curves": [asdict(curve) for curve in found.curves],
        "demand_bytes": found.demand_bytes,
        "expert_bytes": found.expert_bytes,
        "layers": list(found.layers),
        "needed_80": list(found.needed),
    }


def _lab(lab: Lab) -> dict[str, Any]:
    return {
        "name": lab.name,
        "notes": list(lab.notes),
        "outcomes": [{**outcome, "commands": lab_commands(lab, outcome)} for outcome in lab.outcomes],
    }
