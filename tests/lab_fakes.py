"""An executor of experiments that runs nothing, and the records it makes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moestream.lab.experiment import Claim, ProbeSpec, ReplaySpec
from moestream.lab.experiment_plan import Job


def made_record(job: Job, **changes: Any) -> dict[str, Any]:
    """A record of a run: 10 tokens a second, half of the experts found, everything asked for read."""
    steps = job.tokens - 1
    seconds_ = changes.pop("seconds", steps / changes.pop("tok_per_s", 10.0))
    phase = {
        "tokens": steps,
        "seconds": seconds_,
        "tok_per_s": steps / seconds_,
        "step_ms": [seconds_ / steps * 1e3] * steps,
        "hits": 4 * steps,
        "misses": 4 * steps,
        "bytes_read": 1000 * steps,
        "read_bytes_os": 1000 * steps,
        "stall_s": 0.4 * seconds_,
        "compute_s": 0.3 * seconds_,
        "memory_work_s": 0.3 * seconds_,
        "majflt": 10 * steps,
        "minflt": 20 * steps,
        "speculative": {"issued": 10, "used": 5, "wasted_bytes": 100},
    }
    phase.update({name: value for name, value in changes.items() if name in phase})
    document = {
        "model": {"demand_bytes_per_token": 1000},
        "n_batch": job.batch or 256,
        "prompt_tokens": 40,
        "mechanism": {"effective": job.arm.mechanism},
        "prefill": {"tok_per_s": 50.0, "tokens": 40, "bytes_read": 4000, "read_bytes_os": 4000},
        "decode": phase,
        "cpu_s": {"decode": 0.1 * steps},
        "memory": {"anon": 500, "locked": 0},
        "budget": {"expert_bytes": 5000, "kv_bytes": 100},
    }
    return {
        "arm": job.arm.key,
        "asked": job.arm.mechanism,
        "prompt": job.prompt,
        "round": job.round,
        "valid": True,
        "invalid": [],
        "cap_bytes": job.cap_bytes,
        "caged": job.cap_bytes is not None,
        "cached_bytes_before": 0,
        "modified": False,
        "disk_bytes_per_s": 1e6,
        "seconds": 1.0,
        "document": document,
        "model": {"identity": job.arm.file},
        **{name: value for name, value in changes.items() if name not in phase},
    }


class Fake:
    """An executor that runs nothing. ``rates``: tokens a second by arm; ``rounds``: a factor of each run, by round."""

    def __init__(
        self,
        rates: Mapping[str, float] | None = None,
        rounds: Sequence[float] = (1.0,),
        layers: Sequence[Mapping[str, float]] = (),
        replays: Mapping[str, Mapping[str, float]] | None = None,
        shots: Mapping[str, Sequence[Mapping[str, float]]] | None = None,
    ) -> None:
        self.rates, self.rounds = rates or {}, rounds
        self.layers, self.replays, self.shots = layers, replays or {}, shots or {}
        self.ran: list[Job] = []
        self.begun: list[int] = []
        self.excuses: dict[str, str] = {}
        self.changes: dict[str, dict[str, Any]] = {}

    def begin(self, jobs: Sequence[Job]) -> None:
        self.begun.append(len(jobs))

    def left_out(self, job: Job) -> str:
        return self.excuses.get(job.arm.key, "")

    def run(self, job: Job, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
        self.ran.append(job)
        factor = self.rounds[job.round % len(self.rounds)] if job.arm.key in self.rates else 1.0
        rate = self.rates.get(job.arm.key, 10.0) * factor
        return made_record(job, tok_per_s=rate, **self.changes.get(job.arm.key, {}))

    def routing(self, record: dict[str, Any]) -> list[dict[str, float]]:
        return [dict(layer) for layer in self.layers]

    def replayed(self, record: dict[str, Any], spec: ReplaySpec) -> dict[str, dict[str, float]]:
        return {key: dict(figures) for key, figures in self.replays.items()}

    def probed(
        self, experiment: str, spec: ProbeSpec, claims: Sequence[Claim]
    ) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
        return {key: [dict(one) for one in rounds] for key, rounds in self.shots.items()}, {}
