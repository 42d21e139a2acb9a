"""A benchmark from its setup to its report: what is asked is written down, every run that is not there yet is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestream.lab.bench_arms import Arm
from moestream.lab.bench_journal import REPORT, SETUP, SUMMARY
from moestream.lab.bench_progress import Display
from moestream.lab.bench_summary import summarise
from moestream.lab.bench_text import report
from moestream.lab.bench_time import left_s, seconds_by_arm
from moestream.lab.record_kinds import refusing
from moestream.lab.runs import RUNS, Executor, Processes, Setup, provenance, run_arm
from moestream.lab.schedule import Slot
from moestream.lab.validity import Reason, Record
from moestream.report import write_json

#: An arm whose first so many runs all failed is not tried again.
GIVE_UP_AFTER = 3


@dataclass(frozen=True)
class Asked:
    """What a benchmark is asked to do. ``ram``: the cap as it was typed; ``command``: how to repeat it; ``left_out``:
    arms that cannot run here, and why; ``notes``: what must be known of all runs before the first; ``ladder``: each arm
    is held against the one before it; ``expected_s``: about how long a run of each arm takes, by its key."""

    setup: Setup
    arms: tuple[Arm, ...]
    repeats: int
    sentinel: str
    cap_bytes: int
    ram: str
    command: str
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ladder: bool = False
    expected_s: Mapping[str, float] = field(default_factory=dict)

    def document(self, box: dict[str, Any]) -> dict[str, Any]:
        """``setup.json``: everything that decides what is measured (docs/formats/runs.md)."""
        setup, made = self.setup, provenance(self.setup)
        return {
            "schema": 1,
            **{name: made[name] for name in ("date", "commit", "versions", "python", "kernel", "model")},
            "box": box,
            "command": self.command,
            "out": _shown(setup.out),
            "ram": self.ram,
            "cap_bytes": self.cap_bytes,
            "caged": setup.caged,
            "threads": setup.threads,
            "ctx": setup.ctx,
            "batch": setup.batch,
            "tokens": setup.tokens,
            "limit_s": setup.limit_s,
            "trace": setup.trace,
            "repeats": self.repeats,
            "sentinel": self.sentinel,
            "ladder": self.ladder,
            "prompts": dict(setup.prompts),
            "arms": [
                {
                    "key": arm.key,
                    "asked": arm.label,
                    "cap_bytes": arm.cap_bytes,
                    "ram_bytes": arm.ram_bytes,
                    "warm": arm.warm,
                    "tokens": arm.tokens,
                    "prompts": list(arm.prompts) if arm.prompts is not None else None,
                    "lever": arm.lever,
                }
                for arm in self.arms
            ],
            "left_out": list(self.left_out),
        }


def _shown(out: Path) -> str:
    """The directory as a command can name it, without telling where on this machine it is."""
    return str(out) if not out.is_absolute() and ".." not in out.parts else out.name


def make_runs(
    setup: Setup,
    slots: Sequence[Slot],
    records: Sequence[Record],
    show: Display,
    executor: Executor | None = None,
    run: Callable[..., Record] = run_arm,
    expected: Mapping[str, float] | None = None,
) -> list[Record]:
    """Make every run of ``slots`` that ``records`` does not hold, in their order; all records there are then.

    Each is on the disk before the next begins. An arm whose first three runs all failed is given up, which is said.
    ``expected``: seconds of a run by arm, until one of it has ended."""
    executor = executor or Processes()
    done = list(records)
    todo = not_made(slots, done)
    took = seconds_by_arm(done)
    given_up: set[str] = set()
    for number, slot in enumerate(todo):
        if _hopeless(slot.arm.key, done):
            if slot.arm.key not in given_up:
                show.note(f"{slot.arm.key}: its first {GIVE_UP_AFTER} runs failed, it is given up")
                given_up.add(slot.arm.key)
            continue
        left = [later for later in todo[number:] if not _hopeless(later.arm.key, done)]
        show.begin(slot, len(slots) - len(todo) + number + 1, len(slots), left_s(expected or {}, took, left))
        begun = executor.clock()
        record = run(
            setup,
            slot.arm,
            slot.prompt,
            round=slot.round,
            position=slot.position,
            again=slot.again,
            earlier=done,
            executor=executor,
        )
        took.setdefault(slot.arm.key, []).append(executor.clock() - begun)
        done.append(record)
        show.end(slot, record)
    return done


def check_earlier(out: Path, setup: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Asks the records of a benchmark that goes on for all that is needed of them later, before a run is made. Raises
    RefusedError that names their file where a value is none that a run wrote."""
    if not records:
        return
    with refusing(str(out / RUNS)):
        not_made([], records)
        seconds_by_arm(records)
        for record in records:
            _will_fail_again(record)
        report(summarise(setup, records))


def not_made(slots: Sequence[Slot], records: Sequence[Record]) -> list[Slot]:
    """The runs that no record is of, in their order."""
    made = {(record["round"], record["position"]) for record in records}
    return [slot for slot in slots if slot.name not in made]


def _hopeless(key: str, records: Sequence[Record]) -> bool:
    first = [record for record in records if record["arm"] == key][:GIVE_UP_AFTER]
    return len(first) == GIVE_UP_AFTER and all(map(_will_fail_again, first))


def _will_fail_again(record: Record) -> bool:
    """It failed, or its box refused what was asked for before it ran."""
    reasons = {Reason.FAILED} | ({Reason.FELL_BACK} if record["returncode"] != 0 else set())
    return any(text.startswith(f"{reason.value}:") for reason in reasons for text in record["invalid"])


def conclude(out: Path, records: Sequence[Record], probe_compute_s: float | None) -> dict[str, Any]:
    """Write ``summary.json`` and ``report.md`` of what there is, whole or not at all; the summary."""
    setup = json.loads((out / SETUP).read_text(encoding="utf-8"))
    summary = summarise(setup, records, probe_compute_s)
    write_json(out / SUMMARY, summary)
    fresh = out / f".{REPORT}"
    fresh.write_text(report(summary), encoding="utf-8")
    fresh.replace(out / REPORT)
    return summary
