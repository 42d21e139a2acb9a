"""What a load is put together from: the core's engine for a mechanism, and the budget it is given at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moestream.binding import binding_version, libllama_path
from moestream.box import MACHINE, Box, cache_directory, place_of, process_memory
from moestream.core import _core
from moestream.dryrun import COMPUTE_SHARE, DEFAULT_STEP, plan_context, rows_of_logits
from moestream.errors import (
    AbiError,
    BudgetError,
    EngagementError,
    ModelError,
    MoestreamError,
    ReadError,
    RefusedError,
    UsageError,
)
from moestream.geometry import slab_geometry, split_budget
from moestream.guard import check_values, ignored
from moestream.mechanism import Mechanism
from moestream.model import Model
from moestream.plan import MARGIN_BYTES, Plan, process_bytes
from moestream.plan_limits import closes
from moestream.units import format_bytes
from moestream.version import INSTALL_TESTED

Progress = Callable[[int, int], None]

_KINDS: dict[str, type[MoestreamError]] = {
    "usage": UsageError,
    "refused": RefusedError,
    "unsupported": RefusedError,
    "io": ReadError,
    "abi": AbiError,
}
_ALIGNMENTS = {"align4k": 4 << 10, "align16k": 16 << 10, "align2m": 2 << 20}
#: What every box has, where the reader or the source of pages asked for is refused.
_FALLBACK_READER, _FALLBACK_PAGES = "threads:4", "fresh"


def translate(error: Exception) -> MoestreamError:
    """The core's error as one of ours."""
    kind, text = error.args if len(error.args) == 2 else ("internal", str(error))
    if kind == "abi":
        text += f" (found llama-cpp-python {binding_version()}): {INSTALL_TESTED}"
    return _KINDS.get(kind, MoestreamError)(text)


def check_names(model: Model) -> None:
    """Raises ModelError for a name that the binding, which hands llama.cpp UTF-8, cannot say."""
    for path in model.paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            remedy = "rename it, or make a link to it"
            with contextlib.suppress(UnicodeDecodeError):
                os.fsencode(path).decode()
                remedy = "this locale has another encoding: set LC_ALL=C.UTF-8"
            raise ModelError(
                f"{path}: its name is not UTF-8, which llama-cpp-python needs: {remedy}"
            ) from None


