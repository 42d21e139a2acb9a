"""What commands print beside JSON: text and tables of one look.

On a terminal as wide as it is; in a pipe or a file each row is one line. No line ends in blanks. Rich takes longer to
import than a header takes to read: whatever prints JSON does not import this.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import IO, Any, cast

from rich import box
from rich.console import Console
from rich.table import Table

#: Columns that no row reaches.
_UNBROKEN = 1000
_BLANKS = re.compile(" +(?=\n)")


class _Trimmed:
    """A file whose lines end in no blanks; for whole lines."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(_BLANKS.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def console(file: IO[str] | None = None, piped_width: int = _UNBROKEN) -> Console:
    """Of stdout, or of ``file``. ``COLUMNS`` is a width for pipes, too."""
    out = file if file is not None else sys.stdout
    width = None if out.isatty() or "COLUMNS" in os.environ else piped_width
    return Console(file=cast(IO[str], _Trimmed(out)), width=width, highlight=False, markup=False)


def table(title: str, *columns: str, left: int = 1) -> Table:
    """A table of figures; the first ``left`` columns hold words."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right")
    return made


def print_facts(facts: Iterable[tuple[str, str]]) -> Console:
    """Print one line a fact, its label before it; the console it went to."""
    to = console()
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts:
        grid.add_row(label, value)
    to.print(grid)
    return to
