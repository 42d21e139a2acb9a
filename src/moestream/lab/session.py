"""``lab run``: experiments one after another, each with a directory of its own that can be gone on with."""

from __future__ import annotations

import datetime
import hashlib
import os
import shlex
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box import Box, Cage
from moestream.errors import MoestreamError, RefusedError, UsageError
from moestream.files import exists, read_json
from moestream.lab import files
from moestream.lab.bench_doubts import Typed
from moestream.lab.bench_journal import SETUP, open_journal
from moestream.lab.bench_progress import Display, duration
from moestream.lab.execute import BoxExecutor, origin
from moestream.lab.experiment import Experiment
from moestream.lab.experiment_plan import Job, Sizes, file_seconds, jobs, steps
from moestream.lab.experiment_progress import Progress
from moestream.lab.experiment_run import check_earlier, failed_experiment, run_experiment
from moestream.lab.experiment_sharing import SharedRuns
from moestream.lab.experiment_text import outcome_lines
from moestream.lab.record_kinds import refusing
from moestream.lab.runs import RUNS, end_on_sigterm
from moestream.lab.statistics import need_scipy
from moestream.model import Model
from moestream.report import write_json

VERDICT = "verdict.json"
_OUT = Path("results/scratch")
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What ``lab run`` was told. ``typed``: the model as it was named."""

    model: Model
    cap_bytes: int | None
    quick: bool
    out: Path | None
    resume: bool
    force: bool
    typed: str = "demo"

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.model.bytes, self.model.expert_bytes, self.model.demand_bytes_per_token)

    def again(self, one: Experiment) -> str:
        """What makes one experiment again, but for its directory; without where on this machine things are."""
        words = ["moestream", "lab", "run", Path(one.file).name or one.name, "--model", Path(self.typed).name]
        words += ["--ram", str(self.cap_bytes)] if self.cap_bytes is not None else []
        return shlex.join(words + (["--quick"] if self.quick else []))

    def typed_of(self, one: Experiment, place: Path) -> Typed:
        """What doubts about one experiment say to type."""
        again = f"{self.again(one)} --out {shlex.quote(place.name)}"
        return Typed(again, shlex.quote(Path(self.typed).name), shlex.quote(self.model.paths[0].name))

    def jobs(self, one: Experiment) -> list[Job]:
        if one.kind == "probe":
            return []
        return jobs(one, one.quick if self.quick else one.settings, self.sizes, self.cap_bytes)


def run_all(
    chosen: Sequence[Experiment],
    asked: Asked,
    *,
    tell: Callable[[Outcome], None] | None,
    show: Display,
) -> list[Outcome]:
    """The outcomes, each also in ``verdict.json`` of its directory and given to ``tell`` as it comes. One of several
    experiments that fails cannot tell, and the others are run. Raises RefusedError before anything is run where the
    disk has no room for the files that are needed, or a directory holds something else."""
    if asked.resume and asked.out is None:
        raise UsageError("--resume goes on with what --out holds: name it")
    need_scipy()
    _check_names(chosen)
    kinds = [kind for one in chosen for kind in one.files]
    copies = any(arm.mechanism.startswith("shared") for one in chosen for arm in one.arms)
    files.check_room(asked.model, kinds, int(copies))
    out = asked.out or _OUT / f"lab-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    session = _Session(asked, out, chosen, show)
    session.check_places()
    end_on_sigterm()
    session.announce()
    outcomes = []
    for one in chosen:
        outcome = session.run(one) if len(chosen) == 1 else session.attempt(one)
        outcomes.append(outcome)
        if tell is not None:
            tell(outcome)
    show.note(f"records and verdicts: {out}")
    return outcomes


def _check_names(chosen: Sequence[Experiment]) -> None:
    """UsageError where two would share a directory."""
    for number, one in enumerate(chosen):
        if one.name in {other.name for other in chosen[:number]}:
            raise UsageError(
                f"two experiments are called {one.name}: rename {one.file or 'one of the files'}"
            )


class _Session:
    """What the experiments of one ``lab run`` have in common."""

    def __init__(self, asked: Asked, out: Path, chosen: Sequence[Experiment], show: Display) -> None:
        self._out = out
        self._asked, self._show, self._chosen = asked, show, chosen
        self._places = {one.name: out if len(chosen) == 1 else out / one.name for one in chosen}
        self._earlier: dict[str, list[dict[str, Any]]] = {}
        self._shared = SharedRuns()
        estimates = {one.name: steps(one, asked.quick, asked.sizes, asked.cap_bytes) for one in chosen}
        self._progress = Progress(show, estimates, time.monotonic)

    def check_places(self) -> None:
        """Open every directory that is there: what must be refused is refused before the first run."""
        for one in self._chosen:
            if exists(self._places[one.name]):
                self._open(one)
        try:
            self._out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--out {self._out}: {error.strerror or error}: name another directory"
            ) from None
        if not os.access(self._out, os.W_OK):
            raise UsageError(f"--out {self._out}: cannot be written to: name another directory")

    def announce(self) -> None:
        model = self._asked.model
        kinds = {kind for one in self._chosen for kind in one.files}
        made = sum(
            file_seconds(kind, self._asked.sizes) for kind in kinds if not files.path_of(model, kind).exists()
        )
        what = "1 experiment" if len(self._chosen) == 1 else f"{len(self._chosen)} experiments"
        caged, reason = Cage.available()
        if not caged:
            self._show.note(
                f"caps are the engine's own, and arms that only the kernel can cap are left out: {reason}"
            )
        self._show.note(f"{what}, at most about {duration(self._progress.left_s() + made)}")

    def attempt(self, one: Experiment) -> Outcome:
        """``run``; whatever goes wrong in it is its outcome, and why."""
        try:
            return self.run(one)
        except Exception as error:
            reason = str(error) if isinstance(error, MoestreamError) else f"{type(error).__name__}: {error}"
            self._show.note(f"{one.name} failed: {reason}")
            if not isinstance(error, (MoestreamError, OSError)):
                self._show.note(traceback.format_exc())
            outcome = failed_experiment(one, reason, quick=self._asked.quick, cap_bytes=self._asked.cap_bytes)
            return self._kept(one, outcome)
        finally:
            self._progress.leave()

    def run(self, one: Experiment) -> Outcome:
        """Make the runs that are not there yet, and judge."""
        asked, place = self._asked, self._places[one.name]
        self._progress.enter(one.name)
        self._show.note(f"{one.name}: {one.question}")
        if one.name not in self._earlier:
            self._open(one)
        earlier = self._earlier[one.name]
        if one.kind == "probe":
            if (before := self._verdict_before(one)) is not None:
                return before
            # It is measured whole: rows of one that was not finished do not count.
            (place / RUNS).unlink(missing_ok=True)
        order = asked.jobs(one)
        earlier = earlier or self._shared.take(place, order)
        self._make_files(one)
        (place / VERDICT).unlink(missing_ok=True)
        outcome = run_experiment(
            one,
            BoxExecutor(asked.model, place),
            asked.sizes,
            quick=asked.quick,
            cap_bytes=asked.cap_bytes,
            earlier=earlier,
            watch=self._progress,
            typed=asked.typed_of(one, place),
        )
        if order:
            self._shared.add(place, order)
        return self._kept(one, outcome)

    def _verdict_before(self, one: Experiment) -> Outcome | None:
        """Of a probe, which is not gone on with, what came of it before."""
        path = self._places[one.name] / VERDICT
        if not self._asked.resume or not path.exists():
            return None
        outcome = read_json(path, "begin anew with --force")
        if not isinstance(outcome, dict) or not isinstance(outcome.get("verdict"), str):
            raise RefusedError(f"{path} is no verdict: begin anew with --force")
        with refusing(str(path)):
            outcome_lines(outcome)
        return outcome if not outcome.get("failed") else None

    def _make_files(self, one: Experiment) -> None:
        for kind in one.files:
            path = files.path_of(self._asked.model, kind)
            if not path.exists():
                took = duration(file_seconds(kind, self._asked.sizes))
                self._show.note(f"making the {kind} file, about {took}: {path}")
                files.make(self._asked.model, kind)

    def _open(self, one: Experiment) -> None:
        asked, place = self._asked, self._places[one.name]
        begun = (place / SETUP).exists()
        setup = {
            "experiment": one.name,
            "quick": asked.quick,
            "cap_bytes": asked.cap_bytes,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **({"file": Path(one.file).name, "sha256": _digest(one)} if one.file else {}),
            **self._what_and_where(),
        }
        if asked.force and begun:
            (place / VERDICT).unlink(missing_ok=True)
        self._earlier[one.name] = open_journal(
            place, setup, resume=asked.resume and begun, force=asked.force and begun
        )
        if one.kind != "probe":
            with refusing(str(place / RUNS)):
                check_earlier(one, self._earlier[one.name])

    def _what_and_where(self) -> dict[str, Any]:
        model = self._asked.model
        return {
            "model": {"name": model.paths[0].name, "bytes": model.bytes, "identity": model.identity},
            "box": Box().describe(model.paths[0]),
        }

    def _kept(self, one: Experiment, outcome: Outcome) -> Outcome:
        place = self._places[one.name]
        outcome = {**outcome, **origin(self._asked.model, place), **self._what_and_where()}
        if place.is_dir():
            write_json(place / VERDICT, outcome)
        return outcome


def _digest(one: Experiment) -> str:
    """Of what a user's file says: one that was changed is another experiment, and its runs do not go on."""
    return hashlib.sha256(repr(one).encode()).hexdigest()
