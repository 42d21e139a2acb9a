"""``moestream make-model``: write a model with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moestream.cli.making import making
from moestream.errors import RefusedError
from moestream.files import check_directory
from moestream.make import ARCHITECTURES, SHAPES


def make_model(
    arch: Annotated[str, typer.Option(metavar="NAME", help=f"One of: {', '.join(ARCHITECTURES)}.")],
    shape: Annotated[
        str,
        typer.Option(
            metavar="SHAPE", help=f"One of {', '.join(SHAPES)}, and/or overrides: tiny,layers=8,ff=1024."
        ),
    ],
    quant: Annotated[
        str,
        typer.Option(metavar="TYPE", help="A ggml type (Q8_0, Q4_K, MXFP4, F16, ...) or the mixture Q4_K_M."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Another seed, other weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a model of any supported architecture and size, with random weights that ggml's own quantizer has
    quantised.

    Right for bytes, compute and tests; its text is noise, and its routes say nothing about a trained model's.
    """
    check_directory(out, "--out")
    if out.exists() and not force:
        raise RefusedError(f"{out} is there already: --force replaces it")
    # The making is imported here because it loads numpy and gguf, which --help can do without.
    from moestream.make.random_model import build_model, lay_out
    from moestream.make.shapes import parse_shape

    for reason in lay_out(arch, parse_shape(arch, shape), quant).fallbacks:
        print(f"note: {reason}")
    with making(out) as progress:
        build_model(arch, shape, quant, out, seed, progress)