def complete(arguments: dict[str, Any], fallbacks: list[str]) -> None:
    """The parent's defaults, but that it says nothing, and that of the processors it counts no more are used than this
    process may use at once. ``fallbacks`` is told of words it has no use for. Raises UsageError for a
    value that llama.cpp would crash over."""
    check_values(arguments)
    fallbacks += ignored(arguments)
    arguments.setdefault("verbose", False)
    machine, here = multiprocessing.cpu_count(), Box().cpus()
    for name, usual in (("n_threads", max(machine // 2, 1)), ("n_threads_batch", machine)):
        arguments[name] = arguments.get(name) or min(usual, here)


def core_tensors(model: Model) -> list[tuple[str, int, int, int, int, int]]:
    """The expert tensors as the core takes them: name, bank, shard, offset, slab_bytes, count."""
    return [
        (tensor.name, tensor.bank, tensor.shard, tensor.offset, tensor.slab_bytes, tensor.count)
        for bank in model.banks
        for tensor in bank.tensors
    ]


def load_seeds(mechanism: Mechanism, model: Model) -> dict[str, Any]:
    """What the files that a mechanism names hold, as ``_core.Engine`` takes it; empty where it names none. Raises
    RefusedError for a file of another model."""
    policy, predictor = mechanism.file_of("policy"), mechanism.file_of("predictor")
    if policy is None and predictor is None:
        return {}
    from moestream import seeds

    found: dict[str, Any] = {}
    if policy is not None:
        found["priority"] = seeds.load_priorities(policy, model.identity)
    if predictor is not None:
        name = mechanism.predictor.partition(":")[0]
        found |= {"ridge": seeds.load_ridge, "oracle": seeds.load_oracle}[name](predictor, model.identity)
    return found


def build_core(
    model: Model,
    plan: Plan,
    seeds: dict[str, Any],
    *,
    strict: bool,
    interpose: bool,
    on_progress: Progress | None,
    fallbacks: list[str],
) -> tuple[Any, Plan]:
    """The core's engine for a plan, and the plan with the mechanism it got: a reader or a source of pages that this box
    refuses is replaced, which is said in ``fallbacks``, or with ``strict`` an EngagementError. Raises RefusedError,
    AbiError, UsageError."""
    mechanism = plan.mechanism
    trunk = model.n_layers - model.n_mtp_layers
    limits = Box().limits()

    def build(mechanism: Mechanism) -> Any:
        return _core.Engine(
            shards=[(str(shard.path), shard.bytes) for shard in model.shards],
            tensors=core_tensors(model),
            layers=[bank.layer for bank in model.banks],
            optional_banks=[bank.layer >= trunk or bank.kind != "routed" for bank in model.banks],
            libllama=libllama_path(),
            store=mechanism.store,
            reader=mechanism.reader,
            policy=mechanism.without_file("policy"),
            predictor=mechanism.without_file("predictor"),
            dense=mechanism.dense,
            direct=mechanism.one_of("direct", "buffered", "cached") == "direct",
            keep_cached=mechanism.has("cached"),
            advice=mechanism.one_of("normal", "random", "sequential"),
            pages=mechanism.one_of("recycle", "fresh", "populate", "thp"),
            max_mappings=limits.mappings,
            closed=closes(mechanism, limits),
            alignment=_ALIGNMENTS[mechanism.one_of(*_ALIGNMENTS)],
            huge=mechanism.has("huge"),
            copy_dir=str(cache_directory()),
            seeds=seeds,
            interpose=interpose,
            fallback=fallbacks.append,
            progress=on_progress or (lambda done, total: None),
        )

    if mechanism.store == "arena" and mechanism.has("recycle") and (lack := _core.abilities()["mremap"]):
        if strict:
            raise EngagementError(f"not as asked: {lack}")
        fallbacks.append(f"{lack}: pages are dropped and had anew (arena/{_FALLBACK_PAGES}), not moved")
        mechanism = dataclasses.replace(mechanism, variants=(*mechanism.variants, _FALLBACK_PAGES))
    try:
        engine = build(mechanism)
    except _core.CoreError as error:
        if error.args[0] != "unsupported":
            raise translate(error) from None
        if strict or mechanism.store == "mapped":
            raise EngagementError(f"not as asked: {error.args[1]}") from None
        fallbacks.append(f"{error.args[1]}: {_FALLBACK_READER} instead of {mechanism.reader}")
        mechanism = dataclasses.replace(mechanism, reader=_FALLBACK_READER)
        engine = build(mechanism)
    return engine, dataclasses.replace(plan, mechanism=mechanism)


def plan_load(
    model: Model,
    cap: int | None,
    mechanism: Mechanism | None,
    arguments: dict[str, Any],
    *,
    recording_bytes: int,
    governed: bool,
    fallbacks: list[str],
) -> Plan:
    """The plan of a load with the parent's ``arguments``, whose batch is cut to what the plan can hold. A cap above
    what this process may use is cut as well, and one above what it could take now where a governor would give that
    back at once (``governed``); ``fallbacks`` says so. Raises BudgetError."""
    n_ctx = arguments.get("n_ctx", 512) or model.n_ctx_train
    n_batch = min(n_ctx, arguments.get("n_batch", DEFAULT_STEP))
    if arguments.get("n_batch", 0) > n_ctx:  # the parent allocates for it, and no step can be larger
        arguments["n_batch"] = n_ctx
    asked = arguments.get("n_ubatch")
    box = Box()
    limit = box.memory_limit()
    # A cgroup keeps its limit in whole pages: less than one is the same number.
    if cap is not None and cap >= limit.bytes + mmap.PAGESIZE > mmap.PAGESIZE:
        fallbacks.append(
            f"the cap {format_bytes(cap)} is above what this process may use: "
            f"{format_bytes(limit.bytes)} ({limit.source}) is taken instead"
        )
        cap = limit.bytes
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
            base_bytes=process_bytes(model, used) + recording_bytes,
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


def give_budget(
    engine: Any, model: Model, plan: Plan, limit: int | None, fallbacks: list[str], reserved: int = 0
) -> Plan:
    """Measure what the process uses now and give the rest of the cap (at most ``limit`` bytes) to experts, but for
    ``reserved`` bytes that something else will take.

    Returns the plan as it came out: ``expert_bytes``, ``capacities``, ``n_batch``, ``other_bytes``. Raises
    BudgetError when too little is left, and what the core raises.
    """
    if not plan.mechanism.cached:
        return plan
    geometry = slab_geometry(model)
    used = process_memory().anon_bytes
    # The compute buffers are reserved but not yet touched; everything else of the context is.
    budget = plan.cap_bytes - used - plan.compute_bytes - plan.margin_bytes - reserved
    wanted = min(budget, geometry.frame_bytes_total)
    if limit is not None:
        wanted = min(wanted, limit)
    n_batch = plan.n_batch
    # The plan estimated; where the process turned out larger, smaller steps need fewer experts at once.
    while n_batch > 1 and geometry.bytes_of(geometry.smallest(n_batch)) > wanted:
        n_batch //= 2
    try:
        capacities = split_budget(geometry, wanted, n_batch)
    except BudgetError as error:
        lacking = geometry.bytes_of(geometry.smallest(1)) - budget
        raise BudgetError(
            f"after loading, {format_bytes(used)} of the cap of {format_bytes(plan.cap_bytes)} are in use "
            f"and too little is left for experts: {error}",
            plan.cap_bytes + lacking,
        ) from None
    huge_before = process_memory().huge_bytes
    try:
        engine.set_budget(capacities=capacities, growth_limit=budget if plan.mechanism.store == "cow" else 0)
    except _core.CoreError as error:
        raise translate(error) from None
    expert_bytes = geometry.bytes_of(capacities)
    if plan.mechanism.has("recycle"):
        huge = process_memory().huge_bytes - huge_before
        if huge < expert_bytes // 2:
            fallbacks.append(
                f"huge pages hold {format_bytes(max(huge, 0))} of the {format_bytes(expert_bytes)} for experts: "
                "reads come in more, smaller pieces (see /sys/kernel/mm/transparent_hugepage)"
            )
    dense = engine.counters["dense_bytes"]
    return dataclasses.replace(
        plan,
        expert_bytes=expert_bytes,
        capacities=tuple(capacities),
        n_batch=n_batch,
        other_bytes=max(0, used - dense - plan.kv_bytes),
    )
