"""The benchmark's answer: a table with each number beside its ceiling, and every requirement met or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moestream.lab import bench_figures as figures
from moestream.lab.bench_arms import Arm
from moestream.lab.bench_figures import Figure, Record, median
from moestream.lab.validity import judge_all

STOCK_RATIO = 15.0
WILLNEED_RATIO = 1.4
LARGE_SHARE = 1 / 3
UNCAPPED_SHARE = 0.97
LOAD_SHARE = 1.05
MEMORY_WORK_S_PER_GB = 0.10
CPU_S_PER_TOKEN = 0.15
OWN_BYTES = 130e6

_UNKNOWN = "-"

_HEADER = (
    "cap", "mechanism", "tok/s", "x stock", "hits", "MB/token", "stall ms", "compute ms", "memory ms",
    "CPU s/token", "memory work s/GB", "CPU beyond compute s/GB", "peak MB", "cgroup peak MB", "load MB",
    "floor ms", "of floor", "n",
)  # fmt: skip


class Results:
    """The records of one benchmark that have a document, and what is taken from several of them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = [record for record in records if record["document"] is not None]
        rates = [record["disk_bytes_per_s"] for record in self.records if record["disk_bytes_per_s"]]
        #: The best of the disk's measured rates: a ceiling, which a drifting disk only rarely reaches.
        self.disk = max(rates, default=None)
        #: With everything in memory, a token's seconds and its CPU seconds.
        self.compute_s = self.of("resident-free", _seconds_per_token)
        self.compute_cpu_s = self.of("resident-free", figures.cpu_per_token)

    def arm(self, key: str) -> list[Record]:
        return [record for record in self.records if record["arm"] == key]

    def of(self, key: str, figure: Figure) -> float | None:
        """The median over the prompts of one arm's figure."""
        return median(figure(record) for record in self.arm(key))

    def ratio(self, key: str, other: str, same_steps: bool = False) -> float | None:
        """The median over the prompts of one arm's rate over another's; over equally many tokens if asked."""
        ratios = []
        for record in self.arm(key):
            for against in self.arm(other):
                if against["prompt"] == record["prompt"]:
                    steps = figures.decode(against)["tokens"] if same_steps else None
                    ours, theirs = figures.rate(record, steps), figures.rate(against)
                    ratios.append(ours / theirs if ours and theirs else None)
        return median(ratios)

    def floor_s(self, record: Record) -> float | None:
        if self.compute_s is None or self.disk is None:
            return None
        return figures.floor_s(record, self.compute_s, self.disk)

    def floor_share(self, record: Record) -> float | None:
        floor, seconds = self.floor_s(record), _seconds_per_token(record)
        return floor / seconds if floor is not None and seconds else None

    def cpu_beyond(self, record: Record) -> float | None:
        if self.compute_cpu_s is None or not figures.decode(record)["bytes_read"]:
            return None
        return figures.cpu_beyond_compute_per_gb(record, self.compute_cpu_s)


@dataclass(frozen=True)
class Verdict:
    """One requirement: what it asks, what was measured, and whether that meets it (None: not measured)."""

    text: str
    measured: str
    met: bool | None


def report(arms: Sequence[Arm], records: Sequence[Record]) -> tuple[str, bool]:
    """The report as markdown, and whether every run in it is valid."""
    judged = judge_all(records)
    results = Results([record for record in judged if record["valid"]])
    doubts = [
        f"{record['arm']} on {record['prompt']}: {reason}"
        for record in judged
        for reason in record["invalid"]
    ]
    lines = [*_heading(results), "", *table(arms, results), ""]
    for verdict in verdicts(results):
        mark = {True: "met", False: "NOT MET", None: "not measured"}[verdict.met]
        lines.append(f"- {mark}: {verdict.text}: {verdict.measured}")
    lines.append("")
    if doubts:
        lines += ["**INVALID**, do not quote:", "", *(f"- {doubt}" for doubt in doubts)]
    elif results.records:
        lines.append("Tokens are identical in all arms for their common length; every capped run began cold.")
    return "\n".join(lines) + "\n", not doubts and bool(results.records)


def _heading(results: Results) -> list[str]:
    if not results.records:
        return ["no run has a result"]
    first = results.records[0]
    box, model = first["document"]["box"], first["model"]
    prompts = ", ".join(dict.fromkeys(record["prompt"] for record in results.records))
    stock = {figures.decode(record)["tokens"] for record in results.arm("stock-small")}
    free = not all(record["caged"] for record in results.records if record["cap_bytes"] is not None)
    disk = f"{results.disk / 1e9:.2f} GB/s" if results.disk else "of an unknown rate"
    tokens = max(record["tokens"] for record in results.records)
    return [
        f"{model['name']}, {model['bytes'] / 1e9:.2f} GB; {tokens} greedy tokens of each prompt ({prompts})"
        + (f", of capped stock llama.cpp the first {max(stock) + 1}" if stock else "")
        + f"; medians over prompts. {first['threads']} threads, context {first['ctx']}.",
        f"Box: {box['cpus']} CPUs, {box['ram_bytes'] / 1e9:.1f} GB, kernel {box['kernel']}, {box['fs']}; disk {disk} "
        f"(random 1 MiB reads, the best of one measurement a run). Commit {(first['commit'] or 'unknown')[:12]}"
        f"{' with changes' if first['modified'] else ''}, llama-cpp-python {first['versions']['llama-cpp-python']}, "
        f"{first['date'][:10]}.",
        "The cap was NOT enforced by the kernel."
        if free
        else "A cap is a memory cgroup around the whole process.",
    ]


