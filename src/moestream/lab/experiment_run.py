"""Run an experiment with an executor and say what follows from it: one plain document, ``verdict.json``.

Nothing here starts a process or reads a file; what was done before a kill is in ``earlier`` and is not done again.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moestream.errors import RefusedError
from moestream.lab.bench_doubts import Typed
from moestream.lab.execute import Executor, Record
from moestream.lab.experiment import Experiment
from moestream.lab.experiment_doubts import ANYWHERE, doubts_of, noise_of
from moestream.lab.experiment_figures import FIGURES, usable, with_floor
from moestream.lab.experiment_plan import PROBE, Job, Sizes, jobs
from moestream.lab.experiment_progress import Unwatched, Watch
from moestream.lab.verdicts import NOISE, Sample, judge, overall, table
from moestream.version import __version__

SCHEMA = 1
#: Pairs of one layer in several repeats must not meet.
_LAYERS = 10_000


@dataclass
class _Seen:
    """What came of the experiment's parts. ``left_out``: by arm or case why it was not run; ``not_counted``: runs whose
    records may not be counted, with the reason; ``noise``, ``doubts``: how far its times can be trusted; ``failed``:
    why nothing came of it at all."""

    samples: list[Sample] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    not_counted: list[str] = field(default_factory=list)
    noise: float = NOISE
    doubts: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""


def run_experiment(
    experiment: Experiment,
    executor: Executor,
    sizes: Sizes,
    *,
    quick: bool = False,
    cap_bytes: int | None = None,
    earlier: Sequence[Record] = (),
    watch: Watch | None = None,
    typed: Typed | None = None,
) -> dict[str, Any]:
    """Every run (or the probe), then the verdict; the document of it. ``cap_bytes``: instead of the settings' cap.
    ``earlier``: records of the same experiment, whose runs are not made again where they count. ``typed``: for what
    doubts say to type."""
    watch = watch or Unwatched()
    seen = _Seen()
    if experiment.kind == "probe":
        watch.begin(PROBE)
        _probe(experiment, executor, quick, seen)
        watch.end(PROBE, None)
    else:
        settings = experiment.quick if quick else experiment.settings
        records = _runs(jobs(experiment, settings, sizes, cap_bytes), executor, earlier, seen, watch)
        _observe(experiment, executor, records, seen)
        if experiment.kind == "runs":
            seen.noise = noise_of(records)
            seen.doubts = doubts_of(records, typed or ANYWHERE)
    return _document(experiment, quick, cap_bytes, seen)


def check_earlier(experiment: Experiment, earlier: Sequence[Record]) -> None:
    """Asks earlier records for all that their runs are judged by, before hours are spent on the others. Raises whatever
    values that no run wrote raise."""
    counted = [record for record in earlier if usable(record)]
    for record in with_floor(counted):
        Sample(record["arm"], record["prompt"], record["round"], {}, record)
        if experiment.kind == "runs":
            _figures(experiment, record)
    if experiment.kind == "runs":
        noise_of(counted)
        doubts_of(counted, ANYWHERE)


def failed_experiment(
    experiment: Experiment, reason: str, *, quick: bool = False, cap_bytes: int | None = None
) -> dict[str, Any]:
    """The document of an experiment that came to no end: it cannot tell, and says why."""
    return _document(experiment, quick, cap_bytes, _Seen(failed=reason))


def _document(experiment: Experiment, quick: bool, cap_bytes: int | None, seen: _Seen) -> dict[str, Any]:
    settings = experiment.quick if quick else experiment.settings
    judged = [judge(claim, seen.samples, seen.noise) for claim in experiment.claims]
    return {
        "schema": SCHEMA,
        "moestream": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "experiment": experiment.name,
        "question": experiment.question,
        "kind": experiment.kind,
        "source": experiment.source,
        "found": experiment.found,
        "measures": experiment.measures,
        "quick": quick,
        "settings": {**asdict(settings), "prompts": list(settings.prompts)},
        "cap_bytes": cap_bytes,
        "verdict": overall(judged),
        "claims": [one.plain() for one in judged],
        "figures": list(experiment.figures),
        "table": {
            arm: {name: asdict(value) for name, value in of.items()}
            for arm, of in table(experiment.figures, seen.samples).items()
        },
        "noise": seen.noise,
        "doubts": seen.doubts,
        "left_out": seen.left_out,
        "not_counted": seen.not_counted,
        "failed": seen.failed,
    }


def _runs(
    order: Sequence[Job], executor: Executor, earlier: Sequence[Record], seen: _Seen, watch: Watch
) -> list[Record]:
    """Make every run that is not among the earlier ones; the records that may be counted."""
    done = {job.key: record for record in earlier if usable(record) for job in order if job.made(record)}
    records: list[Record] = [done[job.key] for job in order if job.key in done]
    todo = [job for job in order if job.key not in done]
    if todo:
        executor.begin(order)
    for step in done:
        watch.end(step, None)
    for job in todo:
        reason = seen.left_out.get(job.arm.key) or executor.left_out(job)
        if reason:
            if job.arm.key not in seen.left_out:
                watch.note(f"{job.arm.key} is left out: {reason}")
            seen.left_out[job.arm.key] = reason
            watch.end(job.key, None)
            continue
        watch.begin(job.key)
        record = executor.run(job, records)
        watch.end(job.key, record)
        if usable(record):
            records.append(record)
        elif record.get("returncode") == RefusedError.exit_code:
            # The engine refuses what it cannot do here, and will again.
            seen.left_out[job.arm.key] = (record["error"].strip().splitlines() or ["refused"])[-1]
        else:
            why = "; ".join(record.get("invalid") or []) or record.get("error") or "no document"
            seen.not_counted.append(f"{job.arm.key}, {job.prompt}, round {job.round + 1}: {why}")
    return records


def _observe(experiment: Experiment, executor: Executor, records: list[Record], seen: _Seen) -> None:
    """The samples of the records, by the experiment's kind."""
    for record in with_floor(records):
        arm, prompt, repeat = record["arm"], record["prompt"], record["round"]
        if experiment.kind == "runs":
            seen.samples.append(Sample(arm, prompt, repeat, _figures(experiment, record), record))
        elif experiment.kind == "trace":
            for layer, figures in enumerate(executor.routing(record)):
                seen.samples.append(Sample(arm, prompt, repeat * _LAYERS + layer, figures))
        else:
            for key, figures in executor.replayed(record, experiment.replay).items():
                seen.samples.append(Sample(key, prompt, repeat, figures))


def _figures(experiment: Experiment, record: Record) -> dict[str, float]:
    """The experiment's figures of one run, as far as it has them."""
    known = {name: FIGURES[name].of for name in experiment.figures}
    return {
        name: float(value)
        for name, of in known.items()
        if of is not None and (value := of(record)) is not None
    }


def _probe(experiment: Experiment, executor: Executor, quick: bool, seen: _Seen) -> None:
    spec = experiment.quick_probe if quick else experiment.probe
    shots, reasons = executor.probed(experiment.name, spec, experiment.claims)
    for case, rounds in shots.items():
        seen.samples += [Sample(case, "", number, figures) for number, figures in enumerate(rounds)]
    seen.left_out |= reasons
