"""What records add up to: one group for each directory, box and model, never across; in it, arms beside ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError
from moestream.files import read_json
from moestream.lab import statistics
from moestream.lab.bench_doubts import Doubt, doubts
from moestream.lab.bench_figures import Figure, cpu_per_token, floor_s, held_bytes, median
from moestream.lab.record_kinds import is_number, refusing
from moestream.reports import figures
from moestream.reports.figures import Estimate, Split, estimate
from moestream.reports.records import RUNS, SETUP, STOCK, BoxName, Record, Results, box_names

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Arm:
    """Runs that differ in prompt and round alone. ``runs`` are valid, ``excluded`` are not and are in no figure.

    ``lever``: in words what a ladder's arm adds to the one before it. ``rate`` in tokens a second, ``ratio`` to stock
    under the same cap, each pair of runs of one prompt and round.
    ``floor_s``: the least a token can take, its compute with everything in memory or its bytes from the disk."""

    name: str
    label: str
    mechanism: str
    default: bool
    cap_bytes: int | None
    experiment: str | None
    lever: str
    runs: tuple[Record, ...]
    excluded: tuple[Record, ...]
    rate: Estimate | None = None
    ratio: Estimate | None = None
    split: Split | None = None
    percentiles: tuple[float | None, float | None, float | None] = (None, None, None)
    floor_s: float | None = None

    @property
    def is_stock(self) -> bool:
        return self.mechanism == STOCK

    def of(self, figure: Figure) -> float | None:
        """The median of a figure over the valid runs."""
        return median(figure(record) for record in self.runs)

    @property
    def peak_bytes(self) -> float | None:
        """The most that any valid run held, as a bench's summary has it: a peak is what must fit."""
        held = [held_bytes(record) for record in self.runs]
        return max((value for value in held if value is not None), default=None)

    @property
    def floor_share(self) -> float | None:
        """The floor over a token's time: 1 is as fast as the bytes it reads allow."""
        return self.floor_s * self.rate.value if self.floor_s is not None and self.rate is not None else None


@dataclass(frozen=True)
class Ceilings:
    """What limits this box, and where each figure is from ('' where there is none). ``compute_cpu_s``: CPU seconds of a
    token with every expert in memory, by the runs."""

    disk_bytes_per_s: float | None = None
    disk_source: str = ""
    compute_s: float | None = None
    compute_source: str = ""
    compute_cpu_s: float | None = None
    demand_bytes: int | None = None

    @property
    def compute_rate(self) -> float | None:
        """Tokens a second with every expert in memory."""
        return 1 / self.compute_s if self.compute_s else None

    @property
    def disk_s(self) -> float | None:
        """Seconds of disk a token when no expert is in memory."""
        if not self.disk_bytes_per_s or not self.demand_bytes:
            return None
        return self.demand_bytes / self.disk_bytes_per_s

    @property
    def even_bytes(self) -> float | None:
        """Bytes a token at which the disk takes as long as computing."""
        if self.compute_s is None or self.disk_bytes_per_s is None:
            return None
        return self.compute_s * self.disk_bytes_per_s


@dataclass(frozen=True)
class Group:
    """The runs of one directory, on one box, with one model. ``setup``: what the bench was asked, {} if not known."""

    name: str
    directory: Path
    box: BoxName
    facts: dict[str, Any]
    model: dict[str, Any]
    arms: tuple[Arm, ...]
    ceilings: Ceilings
    notes: tuple[str, ...] = field(default=())
    setup: dict[str, Any] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()

    @property
    def runs(self) -> list[Record]:
        return [record for arm in self.arms for record in arm.runs]

    @property
    def excluded(self) -> list[Record]:
        return [record for arm in self.arms for record in arm.excluded]

    @property
    def caps(self) -> list[int | None]:
        """The caps in the order of their first arm."""
        return list(dict.fromkeys(arm.cap_bytes for arm in self.arms))

    def under(self, cap: int | None) -> list[Arm]:
        """The arms of a cap that have a valid run."""
        return [arm for arm in self.arms if arm.cap_bytes == cap and arm.runs]


def summarize(results: Sequence[Results], probe: Path | None = None) -> list[Group]:
    """One group for each directory, box and model, named so that no two are called alike. ``probe``: a document of
    ``moestream probe --json`` whose ceilings count where they are of the same box (and, for compute, model); the
    directories' own ``probe*.json`` do too. Raises RefusedError for a file that is none."""
    parts: list[tuple[Results, BoxName, str, list[Record]]] = []
    with refusing(f"{', '.join(str(result.directory) for result in results)}: a box of {RUNS}"):
        names = iter(box_names(record["box"] for result in results for record in result.records))
    for result in results:
        found: dict[tuple[BoxName, str], list[Record]] = {}
        for record in result.records:
            which = next(names), str(record["model"].get("identity") or "")
            found.setdefault(which, []).append(record)
        parts += [(result, box, model, records) for (box, model), records in found.items()]
    groups = []
    for number, (result, box, _, records) in enumerate(parts, 1):
        same_name = [part[0].name for part in parts].count(result.name) > 1
        name = f"{result.name} ({number})" if same_name else result.name
        siblings = sum(part[0] is result for part in parts) - 1
        probes = find_probes(result.directory, probe)
        with refusing(f"{result.directory}, its {RUNS} or {SETUP},"):
            groups.append(_group(name, result, box, records, probes, siblings))
    return groups


