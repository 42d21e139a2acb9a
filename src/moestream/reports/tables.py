"""The report's tables as plain values: every output (text, markdown, HTML) shows the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moestream.lab import bench_figures, statistics
from moestream.reports import figures
from moestream.reports.figures import Estimate
from moestream.reports.records import Record
from moestream.reports.summary import Arm, Ceilings, Group, paired
from moestream.units import format_bytes

UNKNOWN = "-"


@dataclass(frozen=True)
class Table:
    """``rows`` of as many cells as ``columns``; the first ``heads`` columns name a row, all others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heads: int = 2
    notes: tuple[str, ...] = ()


def cap_text(cap_bytes: int | None) -> str:
    return "no cap" if cap_bytes is None else format_bytes(cap_bytes)


def number(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else f"{value * scale:.{digits}f}"


def megabytes(value: float | None) -> str:
    """Bytes as MB: small figures with a digit more."""
    return number(value, 0 if value is None or value >= 100e6 else 1, 1e-6)


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def with_interval(found: Estimate | None, digits: int = 2) -> str:
    """``8.82 (7.02 … 12.32)``; the value alone where one run made it."""
    if found is None:
        return UNKNOWN
    if found.low is None or found.high is None:
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} ({found.low:.{digits}f} … {found.high:.{digits}f})"


def name_of(arm: Arm) -> str:
    return arm.label + (" (default)" if arm.default else "")


def _ran(group: Group) -> list[Arm]:
    return [arm for arm in group.arms if arm.runs]


def speed_table(group: Group) -> Table:
    """How fast each arm was, and how much of what its bytes and this box allow."""
    rows = [
        (
            cap_text(arm.cap_bytes),
            name_of(arm),
            with_interval(arm.rate),
            with_interval(arm.ratio),
            *(number(value, 0, 1e3) for value in arm.percentiles),
            number(1 / arm.floor_s if arm.floor_s else None, 1),
            share(arm.floor_share),
            str(len(arm.runs)),
        )
        for arm in _ran(group)
    ]
    columns = (
        "cap",
        "mechanism",
        "tok/s",
        "x stock",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "floor tok/s",
        "of floor",
        "n",
    )
    notes = [
        "tok/s and x stock: geometric mean of n runs and its 95 % bootstrap interval, without warm-up steps; x stock "
        "pairs runs of the same prompt and cap. p50, p95, p99: of the same tokens. floor: max(compute with all in "
        "memory, the bytes it read at the disk's best rate); above 100 % the disk was faster than when it was measured."
    ]
    return Table("Speed in figures", columns, tuple(rows), notes=tuple(notes + _lengths(group)))


