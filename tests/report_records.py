"""Records of runs made by hand, for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BOX = {
    "cpus": 2,
    "machine": "x86_64",
    "ram_bytes": 8_000_000_000,
    "kernel": "6.1",
    "fs": "ext4",
    "device": "/dev/vda",
    "swap_bytes": 0,
    "read_ahead_kb": 128,
    "huge_pages": "madvise",
}
OTHER_BOX = {**BOX, "cpus": 16, "kernel": "6.9"}
DEFAULT = "arena+uring:8+lfu-decay:16+none+anon"
MODEL = {
    "identity": "0123456789abcdef",
    "bytes": 3_000_000_000,
    "layers": 2,
    "experts": 8,
    "experts_used": 2,
    "demand_bytes_per_token": 100_000_000,
}


def run(
    asked: str = "default",
    ms: float | list[float] = 100.0,
    *,
    cap: int | None = 1_000_000_000,
    prompt: str = "prose",
    arm: str = "",
    steps: int = 4,
    box: dict[str, Any] = BOX,
    **changes: Any,
) -> dict[str, Any]:
    """A record of schema 1 without a judgement. Every step takes ``ms``; an arena hits 3 of 4, reads 25 MB a token, and
    stalls for half of it. ``changes`` replace keys of the record."""
    step_ms = list(ms) if isinstance(ms, list) else [ms] * steps
    tokens, seconds = len(step_ms), sum(step_ms) / 1e3
    effective = DEFAULT if asked == "default" else asked
    streams = effective.startswith("arena")
    decode = {
        "tokens": tokens,
        "seconds": seconds,
        "step_ms": step_ms,
        "hits": 3 * tokens * streams,
        "misses": tokens * streams,
        "bytes_read": 25_000_000 * tokens * streams,
        "read_bytes_os": 25_000_000 * tokens * streams or 80_000_000 * tokens * (asked == "stock"),
        "stall_s": 0.5 * seconds * streams,
        "memory_work_s": 0.1 * seconds * streams,
        "majflt": 400 * tokens * (asked == "stock"),
    }
    document = {
        "model": None if asked == "stock" else MODEL,
        "box": box,
        "mechanism": {"asked": asked, "effective": effective, "fallbacks": []},
        "budget": {"expert_bytes": 700_000_000},
        "decode": decode,
        "cpu_s": {"decode": 0.05 * tokens},
        "memory": {"anon": 500_000_000, "locked": 7},
        "peak_rss_bytes": 900_000_000,
        "tokens": list(range(tokens + 1)),
    }
    record = {
        "date": "2030-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "versions": {"moestream": "9.9"},
        "model": {"name": "m.gguf", "bytes": MODEL["bytes"], "identity": MODEL["identity"]},
        "arm": arm or asked,
        "asked": asked,
        "cap_bytes": cap,
        "caged": cap is not None,
        "prompt": prompt,
        "threads": 2,
        "ctx": 512,
        "batch": 256,
        "tokens": tokens + 1,
        "cached_bytes_before": 0,
        "disk_bytes_per_s": 1e9,
        "returncode": 0,
        "error": "",
        "oom_kills": 0,
        "document": document,
        "schema": 1,
    }
    return {**record, **changes}


def failed(asked: str = "default", **changes: Any) -> dict[str, Any]:
    """A record of a run that ended without a document."""
    return {
        **run(asked),
        "document": None,
        "returncode": 4,
        "error": "trouble\nthe disk went away",
        **changes,
    }


def save(directory: Path, records: Iterable[dict[str, Any]], tail: str = "") -> Path:
    """The records as ``directory/runs.jsonl``, with something behind the last line."""
    directory.mkdir(exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "runs.jsonl").write_text(lines + tail)
    return directory


def outcome(name: str = "app-lru", verdict: str = "agrees", **changes: Any) -> dict[str, Any]:
    """A verdict.json: two arms, a claim that is a ratio and one that nothing was seen for."""

    def value(middle: float) -> dict[str, Any]:
        return {"value": middle, "low": middle * 0.9, "high": middle * 1.1, "n": 4}

    claim = {
        "figure": "tok_per_s",
        "of": "large",
        "over": "small",
        "at_least": 1.5,
        "at_most": None,
        "prompt": None,
    }
    found = {
        "schema": 1,
        "experiment": name,
        "question": "Does a larger cache help?",
        "kind": "runs",
        "source": "a study",
        "found": "it does",
        "quick": True,
        "cap_bytes": 1_000_000_000,
        "verdict": verdict,
        "claims": [
            {**claim, "says": "by half", "found": 2.0, "word": verdict, "seen": value(1.7), "why": "within"},
            {**claim, "of": "huge", "found": None, "says": "more", "word": "cannot tell", "seen": None, "why": "none"},
        ],
        "figures": ["tok_per_s", "bytes_per_token"],
        "table": {
            "small": {"tok_per_s": value(4.0), "bytes_per_token": value(80e6)},
            "large": {"tok_per_s": value(6.8)},
        },
        "left_out": {"huge": "no room"},
        "not_counted": ["small, prose, round 1: swapped"],
        "failed": "",
        "model": {"name": "m.gguf", "bytes": MODEL["bytes"], "identity": MODEL["identity"]},
        "box": BOX,
    }  # fmt: skip
    return {**found, **changes}


def save_lab(directory: Path, outcomes: Iterable[dict[str, Any]]) -> Path:
    """Verdicts as ``lab run`` leaves them, a directory each."""
    for one in outcomes:
        place = directory / one["experiment"]
        place.mkdir(parents=True)
        (place / "verdict.json").write_text(json.dumps(one))
    return directory


def a_bench(prompts: tuple[str, ...] = ("prose", "code", "chat")) -> list[dict[str, Any]]:
    """Stock, the default and everything in memory, each on three prompts of which the later are slower."""
    records = []
    for number, prompt in enumerate(prompts, 1):
        records.append(run("stock", 2000.0 * number, prompt=prompt))
        records.append(run("default", 100.0 * number, prompt=prompt))
        records.append(run("resident+uring:8+none+none+anon", 20.0, cap=None, prompt=prompt))
    return records
