"""``moestream plan MODEL``: what fits in the memory named, and how fast that can be."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestream.box import Box, DiskRate, disk_rate
from moestream.mechanism import Mechanism
from moestream.model import check_architecture, locate, read_model
from moestream.plan import Plan
from moestream.units import format_bytes, parse_size

if TYPE_CHECKING:
    from moestream.model import Model


def plan(
    model: Annotated[str, typer.Argument(help="A GGUF file, any shard of a split model, or demo.")],
    ram: Annotated[
        str | None, typer.Option(help="Memory for the whole process: 4GiB, 1.1GB. Left out: what is free.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    ctx: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Tokens of context; 0: what the model was trained with.")
    ] = 4096,
    mechanism: Annotated[
        str | None,
        typer.Option(help="Plan for this mechanism. Left out: in memory if it fits, else the arena."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a prompt in one step. Left out: by the cap.")
    ] = None,
) -> None:
    """Say how a memory cap would be divided, the smallest that works, and the speed the disk allows."""
    asked = Mechanism.parse(mechanism) if mechanism is not None else None
    cap = parse_size(ram) if ram is not None else None
    found = read_model(locate(model))
    check_architecture(found)
    # The binding takes a while to import: wrong words are to be told at once.
    from moestream.dryrun import COMPUTE_SHARE, DEFAULT_STEP, plan_context

    rate = disk_rate(found.paths[0])
    speed = rate.bytes_per_s if rate is not None else None
    options: dict[str, Any] = {"n_ctx": ctx, "n_outputs_max": 1, "disk_bytes_per_s": speed}
    share = COMPUTE_SHARE if batch is None else 1.0
    made = plan_context(
        found, Box(), cap, asked, n_ubatch=batch or DEFAULT_STEP, compute_share=share, **options
    )
    # The least cap is that of single tokens, whose compute buffers are the smallest too.
    least = plan_context(found, Box(), made.cap_bytes, made.mechanism, n_ubatch=1, **options)
    made = dataclasses.replace(made, smallest_cap_bytes=least.smallest_cap_bytes)
    n_ctx = ctx or found.n_ctx_train
    if json:
        print(json_module.dumps(describe(found, made, rate, n_ctx), indent=2))
    else:
        _print_table(found, made, rate, n_ctx)


def describe(model: Model, plan: Plan, rate: DiskRate | None, n_ctx: int) -> dict[str, Any]:
    """The plan as plain JSON values."""
    values = dataclasses.asdict(plan)
    values["mechanism"] = str(plan.mechanism)
    return {
        "model": {"paths": [str(path) for path in model.paths], "arch": model.arch, "bytes": model.bytes},
        "n_ctx": n_ctx,
        "disk": None if rate is None else dataclasses.asdict(rate),
        **values,
    }


def _print_table(model: Model, plan: Plan, rate: DiskRate | None, n_ctx: int) -> None:
    # Rich takes longer to import than the whole plan takes; --json does not need it.
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{model.name or model.arch}: {format_bytes(model.bytes)}, context of {n_ctx} tokens")
    console.print(f"mechanism  {plan.mechanism}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, size in _rows(plan):
        table.add_row(name, format_bytes(size), f"{size / plan.cap_bytes:.1%}")
    console.print(table)
    for line in _facts(model, plan, rate):
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


def _facts(model: Model, plan: Plan, rate: DiskRate | None) -> list[str]:
    lines = [
        f"experts    {plan.expert_bytes / max(1, model.expert_bytes):.0%} of "
        f"{format_bytes(model.expert_bytes)}; a token asks for {format_bytes(plan.demand_bytes_per_token)}",
        f"step       up to {plan.n_batch} tokens",
        f"smallest   {plan.smallest_cap_bytes // 10**6}MB is the least cap that works, one token a step",
    ]
    if rate is None:
        lines.append("disk       its rate could not be measured")
    else:
        how = "random 1 MiB reads" if rate.direct else "random 1 MiB reads through the page cache"
        age = f"{rate.age_s / 60:.0f} min ago" if rate.age_s >= 60 else "now"
        lines.append(f"disk       {format_bytes(rate.bytes_per_s)}/s, {how}, measured {age}")
    if plan.tok_per_s is not None:
        low, high = plan.tok_per_s
        lines.append(
            f"expected   {low:.2g} to {high:.2g} tok/s from the disk's side; compute may be the lower bound"
        )
    else:
        lines.append("expected   no reads once loaded: as fast as the CPU computes")
    return lines
