"""``moestream plan MODEL``: what fits in the memory named, and how fast that can be."""

from __future__ import annotations

import dataclasses
import json as json_module
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestream.box import Box, DiskRate, Threads, disk_rate, place_of, process_memory
from moestream.cli.banner import demand
from moestream.mechanism import DEFAULT, Mechanism
from moestream.model import check_architecture, locate, read_model
from moestream.plan import IN_PLACE, Plan, process_bytes
from moestream.probe import reader_of, saved_probe
from moestream.units import format_age, format_bytes, parse_size

if TYPE_CHECKING:
    from moestream.box import Place
    from moestream.model import Model


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of a split model, or demo.")
    ],
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for the whole process: 4GiB, 1.1GB. Left out: what is free."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ctx: Annotated[
        int,
        typer.Option(
            min=0, max=2**31 - 1, metavar="N", help="Tokens of context; 0: what the model was trained with."
        ),
    ] = 4096,
    mechanism: Annotated[
        str | None,
        typer.Option(
            metavar="MECHANISM",
            help="Plan for this mechanism. Left out: in memory if it fits, else the arena.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Most tokens of a prompt in one step. Left out: by the cap."),
    ] = None,
    i_know: Annotated[bool, typer.Option("--i-know", help="Ask a llama.cpp that is not tested.")] = False,
) -> None:
    """Say how a memory cap would be divided, the smallest that works, and the speed the disk allows."""
    asked = Mechanism.parse(mechanism) if mechanism is not None else None
    cap = parse_size(ram) if ram is not None else None
    found = read_model(locate(model))
    check_architecture(found)
    # The binding takes a while to import: wrong words are to be told at once.
    from moestream.assembly import load_seeds
    from moestream.binding import unproven
    from moestream.dryrun import COMPUTE_SHARE, DEFAULT_STEP, plan_context

    unproven(i_know)
    # What a mechanism reads from files stays in memory, and so does what reads them.
    before = process_memory().anon_bytes
    seeds = load_seeds(asked, found) if asked is not None else {}
    seed_bytes = max(0, process_memory().anon_bytes - before) if seeds else 0
    box = Box()
    place = place_of(found.paths, box)
    ceilings = find_ceilings(found)
    options: dict[str, Any] = {
        "n_ctx": ctx,
        "n_outputs_max": 1,
        "base_bytes": process_bytes(found, 0) + seed_bytes,
        "held_bytes": process_memory().anon_bytes,
        "disk_bytes_per_s": ceilings.disk_bytes_per_s,
        "compute_s_per_token": ceilings.compute_s_per_token,
        "place": place,
    }
    share = COMPUTE_SHARE if batch is None else 1.0
    made = plan_context(
        found, box, cap, asked, n_ubatch=batch or DEFAULT_STEP, compute_share=share, **options
    )
    # The least cap is that of single tokens, whose compute buffers are the smallest too, and, where no mechanism is
    # asked for, of the one that would run under it.
    usual = IN_PLACE if place.in_memory else DEFAULT
    least = plan_context(found, box, made.cap_bytes, asked or usual, n_ubatch=1, **options)
    made = dataclasses.replace(made, smallest_cap_bytes=least.smallest_cap_bytes)
    n_ctx = ctx or found.n_ctx_train
    if json:
        print(json_module.dumps(describe(found, made, ceilings, n_ctx), indent=2))
    else:
        _print_table(found, made, ceilings, n_ctx, place)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What bounds a speed: a saved probe's figures, or the disk's rate alone. ``age_s``: since it was measured;
    ``reader``: the one that is enough for this disk, by the probe."""

    disk_bytes_per_s: float | None
    compute_s_per_token: float | None
    rate: DiskRate | None = None
    age_s: float = 0.0
    reader: str | None = None


def find_ceilings(model: Model) -> Ceilings:
    """Of the model's probe where one holds; else the disk's rate, remembered or measured now in half a second."""
    probe = saved_probe(model)
    if probe is not None and probe["disk_bytes_per_s"] is not None:
        age = max(0.0, time.time() - probe["measured_at"])
        return Ceilings(probe["disk_bytes_per_s"], probe["compute_s_per_token"], None, age, reader_of(probe))
    rate = disk_rate(model.paths[0])
    if rate is None:
        return Ceilings(None, None)
    return Ceilings(rate.bytes_per_s, None, rate, rate.age_s)


def describe(model: Model, plan: Plan, ceilings: Ceilings, n_ctx: int) -> dict[str, Any]:
    """The plan as plain JSON values. ``disk`` is a rate measured for planning; ``probe`` what took its place."""
    rate, probe = ceilings.rate, None
    if rate is None and ceilings.disk_bytes_per_s is not None:
        names = ("disk_bytes_per_s", "compute_s_per_token", "age_s", "reader")
        probe = {name: getattr(ceilings, name) for name in names}
    values = dataclasses.asdict(plan)
    values["mechanism"] = str(plan.mechanism)
    for told in ("closed", "max_mappings"):  # of the box, for whoever builds the arena
        del values[told]
    return {
        "model": {"paths": [str(path) for path in model.paths], "arch": model.arch, "bytes": model.bytes},
        "n_ctx": n_ctx,
        "threads": dataclasses.asdict(Box().threads()),
        "disk": None if rate is None else dataclasses.asdict(rate),
        "probe": probe,
        **values,
    }


def _print_table(model: Model, plan: Plan, ceilings: Ceilings, n_ctx: int, place: Place) -> None:
    # Rich takes longer to import than the whole plan takes; --json does not need it.
    from rich.table import Table

    from moestream.console import console as stdout

    console = stdout()
    console.soft_wrap = True
    console.print(f"{model.name or model.arch}: {format_bytes(model.bytes)}, context of {n_ctx} tokens")
    console.print(f"mechanism  {plan.mechanism}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", min_width=len("mechanism"))
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, size in _rows(plan):
        table.add_row(name, format_bytes(size), f"{size / plan.cap_bytes:.1%}")
    console.print(table)
    for line in _facts(model, plan, ceilings, place):
        console.print(line)
    for reason in plan.reasons:
        console.print(f"  {reason}", style="dim")
    for warning in plan.warnings:
        console.print(f"warning: {warning}")


def _rows(plan: Plan) -> list[tuple[str, int]]:
    return [
        ("cap", plan.cap_bytes),
        ("dense", plan.dense_bytes),
        ("boundary", plan.boundary_bytes),
        ("KV cache", plan.kv_bytes),
        ("compute", plan.compute_bytes),
        ("other", plan.other_bytes),
        ("margin", plan.margin_bytes),
        ("experts", plan.expert_bytes),
    ]


def _facts(model: Model, plan: Plan, ceilings: Ceilings, place: Place) -> list[str]:
    lines = [
        f"share      {plan.expert_bytes / max(1, model.expert_bytes):.0%} of "
        f"{format_bytes(model.expert_bytes)} of experts; a token asks for "
        f"{demand(model.demand_bytes_per_token, plan.movable_bytes_per_token)}",
        f"step       up to {plan.n_batch} tokens",
        f"smallest   {plan.smallest_cap_bytes // 10**6}MB is the least cap that works, one token a step",
        _disk_line(plan, ceilings, place),
        _threads_line(Box().threads()),
    ]
    if ceilings.reader is not None:
        lines.append(f"reader     {ceilings.reader} is enough for this disk, probed")
    compute = ceilings.compute_s_per_token
    if compute is not None:
        lines.append(f"compute    {compute * 1e3:.1f} ms a token with all experts in memory, probed")
    if plan.tok_per_s is not None:
        low, high = plan.tok_per_s
        bound = (
            "if the slower of disk and processors is all that counts"
            if compute is not None
            else "from the disk's side; compute may be the lower bound: moestream probe measures it"
        )
        lines.append(f"expected   {low:.2g} to {high:.2g} tok/s {bound}")
    else:
        lines.append("expected   no reads once loaded: as fast as the CPU computes")
    return lines


def _threads_line(here: Threads) -> str:
    return f"threads    {here.count}, {here.limited_by or 'one for each CPU'}"


def _disk_line(plan: Plan, ceilings: Ceilings, place: Place) -> str:
    if place.in_memory:
        return f"disk       none: {place.in_memory} is memory"
    if ceilings.disk_bytes_per_s is None:
        return "disk       its rate could not be measured"
    rate = ceilings.rate
    if rate is None:
        how = "random reads, the best of a probe,"
    else:
        how = "random 1 MiB reads," if rate.direct else "random 1 MiB reads through the page cache,"
    rate_text = f"{format_bytes(ceilings.disk_bytes_per_s)}/s"
    what = ", for the load alone" if plan.mechanism.store == "resident" else ""
    return f"disk       {rate_text}, {how} measured {format_age(ceilings.age_s)}{what}"
