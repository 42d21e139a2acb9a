"""Outcomes of experiments as ``moestream lab run`` left them: each ``verdict.json``, checked, by box and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestream.errors import MoestreamError, RefusedError
from moestream.files import printable, read_json
from moestream.lab.experiment_figures import FIGURES
from moestream.lab.record_kinds import refusing
from moestream.lab.verdicts import AGREES, CANNOT_TELL, DISAGREES, shown
from moestream.reports.records import BoxName, Record, box_names, read_results
from moestream.reports.summary import Ceilings, ceilings_of, find_probes

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
    ceilings: Ceilings = field(default_factory=Ceilings)

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


def read_labs(directory: Path, probe: Path | None = None) -> list[Lab]:
    """The outcomes of a directory of `lab run`, one Lab for each box and model in it, with the ceilings that their
    runs, the directory's probes or the ``probe`` named show.

    Raises RefusedError for a file that is no verdict of this schema or no probe.
    """
    found: dict[tuple[BoxName, str], list[Outcome]] = {}
    outcomes = [_read(path) for path in _places(directory)]
    probes = find_probes(directory, probe)
    runs = [record for path in _places(directory) for record in _runs(path.parent)]
    names = box_names(outcome["box"] for outcome in outcomes)
    for outcome, box in zip(outcomes, names, strict=True):
        found.setdefault((box, str(outcome["model"].get("identity") or "")), []).append(outcome)
    name = printable(directory.resolve().name)
    several = (
        (f"{name} holds experiments of {len(found)} boxes or models: they are kept apart",)
        if len(found) > 1
        else ()
    )
    with refusing(f"{directory}, its {VERDICT} or runs.jsonl,"):
        return _labs(found, name, several, runs, probes)


def _labs(
    found: Mapping[tuple[BoxName, str], list[Outcome]],
    name: str,
    several: tuple[str, ...],
    runs: list[Record],
    probes: list[dict[str, Any]],
) -> list[Lab]:
    return [
        Lab(
            name if len(found) == 1 else f"{name} ({number})",
            box,
            mine[0]["model"],
            tuple(mine),
            several,
            ceilings_of([r for r in runs if _is_of(r, box, model)], box, probes, mine[0]["model"]),
        )
        for number, ((box, model), mine) in enumerate(found.items(), 1)
    ]


def _read(path: Path) -> Outcome:
    outcome = read_json(path, "run the experiment again")
    if not isinstance(outcome, dict) or outcome.get("schema") != SCHEMA:
        raise RefusedError(
            f"{path} is no verdict of schema {SCHEMA}: run the experiment again with this version"
        )
    wrong = [name for name, kind in _NEEDED.items() if not isinstance(outcome.get(name), kind)]
    if wrong:
        raise RefusedError(f"{path} is no verdict: it lacks {', '.join(wrong)}: run the experiment again")
    outcome["model"], outcome["box"] = outcome.get("model") or {}, outcome.get("box") or {}
    if not isinstance(outcome["model"], dict) or not isinstance(outcome["box"], dict):
        raise RefusedError(f"{path} is no verdict: model and box are objects: run the experiment again")
    commits = (record["commit"] for record in _runs(path.parent) if record["commit"])
    outcome["commit"] = outcome.get("commit") or next(commits, None)
    return outcome


def _runs(directory: Path) -> tuple[Record, ...]:
    """The records beside a verdict; () where there are none that can be read: the verdict stands without them."""
    try:
        return read_results(directory).records
    except MoestreamError:
        return ()


def _is_of(record: Record, box: BoxName, model: str) -> bool:
    return BoxName.of(record["box"]).agrees(box) and record["model"].get("identity") == model


def value_text(value: float, figure: str) -> str:
    """A figure for people; of a name this version does not know, the number."""
    return shown(value, FIGURES[figure].unit if figure in FIGURES else "n")


def claim_unit(claim: Mapping[str, Any]) -> str:
    """Of a claim's value: a ratio of two arms has none."""
    return (
        "n" if claim["over"] is not None or claim["figure"] not in FIGURES else FIGURES[claim["figure"]].unit
    )
