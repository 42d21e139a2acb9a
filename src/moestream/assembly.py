"""What a load is put together from: the core's engine for a mechanism, llama.cpp over it, and the budget it is given at
the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moestream.binding import binding_version, libllama_path, node_callback, wrapped_defaults
from moestream.box import cache_directory, process_memory
from moestream.core import _core
from moestream.errors import (
    AbiError,
    BudgetError,
    EngagementError,
    MoestreamError,
    ReadError,
    RefusedError,
    UsageError,
)
from moestream.geometry import slab_geometry, split_budget
from moestream.mechanism import Mechanism
from moestream.model import Model
from moestream.plan import Plan
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
            max_mappings=plan.max_mappings,
            closed=plan.closed,
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


@contextmanager
def over_the_store(engine: Any, outputs: int) -> Iterator[None]:
    """While inside, the binding's constructor loads over the core's ``engine``: its default parameters are completed
    (``outputs``: most rows of logits, 0 for llama.cpp's own default) and its mappings answered. Raises what the core
    raises, whatever the binding made of it."""

    def model_params(params: Any) -> None:
        params.use_extra_bufts = False

    def context_params(params: Any) -> None:
        params.cb_eval = node_callback(engine.node_callback)
        params.cb_eval_user_data = engine.address
        params.op_offload = False
        if outputs:
            params.n_outputs_max = outputs

    loaded = False
    try:
        engine.begin_load()
        try:
            with wrapped_defaults(model_params, context_params):
                yield
            loaded = True
        finally:
            engine.end_load(loaded)
    except _core.CoreError as error:
        raise translate(error) from None


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
