"""``moestream inspect MODEL``: where a model's bytes are, and what one token asks of its experts."""

from __future__ import annotations

import dataclasses
import json as json_module
import time
from typing import Annotated, Any

import typer

from moestream.box import Box, place_of
from moestream.cli.banner import demand
from moestream.geometry import movable_bytes_per_token, slab_geometry
from moestream.model import Bank, Model, check_architecture, locate, read_model
from moestream.units import format_bytes


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of a split model, or demo.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read the whole model and try every value of every tensor.")
    ] = False,
) -> None:
    """Show a model's expert table: what streams, what stays, and the bytes one token asks for."""
    found = read_model(locate(model))
    description = describe(found)
    if check:
        description["checked"] = _check(found)
    if json:
        print(json_module.dumps(description, indent=2))
    else:
        _print_tables(description)


def _check(model: Model) -> dict[str, Any]:
    """What was read of every tensor, and how long it took. Raises ModelError for the first bad one, and for shapes that
    llama.cpp does not take."""
    from moestream.cli.making import bars
    from moestream.model.check import check_loads, check_weights

    check_architecture(model)
    check_loads(model)
    started = time.monotonic()
    with bars() as progress:
        checked = check_weights(model, lambda done, total: progress("checking", done, total))
    return {**dataclasses.asdict(checked), "seconds": time.monotonic() - started}


def describe(model: Model) -> dict[str, Any]:
    """The model as plain JSON values; sizes in bytes. ``banks`` has one entry for each run of equal
    layers."""
    return {
        "paths": [str(path) for path in model.paths],
        "hindrances": list(place_of(model.paths, Box()).warnings),
        "name": model.name,
        "arch": model.arch,
        "identity": model.identity,
        "bytes": model.bytes,
        "dense_bytes": model.dense_bytes,
        "expert_bytes": model.expert_bytes,
        "layers": model.n_layers,
        "mtp_layers": model.n_mtp_layers,
        "moe_layers": len({bank.layer for bank in model.banks}),
        "experts": model.n_experts,
        "experts_used": model.n_experts_used,
        "demand_bytes_per_token": model.demand_bytes_per_token,
        "movable_bytes_per_token": movable_bytes_per_token(model, slab_geometry(model)),
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_vocab": model.n_vocab,
        "tensors": len(model.tensors),
        "banks": _group_banks(model.banks),
        "shards": [
            {
                "path": str(shard.path),
                "bytes": shard.bytes,
                "data_offset": shard.data_offset,
                "tensors": sum(tensor.shard == index for tensor in model.tensors),
            }
            for index, shard in enumerate(model.shards)
        ],
    }


def _group_banks(banks: tuple[Bank, ...]) -> list[dict[str, Any]]:
    """Banks that differ only in their layer, as one entry with the list of layers; in order of the first
    layer."""
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for bank in banks:
        tensors = [
            {"role": t.role, "type": t.type_name, "slab_bytes": t.slab_bytes, "count": t.count}
            for t in bank.tensors
        ]
        key = (bank.kind, bank.count, bank.used, *(tuple(tensor.values()) for tensor in tensors))
        entry = groups.setdefault(
            key,
            {"kind": bank.kind, "layers": [], "count": bank.count, "used": bank.used, "tensors": tensors},
        )
        entry["layers"].append(bank.layer)
    return list(groups.values())


def format_layers(layers: list[int]) -> str:
    """Ascending layer numbers as people write them: ``0-3, 5, 7-9``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _print_tables(description: dict[str, Any]) -> None:
    # What prints JSON does without it.
    from moestream.console import print_facts, table

    console = print_facts(_facts(description))
    if description["banks"]:
        columns = ("layers", "role", "type", "slab", "slab bytes", "experts", "used")
        experts = table("Experts", *columns, left=3)
        for bank in description["banks"]:
            for number, tensor in enumerate(bank["tensors"]):
                experts.add_row(
                    "" if number else format_layers(bank["layers"]),
                    tensor["role"],
                    tensor["type"],
                    format_bytes(tensor["slab_bytes"]),
                    str(tensor["slab_bytes"]),
                    str(tensor["count"]),
                    str(bank["used"]),
                )
            experts.add_section()
        console.print(experts)
    if len(description["shards"]) > 1:
        shards = table("Shards", "shard", "size", "tensors")
        for shard in description["shards"]:
            shards.add_row(shard["path"], format_bytes(shard["bytes"]), str(shard["tensors"]))
        console.print(shards)


def _facts(description: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines above the tables. What a token asks for stands beside what it would take to hold
    everything."""
    size = description["bytes"]

    def share(count: int) -> str:
        return f"{format_bytes(count)} ({count / size:.1%})"

    facts = [
        ("model", description["name"]),
        ("path", description["paths"][0]),
        *(("hindered", line) for line in description["hindrances"]),
        ("architecture", description["arch"]),
        ("identity", description["identity"]),
        ("size", f"{format_bytes(size)} ({size} bytes), {description['tensors']} tensors"),
        ("dense", share(description["dense_bytes"])),
        *((("expert", share(description["expert_bytes"])),) if description["banks"] else ()),
        ("layers", str(description["layers"])),
        ("trained context", f"{description['n_ctx_train']} tokens"),
    ]
    if "checked" in description:
        facts.append(("checked", _verdict(description["checked"])))
    if not description["banks"]:
        return [*facts, ("experts", "none: a dense model, nothing to stream")]
    used, experts = description["experts_used"], description["experts"]
    facts += [
        ("experts", f"{experts} a layer, {used} used, in {description['moe_layers']} layers"),
        (
            "demand a token",
            demand(description["demand_bytes_per_token"], description["movable_bytes_per_token"]),
        ),
    ]
    if description["mtp_layers"]:
        facts.append(
            ("prediction heads", f"the last {description['mtp_layers']} layers; decoding does not run them")
        )
    return facts


def _verdict(checked: dict[str, Any]) -> str:
    rate = checked["bytes"] / max(checked["seconds"], 1e-9)
    untested = f", {checked['untested']} of types that have no test" if checked["untested"] else ""
    return (
        f"every value of {checked['tensors']} tensors{untested}, {format_bytes(checked['bytes'])} at "
        f"{format_bytes(rate)}/s: nothing bad"
    )
