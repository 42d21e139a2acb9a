"""How an experiment's parts are really carried out: runs in processes of their own, traces read, the disk probed.

The only file that knows how; what an experiment is and what follows from it knows an ``Executor`` and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from moestream.box import Box, Cage
from moestream.errors import BudgetError
from moestream.lab import files
from moestream.lab.bench_arms import STOCK, Arm
from moestream.lab.experiment import Claim, ProbeSpec, ReplaySpec
from moestream.lab.experiment_plan import Job, Sizes, capped, run_seconds
from moestream.lab.runs import RUNS, SCHEMA, TIMEOUT_S, Setup, append, provenance, run_arm
from moestream.mechanism import Mechanism
from moestream.model import Model, read_model
from moestream.probe.schedule import Shot
from moestream.units import format_bytes

Record = dict[str, Any]
#: Figures by name, what is not known left out.
Figures = dict[str, float]
#: Steps of more tokens than this no arm takes, unless its experiment says so.
_BATCH = 256
#: A run that takes so many times what was estimated, and so much beside it, is stuck.
_PATIENCE, _LEAST_S = 8.0, 120.0
#: What of the box must be free before every expert is held in memory, and beside it.
_RESIDENT_SHARE, _RESIDENT_BESIDE = 1.05, 1_000_000_000


class Executor(Protocol):
    """Carries out what an experiment plans."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """Once, before the first run: whatever all runs must have in common. Raises BudgetError where no
        cap is enough for anything; where only some are, their runs are left out."""

    def left_out(self, job: Job) -> str:
        """Why a run cannot be made here, or ''."""

    def run(self, job: Job, earlier: Sequence[Record]) -> Record:
        """Make the run; its record, already appended to ``runs.jsonl``. ``earlier``: the experiment's so far."""

    def routing(self, record: Record) -> list[Figures]:
        """By layer, the figures of kind ``trace`` of a recorded run."""

    def replayed(self, record: Record, spec: ReplaySpec) -> dict[str, Figures]:
        """By ``POLICY@BUDGET``, the figures of kind ``replay`` of a recorded run."""

    def probed(
        self, experiment: str, spec: ProbeSpec, claims: Sequence[Claim]
    ) -> tuple[dict[str, list[Figures]], dict[str, str]]:
        """By ``GROUP/SETTING`` the figures of each round, and why a case has none. What was timed is already appended
        to ``runs.jsonl``."""


