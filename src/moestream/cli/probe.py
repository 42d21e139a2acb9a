"""``moestream probe``: the ceilings of this box, measured on a model's own file."""

from __future__ import annotations

import json as json_module
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream.cli.banner import Bar
from moestream.errors import ModelError, UsageError
from moestream.model import check_architecture, locate, read_model
from moestream.model.locate import DEMO
from moestream.probe import fuller_probe, save_probe
from moestream.report import check_writable, write_json

_STEPS = 1000


def probe(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Measure with this GGUF file (any shard), or demo. Its cached pages are dropped. Without it and "
            "--dir: demo if it is made, else --dir here.",
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Measure with a file of 1 GiB made here, and removed."),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE|-", help="Write everything that was measured; - for stdout."),
    ] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Print the tables of reading experts below the lines.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Under 20 seconds: fewer settings, fewer rounds.")
    ] = False,
) -> None:
    """Measure what this box can do: its disk, page cache, memory and processors, and which counters tell the truth.

    Ten lines, and with --tables those of reading experts; everything else is in the JSON (docs/formats/probe.md). Kept
    for a week, for `plan` and `replay`.
    """
    if model is not None and directory is not None:
        raise UsageError("--model and --dir: name one of the two to measure with")
    said = None
    if model is None and directory is None:
        model, directory, said = _usual()
    found = read_model(locate(model)) if model is not None else None
    if found is not None:
        check_architecture(found)
    out = Path(json) if json not in (None, "-") else None
    if out is not None:
        check_writable(out, found.paths if found is not None else ())
    if said is not None:
        print(said, file=sys.stderr)
    document = _measure(found, directory, quick)
    saved = save_probe(document)
    if out is not None:
        write_json(out, document)
    if json == "-":
        print(json_module.dumps(document, indent=1))
        return
    from moestream.probe.text import lines
    from moestream.probe.text_tables import tables as text_tables

    for line in (*lines(document), *(text_tables(document) if tables else ())):
        print(line)
    if fuller_probe(document) is not None:
        print("kept is the whole probe made before: a quick one does not replace it", file=sys.stderr)
    if saved is None:
        print("not kept: the user's cache directory cannot be written to", file=sys.stderr)


def _usual() -> tuple[str | None, Path | None, str]:
    """What is measured with when nobody names anything: a model, or a directory; and a sentence that says which."""
    try:
        locate(DEMO)
    except ModelError:
        here = Path()
        return None, here, f"measuring with a file made in {here.resolve()}: the demo model is not made yet"
    return DEMO, None, "measuring with the demo model: --model and --dir name another"


def _measure(model: Any, directory: Path | None, quick: bool) -> dict[str, Any]:
    # The engine takes a while to import: wrong words are to be told at once.
    from moestream.probe.run import run_probe

    bar = Bar(sys.stderr, "measuring")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return run_probe(
            model, directory, quick=quick, progress=lambda share: bar.update(int(share * _STEPS), _STEPS)
        )
    finally:
        signal.signal(signal.SIGTERM, before)
        bar.close()


def _end(number: int, _frame: Any) -> None:
    """Ended by a signal as by an exception, so that what was made for measuring is removed."""
    sys.exit(128 + number)
