"""The plan of a load: the parent's arguments completed, and a cap that this process can have now."""

from __future__ import annotations

import mmap
import multiprocessing
from dataclasses import dataclass
from typing import Any

from moestream.box import MACHINE, Box, place_of, process_memory
from moestream.dryrun import COMPUTE_SHARE, DEFAULT_CONTEXT, DEFAULT_STEP, plan_context, rows_of_logits
from moestream.errors import BudgetError
from moestream.guard import check_values, ignored
from moestream.mechanism import Mechanism
from moestream.model import Model
from moestream.plan import MARGIN_BYTES, Plan, process_bytes
from moestream.units import format_bytes


def complete(arguments: dict[str, Any], fallbacks: list[str]) -> None:
    """The parent's defaults, but that it says nothing, and that of the processors it counts no more are used than this
    process may use at once. ``fallbacks`` is told of words it has no use for. Raises UsageError for a
    value that llama.cpp would crash over."""
    check_values(arguments)
    fallbacks += ignored(arguments)
    arguments.setdefault("verbose", False)
    if arguments.get("draft_model") is not None:
        # A row for each token is written, and there would be room for a step's.
        arguments["logits_all"] = True
    machine, here = multiprocessing.cpu_count(), Box().compute_threads()
    for name, usual in (("n_threads", max(machine // 2, 1)), ("n_threads_batch", machine)):
        arguments[name] = arguments.get(name) or min(usual, here)


def plan_load(
    model: Model,
    cap: int | None,
    mechanism: Mechanism | None,
    arguments: dict[str, Any],
    *,
    reserved_bytes: int,
    governed: bool,
    fallbacks: list[str],
) -> Plan:
    """The plan of a load with the parent's ``arguments``, whose batch is cut to what the plan can hold. A cap above
    what this process may use is cut as well, and one above what it could take now where a governor would give that
    back at once (``governed``); ``fallbacks`` says so. Raises BudgetError."""
    n_ctx = arguments.get("n_ctx", DEFAULT_CONTEXT) or model.n_ctx_train
    n_batch = min(n_ctx, arguments.get("n_batch", DEFAULT_STEP))
    if arguments.get("n_batch", 0) > n_ctx:  # the parent allocates for it, and no step can be larger
        arguments["n_batch"] = n_ctx
    asked = arguments.get("n_ubatch")
    box = Box()
    if cap is not None:
        cap = _allowed(cap, box, fallbacks)
    used = process_memory().anon_bytes
    above = _above_what_there_is(cap, mechanism, box, used) if governed else None
    try:
        plan = plan_context(
            model,
            box,
            above.cap_bytes if above else cap,
            mechanism,
            n_ctx=n_ctx,
            n_ubatch=min(n_batch, asked or DEFAULT_STEP),
            base_bytes=process_bytes(model, used) + reserved_bytes,
            held_bytes=used,
            compute_share=1.0 if asked else COMPUTE_SHARE,
            type_k=arguments.get("type_k"),
            type_v=arguments.get("type_v"),
            kv_overrides=model.overrides,
            embeddings=bool(arguments.get("embedding", False)),
            flash_attn=bool(arguments.get("flash_attn", False)),
            n_outputs_max=rows_of_logits(arguments),
            place=place_of(model.paths, box),
        )
    except BudgetError as error:
        raise BudgetError(f"{above.why}: {error}", error.smallest_bytes) if above else error from None
    if above:
        fallbacks.append(f"{above.why}: {format_bytes(plan.cap_bytes)} is taken instead")
    if plan.n_batch < n_batch:
        arguments["n_batch"] = arguments["n_ubatch"] = plan.n_batch
    return plan


def _allowed(cap: int, box: Box, fallbacks: list[str]) -> int:
    """The cap, cut to what this process may use."""
    limit = box.memory_limit()
    # A cgroup keeps its limit in whole pages: less than one is the same number.
    if not cap >= limit.bytes + mmap.PAGESIZE > mmap.PAGESIZE:
        return cap
    fallbacks.append(
        f"the cap {format_bytes(cap)} is above what this process may use: "
        f"{format_bytes(limit.bytes)} ({limit.source}) is taken instead"
    )
    return limit.bytes


@dataclass(frozen=True)
class _Above:
    """Why a cap cannot be had now, and what to plan instead: a container of one's own is taken whole, of a machine
    something is left to others (None)."""

    why: str
    cap_bytes: int | None


def _above_what_there_is(cap: int | None, mechanism: Mechanism | None, box: Box, used: int) -> _Above | None:
    """For a cap of which a governor would give a part back at once; else None. A container's limit is the usual cap,
    and what the kernel charges to it beside the process is within the plan's margin."""
    room = box.room()
    there = room.bytes + used
    if cap is None or cap <= there + MARGIN_BYTES or (mechanism is not None and mechanism.store != "arena"):
        return None
    what = f"{format_bytes(there)} there are for this process now ({room.source})"
    return _Above(
        f"the cap {format_bytes(cap)} is above the {what}", None if room.source == MACHINE else there
    )
