"""Outcomes of experiments as ``moestream lab run`` left them: each ``verdict.json``, checked, by box and model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError
from moestream.lab.experiment_figures import FIGURES
from moestream.lab.verdicts import AGREES, CANNOT_TELL, DISAGREES, shown
from moestream.reports.records import RUNS, BoxName, box_names

VERDICT = "verdict.json"
SCHEMA = 1
Outcome = dict[str, Any]
_NEEDED = {"experiment": str, "question": str, "verdict": str, "claims": list, "figures": list, "table": dict}


@dataclass(frozen=True)
class Lab:
    """The experiments of one directory on one box with one model, by name. ``notes``: what a reader must know."""

    name: str
    box: BoxName
    model: dict[str, Any]
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()

    def counted(self) -> str:
        """How many experiments ended in each word."""
        words = [outcome["verdict"] for outcome in self.outcomes]
        return ", ".join(
            f"{words.count(word)} {word}" for word in (AGREES, DISAGREES, CANNOT_TELL) if word in words
        )


def _places(directory: Path) -> list[Path]:
    """The verdicts of a directory: its own, or those of the directories in it."""
    own = directory / VERDICT
    return [own] if own.exists() else sorted(directory.glob(f"*/{VERDICT}"))


def is_lab(directory: Path) -> bool:
    return bool(_places(directory))


def read_labs(directory: Path) -> list[Lab]:
    """The outcomes of a directory of `lab run`, one Lab for each box and model in it. Raises RefusedError for a file
    that is no verdict of this schema."""
    found: dict[tuple[BoxName, str], list[Outcome]] = {}
    outcomes = [_read(path) for path in _places(directory)]
    names = box_names(outcome["box"] for outcome in outcomes)
    for outcome, box in zip(outcomes, names, strict=True):
        found.setdefault((box, str(outcome["model"].get("identity") or "")), []).append(outcome)
    name = directory.resolve().name
    several = (
        (f"{name} holds experiments of {len(found)} boxes or models: they are kept apart",)
        if len(found) > 1
        else ()
    )
    return [
        Lab(
            name if len(found) == 1 else f"{name} ({number})",
            box,
            mine[0]["model"],
            tuple(mine),
            several,
        )
        for number, ((box, _), mine) in enumerate(found.items(), 1)
    ]


def _read(path: Path) -> Outcome:
    try:
        outcome = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read as a verdict: {error}: run the experiment again") from None
    if not isinstance(outcome, dict) or outcome.get("schema") != SCHEMA:
        raise RefusedError(
            f"{path} is no verdict of schema {SCHEMA}: run the experiment again with this version"
        )
    wrong = [name for name, kind in _NEEDED.items() if not isinstance(outcome.get(name), kind)]
    if wrong:
        raise RefusedError(f"{path} is no verdict: it lacks {', '.join(wrong)}: run the experiment again")
    outcome["model"], outcome["box"] = outcome.get("model") or {}, outcome.get("box") or {}
    outcome["commit"] = outcome.get("commit") or _commit(path.with_name(RUNS))
    return outcome


def _commit(runs: Path) -> str | None:
    """Of the first record beside a verdict that does not name its commit; None where nothing says."""
    try:
        with runs.open(encoding="utf-8") as file:
            record = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    return str(record.get("commit") or "") or None if isinstance(record, dict) else None


def value_text(value: float, figure: str) -> str:
    """A figure for people; of a name this version does not know, the number."""
    return shown(value, FIGURES[figure].unit if figure in FIGURES else "n")


def claim_unit(claim: Mapping[str, Any]) -> str:
    """Of a claim's value: a ratio of two arms has none."""
    return (
        "n" if claim["over"] is not None or claim["figure"] not in FIGURES else FIGURES[claim["figure"]].unit
    )
