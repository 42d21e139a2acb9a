"""Records of runs as they lie in ``DIR/runs.jsonl``, checked and completed; and which box each is of.

A record is one JSON object a line. Those of schema 1 say themselves whether they are valid; older ones, which have no
``schema``, are judged here by the little they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError
from moestream.files import check_listable, exists, printable, read_bytes, read_json
from moestream.lab.record_kinds import MOST_BYTES, is_number, parse_record, refusing
from moestream.lab.validity import judge_all
from moestream.units import format_bytes

Record = dict[str, Any]

RUNS, SETUP = "runs.jsonl", "setup.json"
STOCK = "stock"
#: More of the model than this in the page cache when a capped run begins, and it did not begin cold.
_WARM_SHARE = 0.01
#: What an older record lacks.
_DEFAULTS: Record = {
    "commit": None,
    "modified": False,
    "versions": {},
    "model": {},
    "cap_bytes": None,
    "caged": False,
    "threads": None,
    "ctx": None,
    "batch": None,
    "tokens": None,
    "most_tokens": None,
    "limit_s": None,
    "cached_bytes_before": None,
    "disk_bytes_per_s": None,
    "returncode": 0,
    "error": "",
    "cage_peak_bytes": None,
    "cage_anon_peak_bytes": None,
    "oom_kills": None,
    "seconds": None,
    "trace": None,
    "round": 0,
    "experiment": None,
    "date": "",
}
_STEP_FIGURES = ("hits", "misses", "bytes_read", "stall_s", "memory_work_s", "tokens")


@dataclass(frozen=True)
class BoxName:
    """What tells one box from another in a report; two that differ in anything are never put into one figure.

    ``cpu_model`` and ``machine_id`` are '' in records made before these were written down: such a name may be that of
    any box of the same size (``agrees``)."""

    cpus: int | None
    machine: str
    ram_bytes: int | None
    kernel: str
    fs: str
    device: str
    cpu_model: str = ""
    machine_id: str = ""

    @classmethod
    def of(cls, box: Mapping[str, Any]) -> BoxName:
        """The box of a document's ``box``."""
        text = {name: str(box.get(name) or "unknown") for name in ("machine", "kernel", "fs", "device")}
        text.update({name: str(box.get(name) or "") for name in ("cpu_model", "machine_id")})
        return cls(cpus=box.get("cpus"), ram_bytes=box.get("ram_bytes"), **text)

    @property
    def told(self) -> bool:
        """Whether it says more than a box's size."""
        return bool(self.cpu_model or self.machine_id)

    def agrees(self, other: BoxName) -> bool:
        """The same by all that both say."""
        if self.told and other.told:
            return self == other
        return self._size() == other._size()

    def _size(self) -> BoxName:
        return replace(self, cpu_model="", machine_id="")

    def __str__(self) -> str:
        ram = format_bytes(self.ram_bytes) if self.ram_bytes else "unknown memory"
        kind = f"{self.cpu_model}, {self.machine}" if self.cpu_model else self.machine
        number = f", machine {self.machine_id[:6]}" if self.machine_id else ""
        return f"{self.cpus or '?'} CPUs ({kind}), {ram}, Linux {self.kernel}, {self.fs} on {self.device}{number}"


def box_names(boxes: Iterable[Mapping[str, Any]]) -> list[BoxName]:
    """A name for each: one that says only its size is given the name of the box of that size, if there is just one."""
    names = [BoxName.of(box) for box in boxes]
    told = dict.fromkeys(name for name in names if name.told)
    found = []
    for name in names:
        same = [other for other in told if name.agrees(other)]
        found.append(same[0] if len(same) == 1 else name)
    return found


@dataclass(frozen=True)
class Results:
    """The records of one directory, in the order they were made. ``notes``: what was left out, a sentence each;
    ``setup``: what the bench was asked, {} where nothing says."""

    directory: Path
    records: tuple[Record, ...]
    notes: tuple[str, ...]
    setup: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return printable(self.directory.resolve().name)