class BoxExecutor:
    """On this machine. ``out``: where records and traces go."""

    def __init__(self, model: Model, out: Path) -> None:
        self._model, self._out = model, out
        self._batch = _BATCH
        self._sizes = Sizes(model.bytes, model.expert_bytes, model.demand_bytes_per_token)
        self._models = {"model": model}
        self._too_little: dict[tuple[int, int], str] = {}

    @cached_property
    def _cage(self) -> tuple[bool, str]:
        return Cage.available()

    def begin(self, jobs: Sequence[Job]) -> None:
        from moestream.dryrun import COMPUTE_SHARE, plan_context

        batches = []
        refused: BudgetError | None = None
        for ctx, cap in capped(jobs):
            try:
                plan = plan_context(
                    self._model,
                    Box(),
                    cap,
                    None,
                    n_ctx=ctx,
                    n_ubatch=_BATCH,
                    compute_share=COMPUTE_SHARE,
                    n_outputs_max=1,
                )
            except BudgetError as error:
                self._too_little[ctx, cap] = str(error)
                refused = error
            else:
                batches.append(plan.n_batch)
        if refused is not None and not batches:
            raise refused
        self._batch = min(batches, default=_BATCH)

    def left_out(self, job: Job) -> str:
        caged, reason = self._cage
        if job.cap_bytes is not None and not caged and _needs_cage(job):
            return f"only a memory cgroup caps it: {reason}"
        if job.cap_bytes is not None and (job.ctx, job.cap_bytes) in self._too_little:
            return self._too_little[job.ctx, job.cap_bytes]
        available = Box().available_memory()
        if job.cap_bytes is not None and job.cap_bytes > available:
            return f"its cap is {format_bytes(job.cap_bytes)} and {format_bytes(available)} are free"
        if job.cap_bytes is None and available < self._model.bytes * _RESIDENT_SHARE + _RESIDENT_BESIDE:
            return f"the model does not fit into the {format_bytes(available)} that are free"
        return ""

    def run(self, job: Job, earlier: Sequence[Record]) -> Record:
        model = self._file(job.arm.file)
        setup = Setup(
            model=model,
            threads=job.threads,
            ctx=job.ctx,
            batch=job.batch or min(self._batch, job.ctx),
            tokens=job.tokens,
            caged=self._cage[0],
            out=self._out,
            trace=job.trace,
            timeout_s=min(TIMEOUT_S, _LEAST_S + _PATIENCE * run_seconds(job, self._sizes)),
        )
        arm = Arm(
            job.arm.key,
            job.cap_bytes,
            STOCK if job.arm.is_stock else job.arm.mechanism,
            tokens=job.tokens,
            expert_bytes=job.budget_bytes,
        )
        # Another file is another model: its tokens are its own.
        same = [record for record in earlier if (record["model"] or {}).get("identity") == model.identity]
        return run_arm(
            setup,
            arm,
            job.prompt,
            round=job.round,
            position=job.position,
            experiment=job.experiment,
            earlier=same,
        )

    def _file(self, kind: str) -> Model:
        if kind not in self._models:
            self._models[kind] = read_model(files.path_of(self._model, kind))
        return self._models[kind]

    def routing(self, record: Record) -> list[Figures]:
        from moestream.analyze import routing
        from moestream.analyze.choices import from_trace
        from moestream.trace.read import read_trace

        choices = from_trace(read_trace(self._out / record["trace"]))
        near = routing.locality(choices)
        at = {distance: near["distances"].index(distance) for distance in (1, 8)}
        return [
            layer_figures(row, near["overlap"][number], near["control"][number], at)
            for number, row in enumerate(routing.skew(choices))
        ]

    def replayed(self, record: Record, spec: ReplaySpec) -> dict[str, Figures]:
        from moestream.replay.curves import parse_budgets, parse_policies
        from moestream.replay.run import prepare, replay
        from moestream.seeds import load_priorities
        from moestream.trace.read import read_trace

        recording = prepare(read_trace(self._out / record["trace"]), record["trace"])
        budgets = parse_budgets(",".join(spec.budgets), [recording])
        policies = parse_policies(
            ",".join(spec.policies), lambda file: load_priorities(file, recording.identity)
        )
        rates: dict[str, float] = {}
        for budget in budgets:
            for policy in policies:
                priority = policy.priority(recording) if policy.priority is not None else None
                done = replay(
                    recording, policy.text, budget.capacities(recording), priority=priority, speculation=False
                )
                hits = int(done.hits[recording.decode].sum())
                routed = hits + int(done.misses[recording.decode].sum())
                if routed:
                    rates[f"{policy.text}@{budget.text}"] = hits / routed
        return with_gain(rates)

    def probed(
        self, experiment: str, spec: ProbeSpec, claims: Sequence[Claim]
    ) -> tuple[dict[str, list[Figures]], dict[str, str]]:
        from moestream.box.abilities import huge, io_uring
        from moestream.probe.device import find_device
        from moestream.probe.disk import Disk, Scope
        from moestream.probe.sample import model_sample

        scope = Scope(
            depths=spec.depths,
            threads=spec.threads,
            splits=spec.splits,
            alignments=spec.alignments,
            advice=spec.advice,
            rounds=spec.rounds,
            case_bytes=spec.case_mb << 20,
            case_s=spec.case_s,
            seconds=spec.seconds,
        )
        device = find_device(self._model.paths[0])
        disk = Disk(model_sample(self._model), scope, device, uring=not io_uring(), huge_pages=not huge())
        measured = disk.measure(groups=spec.groups)
        reasons = dict(measured.reasons)
        known = {case.key for case in disk.cases()}
        for key in {arm for claim in claims for arm in claim.arms} - known:
            reasons.setdefault(key, "this box has no such case")
        figures = probe_figures(measured.shots)
        for row in probe_rows(experiment, measured.shots, figures):
            append(self._out / RUNS, {"schema": SCHEMA, **origin(self._model, self._out), **row})
        return figures, reasons


