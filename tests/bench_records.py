"""What the tests of the bench share: an executor that runs nothing, on a clock of its own, and records made by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moestream.lab.bench_arms import STOCK, Arm
from moestream.lab.runs import Setup
from moestream.mechanism import Mechanism
from moestream.model import Model

CAP = 1 << 30
PROMPTS = {"one": "First text.", "two": "Second text.", "three": "Third text."}
BOX = {
    "cpus": 2, "ram_bytes": 8_000_000_000, "kernel": "6.1", "machine": "x86_64", "fs": "ext4", "device": "/dev/vda",
    "limit_bytes": CAP, "read_ahead_kb": 128,
}  # fmt: skip
QUIET = {
    "swapped_bytes": 0, "throttled": 0, "device_read_bytes": 10**9, "other_cpu_share": 0.01, "stolen_share": 0.0,
    "energy_j": None,
}  # fmt: skip

STOCK_ARM = Arm(STOCK, CAP, STOCK, tokens=9)
SLOW = Arm("mapped+willneed+none+none+mlock", CAP, "mapped+willneed+none+none+mlock")
DEFAULT = Arm("default", CAP, None)
RESIDENT = Arm("resident", None, "resident+uring:8+none+none+anon")
ARMS = (STOCK_ARM, SLOW, DEFAULT, RESIDENT)
#: Milliseconds a token of each.
MS = {STOCK: 1000.0, SLOW.key: 200.0, "default": 100.0, "resident": 50.0}


def document(arm: Arm, step_ms: list[float], tokens: list[int]) -> dict[str, Any]:
    """What a run that took ``step_ms`` writes: it reads 10 MB a token and hits half, but for stock and resident."""
    steps, seconds = len(step_ms), sum(step_ms) / 1e3
    streams = not arm.is_stock and arm.key != "resident"
    effective = STOCK if arm.is_stock else str(Mechanism.parse(arm.mechanism or "arena"))
    phase = {
        "tokens": steps,
        "seconds": seconds,
        "tok_per_s": steps / seconds if seconds else None,
        "step_ms": step_ms,
        "hits": 4 * steps * streams,
        "misses": 4 * steps * streams,
        "bytes_read": 10_000_000 * steps * streams,
        "read_bytes_os": 20_000_000 * steps * (arm.cap_bytes is not None),
        "stall_s": 0.3 * seconds,
        "compute_s": 0.6 * seconds,
        "memory_work_s": 0.1 * seconds,
        "speculative": {"issued": 0, "used": 0, "wasted_bytes": 0},
        "majflt": 2 * steps,
        "minflt": 3 * steps,
    }
    return {
        "box": dict(BOX) if arm.cap_bytes is not None else {**BOX, "limit_bytes": BOX["ram_bytes"]},
        "mechanism": {"asked": arm.mechanism, "effective": effective, "fallbacks": [], "engaged": {}},
        "prefill": {"bytes_read": 0, "hits": 0},
        "decode": phase,
        "cpu_s": {"decode": 0.04 * steps},
        "memory": {"anon": 500_000_000, "locked": 0},
        "peak_rss_bytes": 600_000_000,
        "n_batch": 64,
        "prompt_tokens": 12,
        "tokens": tokens,
        "text": "words",
    }


class Mock:
    """An executor that takes exactly ``seconds`` a run beyond the steps. ``step_ms``: of an arm and the number of the
    run, counted from 0; ``change``: what may be made of an ending and its document (None: no document)."""

    def __init__(
        self,
        step_ms: Callable[[Arm, int], float] = lambda arm, number: MS[arm.key],
        change: Callable[[Arm, int, dict[str, Any], dict[str, Any]], dict[str, Any] | None] | None = None,
    ) -> None:
        self.now = 0.0
        self.runs: list[str] = []
        self.conditions: dict[str, Any] = dict(QUIET)
        self._step_ms, self._change = step_ms, change

    def clock(self) -> float:
        return self.now

    def prepare(self, setup: Setup, arm: Arm) -> dict[str, Any]:
        self.now += 1.0
        return {"cached_bytes_before": 0, "disk_bytes_per_s": 1e9}

    def execute(self, setup: Setup, arm: Arm, words: list[str]) -> dict[str, Any]:
        number = len(self.runs)
        self.runs.append(arm.key)
        ms = self._step_ms(arm, number)
        count = arm.tokens or setup.tokens
        prompt = words[words.index("-p") + 1]
        made: dict[str, Any] | None = document(
            arm, [ms] * (count - 1), [len(prompt) + i for i in range(count)]
        )
        self.now += count * ms / 1e3
        capped = arm.cap_bytes is not None
        ending = {
            "returncode": 0,
            "error": "",
            "cage_peak_bytes": CAP if capped else None,
            "cage_anon_peak_bytes": 500_000_000 if capped else None,
            "oom_kills": 0 if capped else None,
            "conditions": dict(self.conditions),
        }
        if self._change is not None and made is not None:
            made = self._change(arm, number, ending, made)
        if made is not None:
            Path(words[words.index("--json") + 1]).write_text(json.dumps(made))
        return ending


class Silent:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.left: list[float | None] = []
        self.notes: list[str] = []

    def begin(self, slot: Any, number: int, total: int, left_s: float | None) -> None:
        self.left.append(left_s)

    def end(self, slot: Any, record: dict[str, Any]) -> None:
        return

    def note(self, text: str) -> None:
        self.notes.append(text)


class NoModel(Model):
    """A model without a file: nothing is read of it."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (Path("/somewhere/m.gguf"),)

    @property
    def bytes(self) -> int:
        return 3 * CAP

    @property
    def identity(self) -> str:
        return "abc"


def setup(out: Path, tokens: int = 17, caged: bool = True) -> Setup:
    model = NoModel((), "olmoe", "", {}, (), (), 1, 1, 1, 1, 1, 1)
    return Setup(model, threads=2, ctx=512, batch=64, tokens=tokens, caged=caged, out=out, prompts=PROMPTS)
