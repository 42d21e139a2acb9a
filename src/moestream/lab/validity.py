"""Which runs may be counted. One that was not what it was meant to be stays in the record and out of every figure.

Pure functions over records. ``judge`` looks at one run; ``judge_all`` also compares the runs' tokens with each other.
A reason is text that begins with a word of ``Reason``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from moestream.errors import MechanismError, RefusedError
from moestream.lab.bench_engaged import broken_promises
from moestream.mechanism import Mechanism

Record = dict[str, Any]

#: A run under a cap begins cold: at most this share of the model may be in the page cache.
CACHED_SHARE = 0.01
#: Machine-wide swapping beyond this while a run ran: it waited for the disk for other reasons than ours.
SWAPPED_BYTES = 8 << 20
#: Where no cgroup holds the cap, the process may have this much more resident than it was told (mapped libraries).
UNCAGED_SHARE = 1.10
#: A memory cgroup charges in batches: its peak may pass the limit by so much and no more.
CHARGE_SLACK = 1 << 20
#: How an engine that was told a mechanism refuses to run another (``EngagementError``).
_NOT_AS_ASKED = re.compile(r"not as asked(?: \(--strict\))?: ")
#: What of a box must be equal for two runs to be put side by side.
BOX_KEYS = ("machine_id", "cpu_model", "cpus", "ram_bytes", "kernel", "machine", "fs", "device")


class Reason(str, Enum):
    """Why a run does not count."""

    FAILED = "failed"
    LOST_CAP = "lost cap"
    FELL_BACK = "fell back"
    INACTIVE = "inactive"
    SWAPPED = "swapped"
    NOT_COLD = "not cold"
    EMPTY = "empty output"
    OTHER_TOKENS = "other tokens"

    def of(self, detail: str) -> str:
        return f"{self.value}: {' '.join(detail.split())}"


def judge(record: Record) -> list[str]:
    """Everything that makes one run, looked at alone, not count; [] for a good one."""
    document = record.get("document")
    found = []
    if record.get("oom_kills"):
        found.append(
            Reason.LOST_CAP.of(f"the kernel killed {record['oom_kills']} process for memory: raise the cap")
        )
    if record["returncode"] != 0 or document is None:
        # Of a traceback, the last line says what happened.
        said = ((record.get("error") or "").strip().splitlines() or ["no word"])[-1][-300:]
        refused = _NOT_AS_ASKED.match(said)
        if refused is not None:
            return [*found, Reason.FELL_BACK.of(said[refused.end() :])]
        return [*found, Reason.FAILED.of(f"exit code {record['returncode']}: {said}")]
    return [*found, *_cap(record), *_engaged(record), *_state(record), *_output(record)]


def judge_all(records: Sequence[Record]) -> list[Record]:
    """Copies of the records with ``valid`` and ``invalid`` set by what all of them together show.

    Tokens are compared within one prompt and one way of cutting it into steps: stock's are right; where stock has none,
    those of most arms (of equally many, the first). Only a common length is compared."""
    alone = [{**record, "invalid": judge(record)} for record in records]
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in alone:
        if not record["invalid"]:
            document = record["document"]
            step = min(document["n_batch"], document["prompt_tokens"])
            groups.setdefault((record["prompt"], step), []).append(record)
    for group in groups.values():
        right = _reference(group)
        for record in group:
            where = _first_difference(record["document"]["tokens"], right["document"]["tokens"])
            if where is not None:
                record["invalid"].append(
                    Reason.OTHER_TOKENS.of(
                        f"token {where + 1} of {record['prompt']} differs from that of {right['arm']}"
                    )
                )
    return [{**record, "valid": not record["invalid"]} for record in alone]


def check_one_box(records: Iterable[Record]) -> None:
    """Raises RefusedError when the records are of more than one machine: they are never averaged."""
    first: dict[str, Any] | None = None
    for record in records:
        box = box_of(record)
        if box is None:
            continue
        first = first or box
        different = [
            f"{key} {first.get(key)} and {box.get(key)}"
            for key in BOX_KEYS
            if first.get(key) is not None and box.get(key) is not None and first[key] != box[key]
        ]
        if different:
            raise RefusedError(
                f"runs of two boxes cannot be put together ({'; '.join(different)}): report each directory by itself"
            )


def box_of(record: Record) -> dict[str, Any] | None:
    """The box a run ran on; None when it never got that far."""
    box: dict[str, Any] | None = record.get("box") or (record.get("document") or {}).get("box")
    return box


def is_stock(record: Record) -> bool:
    return bool(record["asked"] == "stock")


def must_be_cold(record: Record) -> bool:
    """Whether nothing of the model may be cached when the run begins. Where that is not known, it is a doubt."""
    return record["cap_bytes"] is not None and not record.get("warm")


def _cap(record: Record) -> list[str]:
    """Was the cap the kernel's, and did the process see it?"""
    cap, document = record["cap_bytes"], record["document"]
    if cap is None:
        return []
    if record["caged"]:
        limit = document["box"].get("limit_bytes")
        if limit is not None and limit > cap:
            return [Reason.LOST_CAP.of(f"inside its cgroup the limit was {limit}, not {cap} bytes")]
        peak = record.get("cage_peak_bytes")
        if peak is not None and peak > cap + CHARGE_SLACK:
            return [Reason.LOST_CAP.of(f"its cgroup held {peak} bytes of {cap}")]
        return []
    if is_stock(record) or _left_to_the_kernel(record):
        return [Reason.LOST_CAP.of("no memory cgroup held it, and what it keeps the kernel decides")]
    if document["peak_rss_bytes"] > cap * UNCAGED_SHARE:
        return [Reason.LOST_CAP.of(f"{document['peak_rss_bytes']} bytes were resident, the cap is {cap}")]
    return []


