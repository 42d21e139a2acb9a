"""The progress bar of the commands that read or write a whole model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moestream.units import format_bytes


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a ``progress(stage, done, total)`` that draws a bar on stderr, whatever descriptor 2 is meanwhile.

    Each stage gets a bar of its own in which it stays. Nothing is drawn where stderr is not a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    drawn: dict[str, TaskID] = {}
    with (
        os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace") as stream,
        Progress(*columns, console=Console(file=stream), disable=not stream.isatty()) as drawing,
    ):

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in drawn:
                drawn[stage] = drawing.add_task(stage)
            drawing.update(drawn[stage], completed=done, total=total)

        yield progress


@contextmanager
def making(path: Path) -> Iterator[Callable[[str, int, int], None]]:
    """``bars``; at the end print what was made, where."""
    started = time.monotonic()
    with bars() as progress:
        yield progress
    seconds = time.monotonic() - started
    print(f"{path}: {format_bytes(path.stat().st_size)} in {seconds:.0f} s")
