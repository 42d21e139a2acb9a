"""A benchmark's summary for people: markdown whose tables also line up on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moestream.lab.bench_arms import FEWEST_TOKENS
from moestream.lab.bench_ladder import REFERENCES
from moestream.lab.bench_paths import without_paths
from moestream.lab.statistics import WARM_UP_SHARE, WARM_UP_STEPS
from moestream.stats import bound_by
from moestream.units import format_bytes

_UNKNOWN = "-"

_SPEED = (
    "mechanism", "tok/s (95 %)", "x stock (95 %)", "", "x sentinel (95 %)", "", "p50 ms", "p95", "p99", "hits",
    "of floor", "n",
)  # fmt: skip
_WORK = (
    "mechanism", "MB/token: read", "asked", "wasted", "stall ms", "compute", "memory", "bound by", "majflt", "minflt",
    "CPU s/token", "CPU s/GB", "peak MB", "J/token",
)  # fmt: skip

_SPLIT = ("stall_s", "compute_s", "memory_work_s")


def report(summary: Mapping[str, Any]) -> str:
    """The whole report, as ``report.md`` holds it and a terminal shows it."""
    parts = [
        _heading(summary),
        [*_speed(summary), *_best(summary)],
        _work(summary),
        _ladder(summary),
        _doubts(summary, True),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def share(summary: Mapping[str, Any]) -> str:
    """One markdown block to paste into an issue: what was run on what, the table, the doubts, and no path."""
    parts = [
        _heading(summary),
        [*_speed(summary), *_best(summary)],
        _ladder(summary),
        _doubts(summary, False),
    ]
    text = "\n\n".join("\n".join(part) for part in parts if part)
    return without_paths(f"<!-- moestream bench --share -->\n{text}\n")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a markdown table with padded cells: the first column to the left, figures to the right."""
    widths = [
        max(len(header[column]), 2, *(len(row[column]) for row in rows)) for column in range(len(header))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 2) if not n else "-" * (width + 1) + ":" for n, width in enumerate(widths))
    return [line(header), f"|{rule}|", *(line(row) for row in rows)]


def _heading(summary: Mapping[str, Any]) -> list[str]:
    setup, box, ceilings = summary["setup"], summary["box"] or {}, summary["ceilings"]
    compute, disk = ceilings["compute_s"], ceilings["disk_bytes_per_s"]
    noise, drift = summary["noise_floor"], summary["session_drift"]
    known = [
        f"disk {disk / 1e9:.2f} GB/s (random 1 MiB reads, the best of one measurement a run)" if disk else "",
        f"compute {1 / compute:.1f} tok/s ({ceilings['compute_from']})" if compute else "",
    ]
    cap = format_bytes(setup["cap_bytes"])
    lines = [
        f"# {setup['model']['name']} within {cap}",
        "",
        f"Model: {setup['model']['name']}, {format_bytes(setup['model']['bytes'])}, the cap is "
        f"{setup['cap_bytes'] / setup['model']['bytes']:.0%} of it, "
        + ("a memory cgroup around the whole process." if setup["caged"] else "NOT enforced by the kernel."),
        f"Box: {box.get('cpus', '?')} CPUs ({box.get('machine', '?')}), {format_bytes(box.get('ram_bytes', 0))}, "
        f"kernel {box.get('kernel', '?')}, {box.get('fs', '?')}, read-ahead {box.get('read_ahead_kb', '?')} kB.",
        f"Ceilings: {'; '.join(text for text in known if text) or 'not known'}.",
        f"Runs: {summary['valid_runs']} of {summary['runs']} count; {setup['tokens']} greedy tokens of "
        f"{len(setup['prompts'])} prompts, {_count(setup['repeats'], 'round')} whose order turns round, a fresh "
        f"process and a cold start each, {_count(setup['threads'], 'thread')}{_limit(setup)}.",
        f"Left out of rates: the first {WARM_UP_STEPS} steps after the prompt, of a short run the first "
        f"{WARM_UP_SHARE:.0%}.",
        f"Noise floor: {f'{noise:.1%}' if noise is not None else 'not known'} (what `{setup['sentinel']}` differs by "
        "from itself, run twice a block)" + (f"; drift {drift:+.1%}." if drift is not None else "."),
        f"Made by moestream {setup['versions']['moestream']}, commit {(summary['commit'] or 'unknown')[:12]}, "
        f"llama-cpp-python {setup['versions']['llama-cpp-python']}, {(summary['date'] or '?')[:10]}:",
        f"`{setup['command']}`",
    ]
    if summary.get("written_bytes"):
        lines.append(f"{summary['written_bytes'] / 1e9:.2f} GB written to the disk by the runs' processes.")
    free = [
        f"`{arm['key']}`" for arm in setup["arms"] if arm["cap_bytes"] is None and arm["key"] in REFERENCES
    ]
    if free:
        lines.append(
            f"NOT under the cap: {', '.join(free)} had all memory, ratios to them are of unequal terms."
        )
    return [*lines, *(f"Left out: {text}" for text in setup.get("left_out", ()))]