def _lengths(group: Group) -> list[str]:
    """Arms that generated another number of tokens than most."""
    steps = [(arm, [run["document"]["decode"]["tokens"] for run in arm.runs]) for arm in _ran(group)]
    longest = max((max(counts) for _, counts in steps), default=0)
    fewer = [
        f"{arm.label} under {cap_text(arm.cap_bytes)} "
        + (f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{min(counts)}")
        for arm, counts in steps
        if min(counts) < longest
    ]
    return [f"{longest} tokens decoded a run; fewer by {', '.join(fewer)}."] if fewer else []


def work_table(group: Group) -> Table:
    """What each arm read for a token, and what it waited for."""
    rows = []
    for arm in _ran(group):
        split = arm.split
        rows.append(
            (
                cap_text(arm.cap_bytes),
                name_of(arm),
                share(arm.of(bench_figures.hit_rate)),
                megabytes(arm.of(bench_figures.bytes_per_token)),
                megabytes(arm.of(bench_figures.asked_per_token)),
                megabytes(arm.of(bench_figures.wasted_per_token)),
                number(split.stall_s if split else None, 1, 1e3),
                number(split.compute_s if split else None, 1, 1e3),
                number(split.memory_work_s if split else None, 1, 1e3),
            )
        )
    columns = (
        "cap", "mechanism", "hits", "MB read", "MB asked", "MB wasted", "stall ms", "compute ms", "memory work ms",
    )  # fmt: skip
    notes = (
        "A decoded token's share of each. hits: routed experts that were in memory. read: from the device, by the "
        "kernel's account where that moves. asked: by the engine, whether cached or not; wasted: of that, read early "
        "and for nothing. Where no route is seen, waiting for page faults is in compute.",
    )
    return Table("What a token reads and waits for", columns, tuple(rows), notes=notes)


def cost_table(group: Group) -> Table:
    """What each arm spent of the machine."""
    rows = [
        (
            cap_text(arm.cap_bytes),
            name_of(arm),
            number(arm.of(bench_figures.per_token("majflt")), 0),
            number(arm.of(bench_figures.per_token("minflt")), 0),
            number(arm.of(bench_figures.cpu_per_token), 0, 1e3),
            number(cpu_s_per_gb(arm, group.ceilings), 2),
            number(arm.of(bench_figures.energy_per_token), 2),
            number(arm.peak_bytes, 0, 1e-6),
        )
        for arm in _ran(group)
    ]
    columns = ("cap", "mechanism", "major faults", "minor faults", "CPU ms", "CPU s/GB", "joules", "peak MB")
    notes = (
        "Faults and CPU: a decoded token's share. CPU s/GB: beyond a token's with everything in memory, a GB read. "
        "joules: of the processor packages over the whole run, a token made; none where the box does not tell. peak: "
        "the most memory that the kernel could not take back, of all runs.",
    )
    return Table("What a token costs", columns, tuple(rows), notes=notes)


def cpu_s_per_gb(arm: Arm, ceilings: Ceilings) -> float | None:
    """CPU seconds beyond those of a token with everything in memory, a GB read; None where nothing is capped."""
    compute = ceilings.compute_cpu_s
    if compute is None or arm.cap_bytes is None:
        return None
    return arm.of(lambda record: bench_figures.cpu_beyond_compute_per_gb(record, compute))


def excluded_table(group: Group) -> Table | None:
    """The runs that are in no figure, and why; None when all are."""
    rows: list[tuple[str, ...]] = []
    for arm in group.arms:
        for record in arm.excluded:
            why = "; ".join(record["invalid"]) or "it wrote no document"
            rows.append((cap_text(arm.cap_bytes), name_of(arm), _run_name(record), why))
    if not rows:
        return None
    return Table("Runs in no figure", ("cap", "mechanism", "run", "why"), tuple(rows), heads=4)


def _run_name(record: Record) -> str:
    return f"{record['prompt']}, round {int(record['round']) + 1}"


def doubt_lines(group: Group) -> list[str]:
    """Why the figures may not mean what they seem to, each with what to type."""
    return [f"{doubt.kind.value}: {doubt.text}; next: {doubt.next}" for doubt in group.doubts]


def box_table(group: Group) -> Table:
    """What the box is, what was measured with, and the ceilings."""
    facts, ceilings, model = group.facts, group.ceilings, group.model
    first = group.arms[0].runs[0] if group.arms[0].runs else group.arms[0].excluded[0]
    disk = ceilings.disk_bytes_per_s
    rows = [
        ("box", str(group.box)),
        ("memory", _memory(facts)),
        ("model", _model(model)),
        ("disk ceiling", f"{format_bytes(disk)}/s ({ceilings.disk_source})" if disk else "not measured"),
        ("compute ceiling", _compute(group)),
        ("a token asks for", _demand(group)),
        ("settings", f"{first['threads']} threads, context {first['ctx']}, batch {first['batch']}"),
        ("code", _code(first)),
        ("measured", _dates(group)),
        ("cap", _cap(group)),
    ]  # fmt: skip
    return Table("What was measured, on what", ("", ""), tuple(rows))


def _code(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"commit {str(record['commit'] or 'unknown')[:12]}{', changed' if record['modified'] else ''}; {versions}"


def _memory(facts: dict[str, object]) -> str:
    swap, ahead = facts.get("swap_bytes"), facts.get("read_ahead_kb")
    text = f"huge pages {facts.get('huge_pages', 'unknown')}, "
    text += f"swap {format_bytes(swap)}" if isinstance(swap, int) and swap else "no swap"
    return text + (f", read-ahead {ahead} KiB" if ahead is not None else "")


def _model(model: dict[str, object]) -> str:
    size, experts = model.get("bytes"), model.get("experts")
    text = f"{model.get('name') or 'unknown'}"
    text += f", {format_bytes(size)}" if isinstance(size, int) else ""
    if experts is not None:
        text += f", {model.get('layers')} layers of {experts} experts, {model.get('experts_used')} used"
    return text + (f" ({model['identity']})" if model.get("identity") else "")


def _compute(group: Group) -> str:
    rate, source = group.ceilings.compute_rate, group.ceilings.compute_source
    return f"{rate:.1f} tok/s, {1e3 / rate:.1f} ms a token ({source})" if rate else "not measured"


def _demand(group: Group) -> str:
    ceilings = group.ceilings
    if ceilings.demand_bytes is None:
        return "unknown"
    text = f"{format_bytes(ceilings.demand_bytes)} of experts"
    return text + (
        f": {ceilings.disk_s * 1e3:.0f} ms of disk where none is in memory" if ceilings.disk_s else ""
    )


def _dates(group: Group) -> str:
    runs = group.runs or group.excluded
    dates = sorted(str(record["date"])[:16].replace("T", " ") for record in runs if record["date"])
    if not dates:
        return "unknown"
    return f"{dates[0]} to {dates[-1]} UTC, {len(group.runs) or 'no'} valid runs"


def _cap(group: Group) -> str:
    capped = [record for record in group.runs or group.excluded if record["cap_bytes"] is not None]
    if not capped:
        return "none"
    if all(record["caged"] for record in capped):
        return "a memory cgroup around the whole process"
    return "the engine's own for some runs: NOT enforced by the kernel"


def comparison(groups: Sequence[Group]) -> Table | None:
    """The arms that several groups have, a column each; None of one group or none in common. Only groups of one box and
    model get a ratio: a ratio over boxes would be of two things at once."""
    if len(groups) < 2:
        return None
    keys: dict[tuple[int | None, str], list[Arm | None]] = {}
    for at, group in enumerate(groups):
        for arm in _ran(group):
            keys.setdefault((arm.cap_bytes, arm.label), [None] * len(groups))[at] = arm
    shared = {key: arms for key, arms in keys.items() if sum(arm is not None for arm in arms) > 1}
    if not shared:
        return None
    same = len({(group.box, group.model.get("identity")) for group in groups}) == 1
    rows = []
    for (cap, label), arms in shared.items():
        row = [cap_text(cap), label, *(with_interval(arm.rate if arm else None) for arm in arms)]
        if same:
            row.append(_ratio(arms))
        rows.append(tuple(row))
    columns = ("cap", "mechanism", *(f"{group.name}, tok/s" for group in groups))
    if same:
        notes = ("last over first: the mean of runs of the same prompt and round, with its 95 % interval.",)
        return Table("Side by side", (*columns, "last / first"), tuple(rows), notes=notes)
    what = "boxes" if len({group.box for group in groups}) > 1 else "models"
    notes = (f"These are of different {what}: side by side, never averaged, and no ratio is formed.",)
    return Table("Side by side", columns, tuple(rows), notes=notes)


def _ratio(arms: Sequence[Arm | None]) -> str:
    first, last = arms[0], arms[-1]
    if first is None or last is None:
        return UNKNOWN
    return with_interval(figures.estimate(paired(last.runs, first.runs)))


def headline(group: Group) -> list[str]:
    """The answer in a sentence for each cap: the fastest, how sure that is, what limits it."""
    lines = []
    for cap in group.caps:
        arms = [arm for arm in group.under(cap) if arm.rate is not None]
        if not arms:
            continue
        best = max(arms, key=lambda arm: arm.rate.value if arm.rate else 0.0)
        text = f"{cap_text(cap)}: {name_of(best)}, {with_interval(best.rate, 1)} tok/s"
        if best.ratio is not None and not best.is_stock:
            text += f", {with_interval(best.ratio, 1)} times stock llama.cpp"
        if best.floor_share is not None:
            text += f", {min(best.floor_share, 1):.0%} of what its bytes and this box allow"
        even = [name_of(arm) for arm in arms if arm is not best and not _shown_faster(best, arm)]
        if even:
            text += f"; no difference shown to {' or '.join(even)}"
        elif len(arms) > 1:
            text += f"; faster than the other {len(arms) - 1}" if len(arms) > 2 else "; faster than the other"
        lines.append(text + ".")
    return lines


def _shown_faster(best: Arm, other: Arm) -> bool:
    """Whether all of the interval of the ratio, run for run of one prompt and round, lies outside the noise: what two
    equal arms differ by, where one of these ran twice a round, and never less than clocks and address spaces make."""
    ratio = figures.estimate(paired(best.runs, other.runs))
    floors = [statistics.noise_floor(arm.runs) for arm in (best, other)]
    noise = max([statistics.LEAST_NOISE, *(floor for floor in floors if floor is not None)])
    return ratio is not None and ratio.low is not None and ratio.low > 1 + noise