def read_results(directory: Path) -> Results:
    """The records of ``directory/runs.jsonl``, each with every key of schema 1.

    A last line without its end is of a run that was killed and is left out, with a note. Raises RefusedError where
    there is no such directory, or it holds no records, a line that is none, or a newer schema."""
    check_listable(directory, f"name one that a bench wrote (it holds {RUNS})")
    path = directory / RUNS
    if not exists(path):
        raise RefusedError(
            f"{directory} holds no {RUNS}: `moestream bench MODEL --ram SIZE --out {directory}` makes one"
        )
    lines = read_bytes(path, "name a directory that a bench wrote", MOST_BYTES).split(b"\n")
    notes = []
    if lines.pop().strip():
        notes.append(
            f"the last line of {RUNS} is not whole: the run was killed while writing it, and is left out"
        )
    records = [_record(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise RefusedError(f"{path} holds no whole record: run the bench again with --resume")
    _fill_boxes(records)
    setup = _setup(directory)
    if setup.get("sentinel"):
        # Tokens of later runs show more than was known when a line was written.
        with refusing(str(path)):
            records = judge_all(records)
    return Results(directory, tuple(records), tuple(notes), setup)


def _setup(directory: Path) -> dict[str, Any]:
    """The bench's `setup.json`: in it are the arms' order, their levers, and the command. Records do without it."""
    path, remedy = directory / SETUP, "remove it, the records do without"
    if not exists(path):
        return {}
    found = read_json(path, remedy)
    if not isinstance(found, dict):
        return {}
    arms = found.get("arms")
    whole = isinstance(arms, list) and all(isinstance(arm, dict) and "key" in arm for arm in arms)
    wrong = [name for name in ("sentinel", "command") if not isinstance(found.get(name, ""), str)]
    if whole and wrong:
        raise RefusedError(f"{path}: {', '.join(wrong)} must be text: {remedy}")
    return found if whole else {}


def _record(line: bytes, path: Path, number: int) -> Record:
    where = f"{path}, line {number}"
    try:
        found = parse_record(line)
    except ValueError as error:
        raise RefusedError(f"{where} {error}: remove that line, or run the bench again") from None
    with refusing(where):
        return _completed(found, where, number)


def _completed(found: Record, where: str, number: int) -> Record:
    missing = [name for name in ("arm", "asked", "prompt", "document") if name not in found]
    if missing:
        raise RefusedError(f"{where} is no record of a run: it lacks {', '.join(missing)}")
    record = {**_DEFAULTS, "position": number - 1, **found}
    record["model"] = record["model"] or {}
    record["versions"] = record["versions"] or {}
    record["kind"] = found.get("kind") or (STOCK if found["asked"] == STOCK else "engine")
    if record["document"] is not None:
        _check_document(record["document"], where)
    if "valid" not in found:
        record["invalid"] = _reasons(record)
        record["valid"] = not record["invalid"]
    record["invalid"] = [str(reason) for reason in record.get("invalid") or []]
    if record["document"] is None:
        # Whatever it says: without a document there is nothing to count.
        record["valid"] = False
    return record


def _check_document(document: Any, where: str) -> None:
    """RefusedError unless the figures that everything here is made of are there, and numbers."""
    decode = document.get("decode") if isinstance(document, dict) else None
    steps = decode.get("step_ms") if isinstance(decode, dict) else None
    if not isinstance(decode, dict) or not isinstance(steps, list):
        raise RefusedError(f"{where}: its document has no decode.step_ms, it is not of `run --json`")
    wrong = [name for name in _STEP_FIGURES if not is_number(decode.get(name))]
    wrong += ["step_ms"] if not all(is_number(ms) for ms in steps) else []
    if wrong:
        raise RefusedError(f"{where}: its document's decode has no number for {', '.join(wrong)}")
    mechanism = document.get("mechanism")
    if not isinstance(mechanism, dict) or "effective" not in mechanism:
        raise RefusedError(f"{where}: its document does not say which mechanism ran")


def _reasons(record: Record) -> list[str]:
    """Why a record without a judgement of its own cannot be counted; [] when nothing speaks against it."""
    reasons = []
    document = record["document"]
    if record["returncode"] != 0 or document is None:
        last = str(record["error"]).strip().splitlines()[-1:] or ["without a word"]
        reasons.append(f"failed with code {record['returncode']}: {last[0][-200:]}")
    if record["oom_kills"]:
        reasons.append(f"the kernel killed {record['oom_kills']} process for memory")
    cached, size = record["cached_bytes_before"] or 0, record["model"].get("bytes") or 0
    if record["cap_bytes"] is not None and size and cached > _WARM_SHARE * size:
        reasons.append(f"began with {format_bytes(cached)} of the model in the page cache")
    if document is not None:
        if not document["decode"]["step_ms"]:
            reasons.append("decoded nothing")
        fallbacks = document["mechanism"].get("fallbacks") or []
        if fallbacks and record["asked"] != "default":
            reasons.append(f"not as asked: {'; '.join(map(str, fallbacks))}")
    return reasons


def _fill_boxes(records: list[Record]) -> None:
    """Give each record its ``box``: its own, its document's, or (one that failed) that of a neighbour."""
    for record in records:
        record["box"] = record.get("box") or (record["document"] or {}).get("box")
    for order in (records, records[::-1]):
        last = None
        for record in order:
            if record["box"] is None:
                record["box"] = last
            last = record["box"]
    for record in records:
        record["box"] = record["box"] or {}
