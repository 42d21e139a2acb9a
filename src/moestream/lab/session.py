"""``lab run``: experiments one after another, each with a directory of its own that can be gone on with."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.box import Box
from moestream.lab import files
from moestream.lab.bench_journal import open_journal
from moestream.lab.execute import BoxExecutor
from moestream.lab.experiment import Experiment
from moestream.lab.experiment_plan import Sizes, seconds
from moestream.lab.experiment_run import run_experiment
from moestream.lab.experiment_text import minutes
from moestream.lab.runs import end_on_sigterm
from moestream.model import Model
from moestream.report import write_json

VERDICT = "verdict.json"
_OUT = Path("results/scratch")


@dataclass(frozen=True)
class Asked:
    """What ``lab run`` was told."""

    model: Model
    cap_bytes: int | None
    quick: bool
    out: Path | None
    resume: bool
    force: bool


def run_all(
    chosen: Sequence[Experiment],
    asked: Asked,
    *,
    tell: Callable[[dict[str, Any]], None] | None,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The outcomes, each also in ``verdict.json`` of its directory and given to ``tell`` as it comes. Raises
    RefusedError before anything is run where the disk has no room for the files that are needed."""
    model = asked.model
    kinds = [kind for one in chosen for kind in one.files]
    copies = any(arm.mechanism.startswith("shared") for one in chosen for arm in one.arms)
    files.check_room(model, kinds, int(copies))
    out = asked.out or _OUT / f"lab-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    places = {one.name: out if len(chosen) == 1 else out / one.name for one in chosen}
    end_on_sigterm()
    sizes = Sizes(model.bytes, model.expert_bytes, model.demand_bytes_per_token)
    outcomes = []
    for one in chosen:
        say(f"{one.name}: {one.question} (about {minutes(seconds(one, asked.quick, sizes))})")
        outcome = _run_one(one, asked, places[one.name], sizes, say)
        outcomes.append(outcome)
        if tell is not None:
            tell(outcome)
    say(f"records and verdicts: {out}")
    return outcomes


def _run_one(
    one: Experiment, asked: Asked, out: Path, sizes: Sizes, say: Callable[[str], None]
) -> dict[str, Any]:
    model = asked.model
    setup = {
        "experiment": one.name,
        "quick": asked.quick,
        "cap_bytes": asked.cap_bytes,
        "model": {"name": model.paths[0].name, "bytes": model.bytes, "identity": model.identity},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "box": Box().describe(model.paths[0]),
    }
    begun = (out / "setup.json").exists()
    earlier = open_journal(out, setup, resume=asked.resume and begun, force=asked.force and begun)
    (out / VERDICT).unlink(missing_ok=True)
    for kind in one.files:
        if not files.path_of(model, kind).exists():
            say(f"making the {kind} file: {files.path_of(model, kind)}")
            files.make(model, kind)
    outcome = run_experiment(
        one,
        BoxExecutor(model, out),
        sizes,
        quick=asked.quick,
        cap_bytes=asked.cap_bytes,
        earlier=earlier,
        say=say,
    )
    outcome["model"] = setup["model"]
    outcome["box"] = setup["box"]
    write_json(out / VERDICT, outcome)
    return outcome
