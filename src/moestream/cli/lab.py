"""``moestream lab list|run|clean``: canned experiments, each a question, what its source found, and a verdict here."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from moestream.errors import ModelError, UsageError

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
    """List the experiments: questions, kinds and times.

    A time is about what it takes on the demo model.
    """
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
    from rich.table import Table

    from moestream.console import console
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
    console().print(table)


@lab.command()
def run(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Of `lab list`, or a TOML file of your own; or all."),
    ],
    model: Annotated[str, typer.Option(metavar="MODEL", help="A GGUF file (any shard), or demo.")] = "demo",
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Instead of a third of the model, for arms that name no cap of their own."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts, repeats and tokens.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for runs.jsonl and verdict.json; of several, one for each in it."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --out already holds.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Begin anew where --out holds one.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array of verdicts instead of text.")
    ] = False,
) -> None:
    """Run experiments and say whether this box agrees.

    It is held against what an experiment's source found, and each ends in agrees, disagrees or cannot tell. A file
    that one needs beside the model is made in the cache directory first, and kept until `lab clean`.
    """
    from moestream.lab.bench_progress import display
    from moestream.lab.experiment import experiments, find
    from moestream.lab.experiment_plan import check_cap
    from moestream.lab.experiment_text import summary_lines
    from moestream.lab.session import Asked, run_all
    from moestream.model import check_architecture, locate, read_model
    from moestream.units import parse_size

    if "all" in names and len(set(names)) > 1:
        raise UsageError("all is every experiment: write it alone, or the names without it")
    chosen = list(experiments().values()) if "all" in names else [find(name) for name in dict.fromkeys(names)]
    cap = parse_size(ram) if ram is not None else None
    for one in chosen:
        if len(chosen) == 1:
            check_cap(one, cap)
    found = read_model(locate(model))
    check_architecture(found)
    if not found.is_moe:
        raise ModelError(
            f"{found.name or found.arch} has no experts: an experiment needs a mixture of experts"
        )
    asked = Asked(found, cap, quick, out, resume, force, model)
    tell = None if json else _teller(sys.stdout)
    with display(sys.stderr) as show:
        outcomes = run_all(chosen, asked, tell=tell, show=show)
    if json:
        print(json_module.dumps(outcomes, indent=1))
    elif len(outcomes) > 1:
        print("\n".join(summary_lines(outcomes)))


@lab.command()
def clean(
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array of what was removed.")] = False,
) -> None:
    """Remove the files that experiments made in the cache directory. The demo model stays."""
    from moestream.lab.files import clean as remove
    from moestream.lab.files import directory
    from moestream.units import format_bytes

    removed = remove()
    if json:
        print(json_module.dumps([{"path": str(path), "bytes": size} for path, size in removed], indent=1))
        return
    for path, size in removed:
        print(f"removed {path} ({format_bytes(size)})")
    if not removed:
        print(f"nothing to remove in {directory()}")


def _teller(out: TextIO) -> Callable[[dict[str, Any]], None]:
    """Prints outcomes to ``out``; on a terminal above the live line, which has taken sys.stdout over by then."""
    from moestream.lab.experiment_text import outcome_lines

    def tell(outcome: dict[str, Any]) -> None:
        for line in [*outcome_lines(outcome), ""]:
            print(line, file=sys.stdout if out.isatty() else out, flush=True)

    return tell