def table(arms: Sequence[Arm], results: Results) -> list[str]:
    """The markdown table's lines, an arm each; arms that did not run are left out."""
    lines = [f"| {' | '.join(_HEADER)} |", "|" + "---|" * len(_HEADER)]
    for arm in arms:
        if results.arm(arm.key):
            lines.append(f"| {' | '.join(_cells(arm, results))} |")
    return lines


def _cells(arm: Arm, results: Results) -> list[str]:
    def of(figure: Figure, pattern: str, scale: float = 1.0) -> str:
        value = results.of(arm.key, figure)
        return _UNKNOWN if value is None else pattern.format(value * scale)

    records = results.arm(arm.key)
    stock = "stock-free" if arm.cap_bytes is None else "stock-small"
    comparable = [other["cap_bytes"] for other in results.arm(stock)][:1] == [arm.cap_bytes]
    ratio = results.ratio(arm.key, stock) if comparable else None
    return [
        f"{arm.cap_bytes / 1e9:.2f} GB" if arm.cap_bytes is not None else "none",
        f"`{records[0]['document']['mechanism']['effective']}`" + ("" if arm.mechanism else " (default)"),
        of(figures.rate, "{:.2f}"),
        _UNKNOWN if ratio is None else f"{ratio:.2f}",
        of(figures.hit_rate, "{:.0%}"),
        of(figures.bytes_per_token, "{:.0f}", 1e-6),
        of(figures.split_per_token("stall_s"), "{:.1f}", 1e3),
        of(figures.split_per_token("compute_s"), "{:.1f}", 1e3),
        of(figures.split_per_token("memory_work_s"), "{:.1f}", 1e3),
        of(figures.cpu_per_token, "{:.3f}"),
        of(figures.memory_work_per_gb, "{:.3f}"),
        of(results.cpu_beyond, "{:.3f}"),
        of(figures.held_bytes, "{:.0f}", 1e-6),
        of(lambda record: record["cage_peak_bytes"], "{:.0f}", 1e-6),
        of(lambda record: record["document"]["load"]["read_bytes_os"], "{:.0f}", 1e-6),
        of(results.floor_s, "{:.0f}", 1e3),
        of(results.floor_share, "{:.0%}"),
        str(len(records)),
    ]


def verdicts(results: Results) -> list[Verdict]:
    """Each requirement on speed and memory with its figure."""
    capped = [record for record in results.records if record["asked"] in ("default", "arena+gate:1")]
    capped = [record for record in capped if record["cap_bytes"] is not None]
    return [
        _stock(results),
        _at_least(
            "small cap, the default over mapped+willneed with dense mlock",
            results.ratio("arena-small", "willneed-small"),
            WILLNEED_RATIO,
        ),
        _at_least(
            "large cap, share of the rate with everything in memory",
            results.ratio("arena-large", "resident-free"),
            LARGE_SHARE,
        ),
        _at_least(
            "no cap, the default over stock", results.ratio("resident-free", "stock-free"), UNCAPPED_SHARE
        ),
        _at_most(
            "bytes read by the load, over dense and boundary bytes",
            _worst(capped, figures.load_share),
            LOAD_SHARE,
        ),
        _cap(capped),
        _at_most(
            "small cap, seconds of memory work and submission a GB read",
            results.of("arena-small", figures.memory_work_per_gb),
            MEMORY_WORK_S_PER_GB,
        ),
        _at_most(
            "small cap, CPU seconds a token",
            results.of("arena-small", figures.cpu_per_token),
            CPU_S_PER_TOKEN,
        ),
        _at_most(
            "MB of a cap beyond weights, experts, KV cache and llama.cpp's buffers, margin included",
            _worst(capped, figures.own_bytes),
            OWN_BYTES,
            1e-6,
        ),
    ]


def _stock(results: Results) -> Verdict:
    verdict = _at_least(
        "small cap, the default over stock", results.ratio("arena-small", "stock-small"), STOCK_RATIO
    )
    same = results.ratio("arena-small", "stock-small", same_steps=True)
    if same is None:
        return verdict
    return Verdict(verdict.text, f"{verdict.measured}; {same:.2f} over stock's own few tokens", verdict.met)


def _cap(capped: Sequence[Record]) -> Verdict:
    """Peak memory against the cap, of every capped run of the engine."""
    text = "peak resident memory under the cap, no OOM kill"
    known = [(held, record) for record in capped if (held := figures.held_bytes(record)) is not None]
    if not known:
        return Verdict(text, _UNKNOWN, None)
    peak, worst = max(known, key=lambda one: one[0] / one[1]["cap_bytes"])
    kills = sum(record["oom_kills"] or 0 for record in capped)
    smallest = min(record["cap_bytes"] for record in capped)
    measured = (
        f"at most {peak / worst['cap_bytes']:.0%} ({peak / 1e6:.0f} of {worst['cap_bytes'] / 1e6:.0f} MB), "
        f"{kills} kills, smallest cap {smallest / 1e6:.0f} MB"
    )
    return Verdict(text, measured, peak <= worst["cap_bytes"] and kills == 0)


def _at_least(text: str, value: float | None, limit: float) -> Verdict:
    measured = _UNKNOWN if value is None else f"{value:.2f} (at least {limit:.2f})"
    return Verdict(text, measured, None if value is None else value >= limit)


def _at_most(text: str, value: float | None, limit: float, scale: float = 1.0) -> Verdict:
    measured = _UNKNOWN if value is None else f"{value * scale:.3g} (at most {limit * scale:.3g})"
    return Verdict(text, measured, None if value is None else value <= limit)


def _worst(records: Sequence[Record], figure: Figure) -> float | None:
    return max((value for record in records if (value := figure(record)) is not None), default=None)


def _seconds_per_token(record: Record) -> float | None:
    rate = figures.rate(record)
    return 1 / rate if rate else None
