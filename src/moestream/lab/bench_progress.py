"""What is running and how long it will take: one live line on a terminal, a plain line a run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from moestream.lab.schedule import Slot
from moestream.lab.validity import Record


class Display(Protocol):
    """Told of every run as it begins and as it ends."""

    def begin(self, slot: Slot, number: int, total: int, left_s: float | None) -> None:
        """Run ``number`` of ``total`` begins; all that are left will take ``left_s`` seconds (None: not known)."""

    def end(self, slot: Slot, record: Record) -> None:
        """It has ended, and this is its record."""

    def note(self, text: str) -> None:
        """Something to be told beside the runs."""


class Lines:
    """Plain lines, for files and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._title = ""

    def begin(self, slot: Slot, number: int, total: int, left_s: float | None) -> None:
        self._title = f"[{number}/{total}] {title(slot)}"
        self._say(f"{self._title}: begins{_left(left_s)}")

    def end(self, slot: Slot, record: Record) -> None:
        self._say(f"{self._title}: {outcome(record)}")

    def note(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class Live:
    """A bar with the arm, the round and the time left; a line above it for every run that has ended."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task: Any = None

    def begin(self, slot: Slot, number: int, total: int, left_s: float | None) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=total, left="")
        left = _left(left_s).removeprefix(", ")
        self._progress.update(self._task, completed=number - 1, description=title(slot), left=left)

    def end(self, slot: Slot, record: Record) -> None:
        self._progress.advance(self._task)
        self.note(f"{title(slot)}: {outcome(record)}")

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


@contextmanager
def display(out: TextIO) -> Iterator[Display]:
    """The display for where messages go."""
    if not out.isatty():
        yield Lines(out)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    title = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    left = TextColumn("{task.fields[left]}", markup=False)
    columns = (title, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), left)
    # Drawing takes a processor's time from what is measured: once a second is enough.
    with Progress(*columns, console=Console(file=out), transient=True, refresh_per_second=1) as progress:
        yield Live(progress)


def title(slot: Slot) -> str:
    return f"round {slot.round + 1}, {slot.prompt}, {slot.arm.key}{' again' if slot.again else ''}"


def outcome(record: Record) -> str:
    """A run's result in a few words."""
    if not record["valid"]:
        return f"EXCLUDED, {record['invalid'][0]}"
    rate = record["document"]["decode"]["tok_per_s"]
    return f"{rate:.2f} tok/s ({record['seconds']:.0f} s)"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min``, ``1 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _left(left_s: float | None) -> str:
    return "" if left_s is None else f", about {duration(left_s)} left"