def _speed(summary: Mapping[str, Any]) -> list[str]:
    rows = []
    for arm in summary["arms"]:
        cap = "" if arm["cap_bytes"] is not None else " (no cap)"
        rows.append(
            [
                f"`{_name(arm)}`{cap}",
                _interval(arm["tok_per_s"]),
                *_against(arm.get("against_stock")),
                *_against(arm.get("against_sentinel")),
                *(_number(arm[f"p{q}_ms"], "{:.0f}") for q in (50, 95, 99)),
                _number(arm["hit_rate"], "{:.0%}"),
                _number(arm["floor_share"], "{:.0%}"),
                f"{arm['runs']}" + (f" (-{arm['excluded']})" if arm["excluded"] else ""),
            ]
        )
    return markdown_table(_SPEED, rows) if rows else []


def _best(summary: Mapping[str, Any]) -> list[str]:
    """What to use, in one line."""
    best = next((arm for arm in summary["arms"] if arm["key"] == summary["best"]), None)
    if best is None:
        return []
    what = "the default" if best["key"] == "default" else f"--mechanism {best['key']}"
    why = (
        "nothing was shown to be faster than it"
        if best["key"] == summary["setup"]["sentinel"]
        else f"{best['against_sentinel']['value']:.2f} times `{summary['setup']['sentinel']}`"
    )
    return ["", f"To use under this cap: {what} ({why})."]


def _work(summary: Mapping[str, Any]) -> list[str]:
    rows = []
    for arm in summary["arms"]:
        read = arm["bytes_per_token"]
        rows.append(
            [
                f"`{_name(arm)}`",
                *(_number(read[source], "{:.1f}", 1e-6) for source in ("read", "asked", "wasted")),
                *(_number(arm[name], "{:.1f}", 1e3) for name in _SPLIT),
                _bound(arm),
                _number(arm["majflt"], "{:.1f}"),
                _number(arm["minflt"], "{:.0f}"),
                _number(arm["cpu_s_per_token"], "{:.3f}"),
                _number(arm["cpu_s_per_gb"], "{:.3f}"),
                _number(arm["peak_bytes"], "{:.0f}", 1e-6),
                _number(arm["energy_j_per_token"], "{:.2f}"),
            ]
        )
    return ["A token's work, medians over runs:", "", *markdown_table(_WORK, rows)] if rows else []


def _bound(arm: Mapping[str, Any]) -> str:
    """What most of a token's time went to, where the engine saw it."""
    times = [arm[name] for name in _SPLIT]
    return _UNKNOWN if None in times else bound_by(*times) or _UNKNOWN


def _ladder(summary: Mapping[str, Any]) -> list[str]:
    """One line a rung: what it adds, and what that was worth."""
    if not summary["setup"].get("ladder"):
        return []
    lines = ["One lever at a time:", ""]
    for arm in summary["arms"]:
        against, rate = arm.get("against_previous"), arm["tok_per_s"]
        if arm["cap_bytes"] is None or rate is None:
            continue
        gain = ""
        if against is not None:
            gain = f", x {against['value']:.2f} ({_range(against)}): {against['verdict']}"
        lines.append(f"- {arm['lever'] or 'stock llama.cpp'}: {rate['value']:.2f} tok/s{gain}")
    return lines


def _doubts(summary: Mapping[str, Any], with_next: bool) -> list[str]:
    if not summary["doubts"]:
        return ["No doubts."]
    lines = ["Doubts:", ""]
    for number, doubt in enumerate(summary["doubts"], 1):
        lines.append(f"{number}. **{doubt['kind']}**: {doubt['text']}")
        if with_next:
            lines.append(f"   next: {doubt['next']}")
    return lines


def _name(arm: Mapping[str, Any]) -> str:
    """The default's own name does not say what ran."""
    if arm["key"] == "default" and arm["effective"]:
        return f"default = {arm['effective']}"
    return str(arm["key"])


def _against(found: Mapping[str, Any] | None) -> tuple[str, str]:
    return (_interval(found), found["verdict"]) if found is not None else (_UNKNOWN, "")


def _interval(found: Mapping[str, Any] | None) -> str:
    return _UNKNOWN if found is None else f"{found['value']:.2f} ({_range(found)})"


def _limit(setup: Mapping[str, Any]) -> str:
    """How runs that decode for too long end; '' for a benchmark without such a limit."""
    limit = setup.get("limit_s")
    return (
        f"; a run that decodes for {limit:g} s ends with fewer, but never fewer than {FEWEST_TOKENS}"
        if limit
        else ""
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _range(found: Mapping[str, Any] | None) -> str:
    if found is None or found["low"] is None:
        return _UNKNOWN
    return f"{found['low']:.2f}-{found['high']:.2f}"


def _number(value: float | None, pattern: str, scale: float = 1.0) -> str:
    return _UNKNOWN if value is None else pattern.format(value * scale)
