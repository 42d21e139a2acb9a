"""Runs that several experiments have in common are made once, and kept in the directory of each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moestream.lab.bench_journal import read_runs
from moestream.lab.experiment_figures import usable
from moestream.lab.experiment_plan import Job
from moestream.lab.runs import RUNS, append

Record = dict[str, Any]


class SharedRuns:
    """What the experiments of one session have run. An experiment takes another's runs only if they are all it needs:
    arms of two sessions' parts, minutes apart, would tell how the disk drifted and not how they differ."""

    def __init__(self) -> None:
        self._made: list[tuple[Path, dict[tuple[Any, ...], Record]]] = []

    def add(self, out: Path, order: Sequence[Job]) -> None:
        """Remember the runs an experiment made in ``out`` that may be counted."""
        known = {
            (record["arm"], record["prompt"], record["round"]): record
            for record in read_runs(out / RUNS)
            if usable(record)
        }
        self._made.append((out, {job.same_run: known[job.key] for job in order if job.key in known}))

    def take(self, out: Path, order: Sequence[Job]) -> list[Record]:
        """Copies of another experiment's runs, put down in ``out`` as this one's; [] where none has them all."""
        for source, made in self._made:
            if order and all(job.same_run in made for job in order):
                return [_copied(made[job.same_run], source, out, job) for job in order]
        return []


def _copied(record: Record, source: Path, out: Path, job: Job) -> Record:
    copy = {
        **record,
        "experiment": job.experiment,
        "arm": job.arm.key,
        "position": job.position,
        "made_for": record.get("made_for") or record["experiment"],
    }
    if record.get("trace"):
        _same_file(source / record["trace"], out / record["trace"])
    append(out / RUNS, copy)
    return copy


def _same_file(source: Path, target: Path) -> None:
    """One file under two names, or a copy where the file system has no such thing."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