def origin(model: Model, out: Path) -> Record:
    """Which code, on which versions and kernel, with which model, when: as every run's record has it."""
    return provenance(Setup(model, threads=1, ctx=1, batch=1, tokens=1, caged=False, out=out))


def _needs_cage(job: Job) -> bool:
    return job.arm.is_stock or Mechanism.parse(job.arm.mechanism).left_to_the_kernel


def layer_figures(
    skew: Mapping[str, Any],
    overlap: Sequence[float | None],
    control: Sequence[float | None],
    at: Mapping[int, int],
) -> Figures:
    """One layer's figures of kind ``trace``, of rows of ``moestream.analyze.routing``. ``at``: where a distance is."""
    window, experts = skew["distinct_in_window"], skew["experts"]
    near, far, shuffled = overlap[at[1]], overlap[at[8]], control[at[1]]
    known = {
        "needed_80_share": skew["needed"]["80%"] / experts,
        "distinct_in_64_share": window / experts if window is not None else None,
        "overlap_1": near,
        "overlap_8": far,
        "overlap_1_over_shuffled": near / shuffled if near is not None and shuffled else None,
        "overlap_8_over_1": far / near if far is not None and near else None,
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def with_gain(rates: Mapping[str, float]) -> dict[str, Figures]:
    """Hit rates by ``POLICY@BUDGET``, each with how much of the way from lru to belady it is, where both are known."""
    made: dict[str, Figures] = {}
    for key, rate in rates.items():
        budget = key.rpartition("@")[2]
        low, high = rates.get(f"lru@{budget}"), rates.get(f"belady@{budget}")
        made[key] = {"replayed_hit_rate": rate}
        if low is not None and high is not None and high > low:
            made[key]["replayed_gain"] = (rate - low) / (high - low)
    return made


def probe_figures(shots: Mapping[str, Sequence[Shot]]) -> dict[str, list[Figures]]:
    """By case the figures of each round. An account of the process's reads that never moved is none."""
    counted = any(shot.physical_bytes for rounds in shots.values() for shot in rounds)
    return {key: [shot_figures(shot, counted) for shot in rounds] for key, rounds in shots.items()}


def probe_rows(
    experiment: str, shots: Mapping[str, Sequence[Shot]], figures: Mapping[str, Sequence[Figures]]
) -> list[Record]:
    """A row of ``runs.jsonl`` for each timed case of each round: what was counted, and what follows."""
    return [
        {
            "experiment": experiment,
            "kind": "probe",
            "arm": key,
            "round": number,
            "shot": asdict(shot),
            "figures": made,
        }
        for key, rounds in shots.items()
        for number, (shot, made) in enumerate(zip(rounds, figures[key], strict=True))
    ]


def shot_figures(shot: Shot, counted: bool) -> Figures:
    """One timed case's figures of kind ``probe``; what the box keeps no account of is left out. ``counted``: the
    process's account of what it read from the device moves."""
    made: Figures = {}
    if shot.bytes > 0 and shot.seconds > 0:
        made["bytes_per_s"] = shot.bytes / shot.seconds
        made["cpu_s_per_gb"] = shot.cpu_s / shot.bytes * 1e9
        if counted and shot.physical_bytes is not None:
            made["amplification"] = shot.physical_bytes / shot.bytes
    if shot.device_reads and shot.device_bytes is not None:
        made["device_ops_per_read"] = shot.device_reads / max(1, shot.reads)
        made["device_op_bytes"] = shot.device_bytes / shot.device_reads
    return made
