"""A probe's document in ten lines for people, and its tables. Text only; it decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moestream.units import format_bytes

_SOURCES = {
    "process": "/proc/self/io",
    "cgroup": "the cgroup's block counter",
    "device": "the block device's",
}


def lines(document: dict[str, Any]) -> Iterator[str]:
    """Ten lines, in the order of what limits what, then a line a doubt."""
    measured = document["disk"]
    yield _box(document)
    yield _row("sequential", _sequential(measured))
    yield _row("random", _random(measured))
    yield _row("page cache", _page_cache(measured))
    yield _row("mapping", _mapping(measured))
    yield _row("device", _device(measured))
    yield _row("counters", _counters(document["counters"]))
    yield _row("memory", _memory(document["memory"]))
    yield _row("compute", _compute(document["compute"]))
    yield _row("a token", _token(document))
    for doubt in document["doubts"]:
        yield f"doubt: {doubt}"


def _row(name: str, text: str) -> str:
    return f"{name:<12}{text or 'not measured'}"


def _box(document: dict[str, Any]) -> str:
    box, model = document["box"], document["model"]
    subject = f"{model['name']}, {format_bytes(model['bytes'])}" if model is not None else "a file of its own"
    place = f"{box['device'] or 'an unnamed device'} ({box['fs'] or 'unknown file system'})"
    return (
        f"{subject} on {place}; {box['cpus']} CPUs, {format_bytes(box['ram_bytes'])}, kernel {box['kernel']}"
    )


def _per_s(group: dict[str, Any], setting: str) -> str | None:
    found = group.get(setting)
    return f"{format_bytes(found['bytes_per_s']['median'])}/s" if found else None


def _joined(named: list[tuple[str, str | None]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in named if value is not None)


def _sequential(measured: dict[str, Any]) -> str:
    group = measured.get("sequential", {})
    text = _joined([(place, _per_s(group, place)) for place in ("start", "middle", "end")])
    how = "O_DIRECT" if measured["direct"] else "through the page cache, O_DIRECT is refused"
    return f"{text} of the file, {how}" if text else ""


def _random(measured: dict[str, Any]) -> str:
    parts = []
    for reader in ("uring", "threads"):
        knee = measured["knee"][reader]
        if knee is not None:
            first = _per_s(measured["random"], f"{reader}:1")
            parts.append(
                f"{reader}:{knee['at']} is enough at {format_bytes(knee['bytes_per_s'])}/s (best "
                f"{format_bytes(knee['best_bytes_per_s'])}/s{f', one at a time {first}' if first else ''})"
            )
    return f"{_slabs(measured)}: " + "; ".join(parts) if parts else ""


def _slabs(measured: dict[str, Any]) -> str:
    sizes = [format_bytes(int(size)) for size in measured.get("sizes", {})]
    if not sizes:
        return f"{measured['what']} of {format_bytes(measured['range_bytes'])}"
    return f"{measured['what']} of {', '.join(sizes[:-1])} and {sizes[-1]}"


def _page_cache(measured: dict[str, Any]) -> str:
    warm = measured["grid"]["warm"]
    if not warm:
        return ""
    cells = [(rate, threads, split) for threads, row in warm.items() for split, rate in row.items()]
    best = max(cells)
    cold = _per_s(measured.get("buffered", {}), "threads:1")
    text = f"warm {_per_s(measured['warm'], 'threads:1') or '?'} by one thread, best {format_bytes(best[0])}/s by "
    text += f"{_threads(int(best[1]))}" + (f", {best[2]} pieces a slab" if best[2] != "1" else "")
    order = _per_s(measured.get("sequential_warm", {}), "start")
    text += f", in file order {order}" if order else ""
    return text + (f"; cold through it {cold}" if cold else "")


def _mapping(measured: dict[str, Any]) -> str:
    advice = measured.get("advice", {})
    text = _joined(
        [
            ("copied out warm", _per_s(measured.get("mapped_warm", {}), "memcpy:1")),
            ("cold", _per_s(measured.get("mapped_cold", {}), "memcpy:1")),
        ]
    )
    faults = advice.get("normal", {}).get("amplification")
    if faults is not None:
        text += f"; faults read {faults:.1f} bytes for each one touched"
    if advice:
        best = max(advice, key=lambda name: advice[name]["bytes_per_s"]["median"])
        text += f"; touched cold {_per_s(advice, 'normal') or '?'}, best with {best} {_per_s(advice, best)}"
    return text


def _device(measured: dict[str, Any]) -> str:
    at = measured["knee"]["uring"] or measured["knee"]["threads"]
    reader = "uring" if measured["knee"]["uring"] else "threads"
    found = measured["random"].get(f"{reader}:{at['at']}", {}) if at else {}
    parts = []
    if found.get("device_ops_per_read") is not None:
        parts.append(
            f"{found['device_ops_per_read']:.1f} operations a read of {format_bytes(found['device_op_bytes'])} each"
        )
    for layout in measured["layout"] or []:
        parts.append(f"the file lies in {layout['runs']} runs of {format_bytes(layout['run_bytes'])}")
    if measured["read_ahead_kb"] is not None:
        parts.append(f"read-ahead {measured['read_ahead_kb']} KiB")
    return ", ".join(parts)


def _counters(found: dict[str, Any]) -> str:
    follows = [_SOURCES[name] for name in found["follows"]]
    others = [text for name, text in _SOURCES.items() if name not in found["follows"]]
    if not follows:
        return f"none follows what is read ({', '.join(others)} do not): bytes are the reads' own account"
    return f"{' and '.join(follows)} follow{'s' if len(follows) == 1 else ''} what is read" + (
        f"; {', '.join(others)} {'does' if len(others) == 1 else 'do'} not" if others else ""
    )


def _memory(memory: dict[str, Any]) -> str:
    cgroup = f"cgroup v{memory['cgroup']}" if memory["cgroup"] else "no cgroup"
    swap = (
        ", ".join(f"{format_bytes(entry['bytes'])} of {entry['kind']}" for entry in memory["swaps"]) or "none"
    )
    lock = "without limit" if memory["lock_bytes"] is None else format_bytes(memory["lock_bytes"])
    copies = memory["copy_bytes_per_s"]
    most = max(copies, key=int)
    return (
        f"limit {format_bytes(memory['limit_bytes'])} ({memory['limit_source']}, {cgroup}), "
        f"{format_bytes(memory['available_bytes'])} available, swap {swap}, lock {lock}, huge pages "
        f"{memory['huge_pages']}; copies {format_bytes(copies[most]['median'])}/s by {most}"
    )


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _compute(found: dict[str, Any]) -> str:
    best = found["best"]
    if best is None:
        return f"not measured: {found['reason']}"
    time = best["s_per_token"]
    text = f"{time * 1e3:.1f} ms a token with {_threads(best['threads'])} ({1 / time:.1f} tok/s)"
    if best["prefill_tok_per_s"] is not None:
        text += f", prompts {best['prefill_tok_per_s']:.0f} tok/s"
    others = [
        f"{count}: {row['s_per_token']['median'] * 1e3:.1f} ms"
        for count, row in found["by_threads"].items()
        if int(count) != best["threads"]
    ]
    text += f" (threads {', '.join(others)})" if others else ""
    return text + f"; all experts in memory, {found['model']}"


def _token(document: dict[str, Any]) -> str:
    model, rate = document["model"], document["disk_bytes_per_s"]
    if model is None:
        return "nothing can be said without a model: --model MODEL"
    if not rate or not model["demand_bytes_per_token"]:
        return ""
    demand = model["demand_bytes_per_token"]
    text = f"asks for {format_bytes(demand)} of experts: {demand / rate * 1e3:.0f} ms of disk if none is in memory"
    compute = document["compute_s_per_token"]
    if compute:
        share = 1 - compute * rate / demand
        text += (
            f"; disk and processor are even at {share:.0%} found in memory"
            if share > 0
            else "; the processor limits"
        )
    return text