def _left_to_the_kernel(record: Record) -> bool:
    try:
        return Mechanism.parse(str(record["document"]["mechanism"]["effective"])).left_to_the_kernel
    except MechanismError:
        return False  # `_engaged` says so


def _engaged(record: Record) -> list[str]:
    """Did the mechanism that was asked for, or the default as it is where nothing is in its way, do the work?"""
    if is_stock(record):
        return []
    mechanism, asked = record["document"]["mechanism"], record["asked"]
    if mechanism.get("fallbacks"):
        return [Reason.FELL_BACK.of("; ".join(mechanism["fallbacks"]))]
    try:
        # What the default is under a cap the engine decides.
        wanted = Mechanism.parse(str(mechanism["effective"]) if asked == "default" else asked)
    except MechanismError as error:
        return [Reason.FELL_BACK.of(str(error))]
    if asked != "default" and mechanism["effective"] != str(wanted):
        return [Reason.FELL_BACK.of(f"{mechanism['effective']} ran, {wanted} was asked for")]
    if wanted.store == "resident" or record["cap_bytes"] is None:
        return []
    phases = [record["document"].get(name) or {} for name in ("prefill", "decode")]
    if wanted.reader != "fault" and not any(phase.get("bytes_read") or phase.get("hits") for phase in phases):
        return [Reason.INACTIVE.of(f"{wanted.reader} asked for nothing")]
    broken = broken_promises(wanted, mechanism.get("engaged") or {})
    return [Reason.INACTIVE.of(f"{', '.join(broken)}: 0 of {wanted}")] if broken else []


def _state(record: Record) -> list[str]:
    """Did it begin as it should, and was it left alone?"""
    found = []
    cached = record.get("cached_bytes_before")
    if must_be_cold(record) and cached is not None and cached > CACHED_SHARE * record["model"]["bytes"]:
        found.append(
            Reason.NOT_COLD.of(
                f"{cached / 1e6:.0f} MB of the model were cached before: end what else has it mapped"
            )
        )
    swapped = (record.get("conditions") or {}).get("swapped_bytes") or 0
    if swapped > SWAPPED_BYTES:
        found.append(Reason.SWAPPED.of(f"the machine swapped {swapped / 1e6:.0f} MB while it ran"))
    return found


def _output(record: Record) -> list[str]:
    tokens = record["document"]["tokens"]
    if not tokens:
        return [Reason.EMPTY.of("no token came out, which equals nothing")]
    if len(tokens) < record["tokens"]:
        return [Reason.EMPTY.of(f"{len(tokens)} of {record['tokens']} tokens came out")]
    return []


def _reference(group: Sequence[Record]) -> Record:
    """The run whose tokens are right: stock's longest, else that which most arms agree with, however often each ran."""
    stock = [record for record in group if is_stock(record)]
    if stock:
        return max(stock, key=lambda record: len(record["document"]["tokens"]))

    def agreeing(record: Record) -> int:
        ours = record["document"]["tokens"]
        return len(
            {other["arm"] for other in group if _first_difference(ours, other["document"]["tokens"]) is None}
        )

    return max(group, key=agreeing)


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two answers part, None where they agree for their common length."""
    return next(
        (number for number, (one, two) in enumerate(zip(ours, theirs, strict=False)) if one != two), None
    )