def find_probes(directory: Path, probe: Path | None) -> list[dict[str, Any]]:
    """The probes that lie in a directory, and the one that was named."""
    named = [probe] if probe is not None else []
    return [_read_probe(path) for path in (*sorted(directory.glob("probe*.json")), *named)]


def _read_probe(path: Path) -> dict[str, Any]:
    found = read_json(path, "`moestream probe --json FILE` makes a probe")
    if not isinstance(found, dict) or found.get("schema") != 1 or not isinstance(found.get("box"), dict):
        raise RefusedError(f"{path} is no probe of schema 1: `moestream probe --json {path}` makes one")
    rates = [found.get(name) for name in ("disk_bytes_per_s", "compute_s_per_token")]
    if not isinstance(found.get("identity") or {}, dict) or not all(map(_is_rate, rates)):
        raise RefusedError(f"{path} is no probe: an identity or a rate in it is none: probe again")
    return found


def _is_rate(value: Any) -> bool:
    return value is None or is_number(value)


def _group(
    name: str,
    result: Results,
    box: BoxName,
    records: list[Record],
    probes: Sequence[dict[str, Any]],
    siblings: int,
) -> Group:
    model = _model(records)
    arms = _arms(records, result.setup)
    ceilings = _ceilings(records, arms, model, box, probes)
    notes = list(result.notes)
    if siblings:
        notes.append(
            f"{result.name} holds runs of {siblings + 1} boxes or models: they are kept apart, and no figure is of both"
        )
    commits = {record["commit"] for record in records}
    if len(commits) > 1:
        notes.append(f"the runs are of {len(commits)} commits: {', '.join(str(c)[:12] for c in commits)}")
    if any(record["modified"] for record in records):
        notes.append("the code had changes that no commit holds")
    if any(record["cap_bytes"] is not None and not record["caged"] for record in records):
        notes.append("some caps were the engine's own and not enforced by the kernel")
    facts = dict(records[0]["box"])
    return Group(
        name,
        result.directory,
        box,
        facts,
        model,
        _finish(arms, ceilings),
        ceilings,
        tuple(dict.fromkeys(notes)),
        result.setup,
        _doubts(result.setup, records, ceilings),
    )


def _model(records: Sequence[Record]) -> dict[str, Any]:
    """What the records and their documents together say of the model."""
    documents = [record["document"] for record in records if record["document"] is not None]
    described: dict[str, Any] = next((d["model"] for d in documents if isinstance(d.get("model"), dict)), {})
    return {**described, **records[0]["model"]}


def ceilings_of(
    records: Sequence[Record], box: BoxName, probes: Sequence[dict[str, Any]], model: dict[str, Any]
) -> Ceilings:
    """The ceilings that runs on one box of one ``model`` show, or a probe of the same; without runs the probe alone."""
    known = {**model, **_model(records)} if records else model
    return _ceilings(records, _arms(records, {}), known, box, probes)


def _doubts(setup: dict[str, Any], records: Sequence[Record], ceilings: Ceilings) -> tuple[Doubt, ...]:
    """The bench's own doubts about its runs; () for records of anything else."""
    if not setup.get("sentinel"):
        return ()
    sentinel = [record for record in records if record["arm"] == setup["sentinel"] and record["valid"]]
    noise = statistics.noise_floor(sentinel)
    return tuple(doubts(setup, records, noise, has_ceiling=ceilings.compute_s is not None))


