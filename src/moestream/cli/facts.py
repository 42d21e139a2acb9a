"""A console, and the two columns of label and value that several commands begin with.

Rich takes longer to import than a header takes to read: what prints JSON does not import this.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table


def print_facts(facts: Iterable[tuple[str, str]]) -> Console:
    """Print one line a fact; the console it went to."""
    console = Console(highlight=False, markup=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts:
        table.add_row(label, value)
    console.print(table)
    return console
