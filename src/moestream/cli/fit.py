"""``moestream fit TRACE... --out FILE``: a ridge predictor from traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestream.cli.banner import Bar
from moestream.units import format_bytes

if TYPE_CHECKING:
    from moestream.seeds import Fit


def fit(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Traces of one model.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the fit, an .npz file.")],
    wishes: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Experts it names a layer when it runs.")
    ] = 1,
) -> None:
    """Fit a linear map from the choices already made to the next layer's, and say how well it does.

    The last quarter of each trace is held out. Use the file with run --mechanism arena+ridge:FILE.
    """
    from moestream.analyze.choices import from_trace
    from moestream.analyze.fit import check_out, write_fit
    from moestream.analyze.fit import fit as make
    from moestream.replay.curves import check_same_model
    from moestream.replay.run import prepare
    from moestream.trace.read import read_trace

    check_out(out)
    found = [read_trace(path) for path in traces]
    check_same_model([prepare(trace, str(path)) for trace, path in zip(found, traces, strict=True)])
    model = found[0].meta["model"]
    choices = [from_trace(trace, str(path)) for trace, path in zip(found, traces, strict=True)]
    name = str(model.get("name", ""))
    with Bar(sys.stderr, "fitting") as bar:
        made = make(choices, found[0].identity, name, found[0].experts, wishes, bar.update)
    write_fit(made, out)
    _print(made, out)


def _print(made: Fit, out: Path) -> None:
    from moestream.analyze.routing import mean_over_layers
    from moestream.console import console as stdout
    from moestream.console import table as new_table

    kinds = ("train", "held_out", "previous", "random")
    headings = ("layer", "ridge, train", "ridge, held out", "previous", "random")
    table = new_table("Recall of as many experts as a token uses", *headings)
    rows = [[row[kind] for kind in kinds] for row in made.about["recall"]]
    for row, values in zip(made.about["recall"], rows, strict=True):
        table.add_row(str(row["layer"]), *map(_share, values))
    table.add_section()
    table.add_row("mean", *map(_share, mean_over_layers(rows)))
    console = stdout()
    console.print(table)
    console.print(f"inputs: {made.about['features']}", soft_wrap=True)
    console.print(
        f"{out}: lambda {made.about['lambda']:g}, {made.wishes} a layer, {format_bytes(out.stat().st_size)}; "
        f"use it with --mechanism arena+ridge:{out}",
        soft_wrap=True,
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
