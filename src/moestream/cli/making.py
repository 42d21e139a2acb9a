"""The progress bar of the commands that make models, and their last line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moestream.units import format_bytes


@contextmanager
def making(path: Path) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a ``progress(stage, done, total)`` that draws a bar on stderr; at the end print what was made,
    where.

    Each stage gets a bar of its own in which it stays. Nothing is drawn where stderr is not a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as drawing:

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = drawing.add_task(stage)
            drawing.update(bars[stage], completed=done, total=total)

        yield progress
    seconds = time.monotonic() - started
    print(f"{path}: {format_bytes(path.stat().st_size)} in {seconds:.0f} s")