def _arms(records: Sequence[Record], setup: dict[str, Any]) -> list[Arm]:
    """The arms in the order they were asked for, where that is known; else of their first run in the first round, stock
    first under each cap."""
    order = sorted(records, key=lambda record: (record["round"], record["position"]))
    found: dict[Key, list[Record]] = {}
    for record in order:
        names = ("experiment", "cap_bytes", "arm", "asked", "threads", "ctx", "batch", "tokens")
        found.setdefault(tuple(record[name] for name in names), []).append(record)
    levers = {str(arm["key"]): str(arm.get("lever") or "") for arm in setup.get("arms", ())}
    arms = []
    for mine in found.values():
        valid = [record for record in mine if record["valid"]]
        shown = (valid or mine)[0]
        mechanism = (shown["document"] or {}).get("mechanism", {}).get("effective") or shown["asked"]
        arms.append(
            Arm(
                name=str(shown["arm"]),
                label="",
                mechanism=str(mechanism),
                default=shown["asked"] == "default",
                cap_bytes=shown["cap_bytes"],
                experiment=shown["experiment"],
                lever=levers.get(str(shown["arm"]), ""),
                runs=tuple(valid),
                excluded=tuple(record for record in mine if not record["valid"]),
            )
        )
    caps = list(dict.fromkeys(arm.cap_bytes for arm in arms))
    asked = list(levers)
    place = {name: number for number, name in enumerate(asked)}
    arms.sort(key=lambda arm: (caps.index(arm.cap_bytes), not arm.is_stock, place.get(arm.name, len(asked))))
    return [replace(arm, label=label) for arm, label in zip(arms, _labels(arms), strict=True)]


def short(mechanism: str) -> str:
    """A mechanism's text without what goes without saying: ``arena+uring:8+lfu-decay:16``."""
    store, *parts = mechanism.split("+")
    common = {"none", "anon"} if store.startswith(("arena", "resident")) else {"none", "mapped"}
    if store.startswith("resident"):
        return store
    return "+".join([store, *(part for part in parts if part not in common)])


def _labels(arms: Sequence[Arm]) -> list[str]:
    """A short label for each arm, no two alike under one cap: what is alike in short gets its arm's name."""
    labels = [short(arm.mechanism) for arm in arms]
    seen = [(arm.cap_bytes, label) for arm, label in zip(arms, labels, strict=True)]
    return [
        label if seen.count((arm.cap_bytes, label)) == 1 else f"{label} [{arm.name}]"
        for arm, label in zip(arms, labels, strict=True)
    ]


def _ceilings(
    records: Sequence[Record],
    arms: Sequence[Arm],
    model: dict[str, Any],
    box: BoxName,
    probes: Sequence[dict[str, Any]],
) -> Ceilings:
    """The best that a probe of this box or the runs themselves have shown."""
    mine = [probe for probe in probes if BoxName.of(probe["box"]).agrees(box)]
    of_model = [p for p in mine if (p.get("identity") or {}).get("model") == model.get("identity")]
    probed = [p["disk_bytes_per_s"] for p in mine if p.get("disk_bytes_per_s")]
    measured = [record["disk_bytes_per_s"] for record in records if record["disk_bytes_per_s"]]
    disk = max(probed + measured, default=None)
    compute = [p["compute_s_per_token"] for p in of_model if p.get("compute_s_per_token")]
    rated = [arm for arm in arms if any(statistics.rate(record) for record in arm.runs)]
    held = [arm for arm in rated if arm.mechanism.startswith("resident")]
    held = held or [arm for arm in rated if arm.is_stock and arm.cap_bytes is None]
    middles = [median(map(statistics.rate, arm.runs)) for arm in held]
    own = [1 / middle for middle in middles if middle]
    compute_s = min(compute + own, default=None)
    return Ceilings(
        disk_bytes_per_s=disk,
        disk_source=""
        if disk is None
        else "probe"
        if disk in probed
        else "the best of one measurement a run",
        compute_s=compute_s,
        compute_source=""
        if compute_s is None
        else "probe"
        if compute_s in compute
        else f"{held[0].label}, everything in memory",
        compute_cpu_s=median(arm.of(cpu_per_token) for arm in held),
        demand_bytes=model.get("demand_bytes_per_token"),
    )


def _finish(arms: Sequence[Arm], ceilings: Ceilings) -> tuple[Arm, ...]:
    """Each arm with its figures, its ratio to stock and its floor."""
    finished = []
    for arm in arms:
        stock = next((other for other in arms if other.is_stock and other.cap_bytes == arm.cap_bytes), None)
        floor = arm.of(partial(_floor_s, ceilings=ceilings))
        ratio = estimate(paired(arm.runs, stock.runs)) if stock is not None and not arm.is_stock else None
        finished.append(
            replace(
                arm,
                rate=estimate(figures.rate(record) for record in arm.runs),
                ratio=ratio,
                split=figures.split(arm.runs),
                percentiles=figures.step_percentiles(arm.runs),
                floor_s=floor,
            )
        )
    return tuple(finished)


def _floor_s(record: Record, ceilings: Ceilings) -> float | None:
    if ceilings.compute_s is None or not ceilings.disk_bytes_per_s:
        return None
    return floor_s(record, ceilings.compute_s, ceilings.disk_bytes_per_s)


def paired(runs: Sequence[Record], others: Sequence[Record]) -> list[float]:
    """Rates over rates, one a prompt and round that both ran, over the steps that both made."""
    return statistics.ratios(runs, others)
