"""What ``run`` says on stderr: the banner before, a bar during, the summary after. Text only; it decides
nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from moestream.box import Box, place_of
from moestream.stats import bound_by
from moestream.units import format_bytes
from moestream.version import __version__

if TYPE_CHECKING:
    from moestream.box import DiskRate, ProcessMemory, Threads
    from moestream.engine import Llama
    from moestream.model import Model
    from moestream.plan import Plan

#: Work expected to take longer than this gets a bar, once it has run long enough to tell.
BAR_FROM_S = 2.0
_TELL_AFTER_S = 0.3


class Bar:
    """A progress bar, and the time that is left, for work that takes longer than two seconds; where ``stream`` is not
    a terminal nothing is drawn, and nothing imported for it."""

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream, self._what = stream, what
        self._start = time.monotonic()
        self._wanted = stream.isatty()
        self._drawing: Any = None
        self._task: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total``. From any thread."""
        with self._lock:
            if not self._wanted or done <= 0 or total <= 0:
                return
            elapsed = time.monotonic() - self._start
            if self._drawing is None:
                if elapsed < _TELL_AFTER_S or elapsed * total / done < BAR_FROM_S:
                    return
                self._begin(total)
            left = timedelta(seconds=round(elapsed * (total - done) / done))
            self._drawing.update(self._task, completed=done, total=total, left=left)
            self._drawing.refresh()

    def _begin(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
        )
        # No thread of its own: it would run beside the model, and at the load wait for the interpreter.
        self._drawing = Progress(
            *columns,
            console=Console(file=self._stream),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._drawing.start()
        self._task = self._drawing.add_task(self._what, total=total, left="")

    def close(self) -> None:
        """Take the bar away, for good. From any thread; once it returns, text may be written in its place."""
        with self._lock:
            self._wanted = False
            if self._drawing is not None:
                self._drawing.stop()
                self._drawing = None


def banner(llama: Llama, cap_bytes: int | None, rate: DiskRate | None) -> Iterator[str]:
    """The lines before the text: what runs, on which terms, and what is not as asked."""
    yield f"moestream {__version__}: {_model(llama.model_info)}"
    plan = llama.plan
    if plan is None:
        cap = f", the cap of {format_bytes(cap_bytes)} not used" if cap_bytes is not None else ""
        yield f"mechanism none: a dense model, loaded as llama.cpp does{cap}"
        for note in llama.fallbacks[1:]:  # the first says what the line above does
            yield f"not as asked: {note}"
    else:
        yield f"mechanism {llama.mechanism}"
        yield _split(plan, llama.model_info)
        yield _ceiling(llama, plan, rate)
        yield from _threads(llama.n_threads, Box().threads())
        for note in llama.fallbacks:
            yield f"not as asked: {note}"
        for warning in plan.warnings:
            yield f"warning: {warning}"


def _model(model: Model) -> str:
    name = f"{model.name} ({model.arch})" if model.name else model.arch
    text = f"{name}, {format_bytes(model.bytes)}, {model.n_layers} layers"
    if model.is_moe:
        text += f" of {model.n_experts} experts, {model.n_experts_used} used"
    return text


def _split(plan: Plan, model: Model) -> str:
    parts = (
        ("dense", plan.dense_bytes),
        ("boundary", plan.boundary_bytes),
        ("KV", plan.kv_bytes),
        ("compute", plan.compute_bytes),
        ("other", plan.other_bytes),
        ("margin", plan.margin_bytes),
    )
    split = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    share = min(1.0, plan.expert_bytes / max(1, model.expert_bytes))
    return (
        f"cap {format_bytes(plan.cap_bytes)}: {split}, experts {format_bytes(plan.expert_bytes)} "
        f"({share:.0%} of {format_bytes(model.expert_bytes)})"
    )


def _threads(used: int, here: Threads) -> Iterator[str]:
    """Why a run has fewer threads than the machine has processors, where nobody asked for another number."""
    if here.limited_by and used == here.count:
        yield f"threads {used}: {here.limited_by}"


def demand(demand_bytes: int, movable_bytes: int, of: str = "") -> str:
    """What a token's matmuls read, and what of it can be missing: the same two figures in every command."""
    return f"{format_bytes(demand_bytes)}{of}, {format_bytes(movable_bytes)} of it in pages that come and go"


def reads_nothing(llama: Llama) -> str | None:
    """Why no token waits for a disk; None where one may."""
    if llama.plan is not None and llama.plan.mechanism.store == "resident":
        return "nothing is read once they are loaded"
    memory = place_of(llama.model_info.paths, Box()).in_memory
    return f"nothing is read, {memory} is memory" if memory else None


def _ceiling(llama: Llama, plan: Plan, rate: DiskRate | None) -> str:
    movable, asked = plan.movable_bytes_per_token, llama.model_info.demand_bytes_per_token
    if (why := reads_nothing(llama)) is not None:
        return f"a token asks for {format_bytes(asked)} of experts; {why}"
    asks = f"a token asks for {demand(asked, movable, ' of experts')}"
    if rate is None:
        return f"disk: its rate is not known; {asks}"
    how = "" if rate.direct else " through the page cache"
    text = f"disk {format_bytes(rate.bytes_per_s)}/s{how}; {asks}"
    if movable:
        speed = rate.bytes_per_s / movable
        text += f": {speed:.{0 if speed >= 10 else 1}f} tok/s if none of it is in memory"
    return text


def held_bytes(memory: ProcessMemory, mechanism: str | None) -> int:
    """The part of a process's memory that the kernel cannot take back, which is what a cap must hold.

    Anonymous and shared pages, and what a mapped store (or a dense model, ``mechanism`` None) locked: there
    the locked pages are the file's. Elsewhere they are anonymous and counted already.
    """
    held = memory.anon_bytes + memory.shared_bytes
    if mechanism is None or mechanism.startswith("mapped"):
        held += min(memory.locked_bytes, memory.file_bytes)
    return held


def summary(document: dict[str, Any], held: int) -> str:
    """The line after the text, from the document of the run and the ``held_bytes`` at its end. Not the peak
    of the resident bytes, which has pages of the file in it that count for nothing against the cap."""
    prefill, decode = document["prefill"], document["decode"]
    text = f"prompt {_rate(prefill)}; text {_rate(decode)}"
    if decode["tokens"]:
        text += f" ({', '.join(_a_token(decode))}{_bound(decode)})"
    cap = document["budget"]["cap_bytes"]
    text += f"; memory held {format_bytes(held)}"
    text += f" of {format_bytes(cap)}" if cap is not None else ""
    changes = document["governor"]
    if changes:
        least = min(change["bytes"] for change in changes)
        text += f"; gave memory to others, {format_bytes(least)} of experts at the least"
    gone = document["swapped"]
    if any(gone.values()):
        text += f"; the machine swapped {format_bytes(gone['out_bytes'])} out, {format_bytes(gone['in_bytes'])} in"
    return text if document["ended"] == "tokens" else f"{text}; {document['ended']}"


def _a_token(decode: dict[str, Any]) -> Iterator[str]:
    """What a token took on average. Where the kernel brings the experts, its account is the only one."""
    tokens, routed = decode["tokens"], decode["hits"] + decode["misses"]
    if routed:
        yield f"hit rate {decode['hits'] / routed:.0%}"
        yield f"{format_bytes(decode['bytes_read'] / tokens)} a token"
    elif decode["read_bytes_os"]:
        yield f"{format_bytes(decode['read_bytes_os'] / tokens)} a token by the kernel's account"
    for name, key in (("stall", "stall_s"), ("compute", "compute_s"), ("memory", "memory_work_s")):
        if routed or decode[key]:
            yield f"{name} {decode[key] / tokens * 1e3:.1f} ms"


def _bound(decode: dict[str, Any]) -> str:
    """Whether the disk or compute made it as slow as it was; '' where page faults are in the compute time."""
    if not decode["hits"] + decode["misses"]:
        return ""
    most = bound_by(decode["stall_s"], decode["compute_s"], decode["memory_work_s"])
    return f": bound by {most}" if most else ""


def _rate(phase: dict[str, Any]) -> str:
    tokens = f"{phase['tokens']} token{'' if phase['tokens'] == 1 else 's'}"
    rate = phase["tok_per_s"]
    return (
        tokens
        if rate is None
        else f"{tokens} at {rate:.{0 if rate >= 100 else 1 if rate >= 10 else 2}f} tok/s"
    )
