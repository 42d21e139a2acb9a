"""``moestream lab list|run|clean``: canned experiments, each a question, what its source found, and a verdict here."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

lab = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Ask one question of this box, as a document did, and say whether it agrees.",
)


@lab.command("list")
def list_experiments(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of text.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/experiments.md: what agrees, too.")
    ] = False,
) -> None:
    """List the experiments: each one's question, its kind, and about how long it takes on the demo model."""
    from moestream.lab.experiment import experiments
    from moestream.lab.experiment_text import list_rows, markdown, minutes, total_seconds

    chosen = experiments().values()
    if as_markdown:
        print(markdown(chosen), end="")
        return
    rows = list_rows(chosen)
    if json:
        print(json_module.dumps(rows, indent=1))
        return
    _print_list(rows)
    total = [minutes(total_seconds(chosen, quick)) for quick in (True, False)]
    print(f"\nall: about {total[0]} with --quick, {total[1]} without, on the demo model and two cores")


def _print_list(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from moestream.lab.experiment_text import minutes

    table = Table(box=None, pad_edge=False)
    for name, options in {
        "name": {"no_wrap": True},
        "kind": {},
        "--quick": {"justify": "right", "no_wrap": True},
        "whole": {"justify": "right", "no_wrap": True},
        "question": {"overflow": "fold"},
    }.items():
        table.add_column(name, **options)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            row["name"], row["kind"], minutes(row["seconds_quick"]), minutes(row["seconds"]), row["question"]
        )
    Console(highlight=False, markup=False).print(table)
