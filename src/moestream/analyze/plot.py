"""The picture of an analysis: which experts are used, how soon again, and how well they can be told in advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moestream.analyze.routing import mean_over_layers
from moestream.errors import UsageError
from moestream.extras import lacking
from moestream.files import printable
from moestream.make.output import new_file

FORMATS = ("png", "svg", "pdf")
#: Enough for any plot this makes.
_ROOM_BYTES = 8 << 20
#: How many layers have a line of their own among the locality curves.
_LINES = 5


def check_plot(path: Path) -> None:
    """UsageError for a file that cannot be a plot; RefusedError where matplotlib is missing. Before the work."""
    if path.suffix.lstrip(".").lower() not in FORMATS:
        raise UsageError(f"--plot {path}: a plot's name ends in .{', .'.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise lacking(error, "plots", "matplotlib") from None


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw a document of ``report.analyze`` into a file, whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 2.4 + min(8.0, 0.12 * len(document["layers"]))
    figure, (heat, near, known) = pyplot.subplots(
        3, 1, figsize=(10, height + 8.5), height_ratios=[height, 4.2, 4.2], layout="constrained"
    )
    name = document["model"]["name"] or document["model"]["identity"]
    title = printable(f"{name}: {document['tokens']} tokens of {Path(document['trace']).name}")
    # A dollar in a name begins no formula.
    figure.suptitle(title, parse_math=False)
    _heat_map(figure, heat, document)
    _locality(near, document)
    _recall(known, document)
    with new_file(path, _ROOM_BYTES, "--plot") as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".").lower(), dpi=110)
    pyplot.close(figure)


def _heat_map(figure: Any, axes: Any, document: dict[str, Any]) -> None:
    usage = document["usage"]
    share = np.full((len(usage), max(len(row) for row in usage)), np.nan)
    for layer, row in enumerate(usage):
        share[layer, : len(row)] = np.asarray(row) / max(1, document["tokens"]) * 100
    # Few experts take most tokens: the colours are spent on where the others are.
    top = max(float(np.nanquantile(share, 0.995)), 1e-9)
    image = axes.imshow(share, aspect="auto", cmap="magma", vmin=0, vmax=top, interpolation="nearest")
    axes.set_title("How often each expert is chosen")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    _label_layers(axes.set_yticks, document["layers"])
    figure.colorbar(image, ax=axes, label="% of tokens", extend="max", pad=0.01)


def _label_layers(set_ticks: Any, layers: list[int]) -> None:
    step = -(-len(layers) // 16)
    set_ticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])


def _locality(axes: Any, document: dict[str, Any]) -> None:
    from matplotlib import colormaps

    where, layers = document["locality"], document["layers"]
    distances = where["distances"]
    picked = sorted({round(i * (len(layers) - 1) / max(1, _LINES - 1)) for i in range(_LINES)})
    for number, layer in enumerate(picked):
        colour = colormaps["viridis"](0.9 * number / max(1, len(picked) - 1))
        axes.plot(distances, _percent(where["overlap"][layer]), color=colour, label=f"layer {layers[layer]}")
    mean, control = (mean_over_layers(where[kind]) for kind in ("overlap", "control"))
    axes.plot(distances, _percent(mean), color="black", linewidth=2.5, label="mean of all layers")
    axes.plot(
        distances, _percent(control), color="grey", linestyle="--", linewidth=2, label="mean, tokens shuffled"
    )
    axes.set_title("How much of a token's choice an earlier token had chosen too")
    axes.set_xlabel("distance, tokens")
    axes.set_ylabel("overlap, %")
    axes.set_xlim(distances[0], distances[-1])
    axes.set_xticks([distance for distance in distances if distance == 1 or distance % 4 == 0])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize="small")


def _recall(axes: Any, document: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    told, layers = document["predictors"], document["layers"]
    places = range(len(layers))
    colours = {"ridge": "C0", "previous": "C1", "random": "grey"}
    for name, by in told["recall"].items():
        colour = colours.get(name, "C2")
        plain = printable(name).replace("$", r"\$")
        label = f"{plain}, as the run asked" if ":" in name else plain
        axes.plot(places, _percent(by["1"]), color=colour, marker="o", markersize=3, label=label)
        for ahead, style in (("2", "--"), ("3", ":")):
            # What sees nothing of the token says the same however far ahead.
            if ahead not in by or by[ahead] == by["1"]:
                continue
            label = f"{plain}, {ahead} layers ahead"
            axes.plot(places, _percent(by[ahead]), color=colour, linestyle=style, label=label)
    axes.set_title(f"Experts told one layer ahead: recall@{told['k']}, {told['tokens']} tokens held out")
    axes.set_xlabel("layer")
    axes.set_ylabel("recall, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label_layers(axes.set_xticks, layers)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize="small")


def _percent(values: list[float | None]) -> list[float]:
    return [np.nan if value is None else 100 * value for value in values]
