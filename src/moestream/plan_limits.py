"""What a load needs beside memory, held against what bounds this process: told before anything is loaded.

Pure functions of a model, a plan and the limits as a box reads them. What is needed is an upper bound: a load with
just that much goes through.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from moestream.errors import RefusedError
from moestream.geometry import PAGE, slab_geometry
from moestream.mechanism import Mechanism
from moestream.units import format_bytes

if TYPE_CHECKING:
    from moestream.box import Bound, ProcessLimits
    from moestream.model import Model
    from moestream.plan import Plan

_HUGE = 2 << 20
#: Address space of a running model beside what is planned: of each thread (a stack of 8 MiB), and of the binding, the
#: index and the readers (7 to 10 MB measured where something bounds it).
THREAD_BYTES, OWN_BYTES = 10 << 20, 48 << 20
#: Stores whose regions are memory of the process's own, by the kernel's account, touched or not.
_PRIVATE_STORES = ("arena", "resident", "cow")
#: Descriptors of a shard: ours with and without the page cache, and llama.cpp's own; and those of everything else.
FILES_A_SHARD, OTHER_FILES = 3, 32
#: Of the mappings a process may have, what an arena may use: the core's own share.
_ARENA_MAPPINGS = 9 / 10


def files_needed(model: Model) -> int:
    """Files a load opens, at most at once."""
    return FILES_A_SHARD * len(model.shards) + OTHER_FILES


def check_before(model: Model, mechanism: Mechanism | None, limits: ProcessLimits) -> None:
    """What can be told before llama.cpp is asked for the context's sizes: files, and address space for the model alone.
    Raises RefusedError."""
    files = files_needed(model)
    if limits.files is not None and limits.files.left < files:
        raise RefusedError(
            f"this model (shards: {len(model.shards)}) takes {files} open files and {limits.files.left} may be opened: "
            f"raise `ulimit -n` to {limits.files.used + files} (systemd: LimitNOFILE=, docker: --ulimit nofile=)"
        )
    store = mechanism.store if mechanism is not None else "the model"
    region = _region_bytes(model, mechanism)
    closed = mechanism is not None and _closes(mechanism, limits)
    private = region if store in _PRIVATE_STORES and not closed else 0
    own = _own_bytes(limits)
    _check_space(store, "at least ", region + own, private + own, limits)


def within(plan: Plan, model: Model, limits: ProcessLimits) -> Plan:
    """The plan, with what the limits mean for it: for its arena, and among its reasons and warnings. Raises
    RefusedError where the load would end in the middle of it."""
    mechanism = plan.mechanism
    plan = dataclasses.replace(plan, closed=_closes(mechanism, limits), max_mappings=limits.mappings)
    context = plan.kv_bytes + plan.compute_bytes + _own_bytes(limits)
    pool = _pool_bytes(plan, model)
    private = _private_bytes(plan, model) + pool + context
    _check_space(mechanism.store, "", _region_bytes(model, mechanism) + pool + context, private, limits)
    reasons = [*_mappings(plan, model), *_locks(plan, model, limits)]
    warnings = []
    if limits.swap and (mechanism.store != "mapped" or mechanism.dense == "anon"):
        warnings.append(
            f"swap is on ({limits.swap}): under pressure the kernel may swap what {mechanism.store} holds, which is "
            "slower than reading it again: `swapoff -a`, or a cgroup whose memory.swap.max is 0"
        )
    if limits.numa_nodes > 1:
        warnings.append(
            f"{limits.numa_nodes} NUMA nodes: speeds depend on the node a page lies on, those of two runs compare only "
            "under the same numactl"
        )
    return dataclasses.replace(plan, reasons=(*plan.reasons, *reasons), warnings=(*plan.warnings, *warnings))


def _up(count: int, unit: int) -> int:
    return math.ceil(count / unit) * unit


def _own_bytes(limits: ProcessLimits) -> int:
    return OWN_BYTES + limits.threads * THREAD_BYTES


def _region_bytes(model: Model, mechanism: Mechanism | None) -> int:
    """A store's regions: as long as the shards, each at the alignment asked for."""
    slack = _HUGE if mechanism is not None and mechanism.has("align2m") else 0
    return sum(_up(shard.bytes, PAGE) + slack for shard in model.shards)


def _closes(mechanism: Mechanism, limits: ProcessLimits) -> bool:
    """Does an arena keep what has no pages closed, so that it is not committed? A move takes three calls more then."""
    return mechanism.store == "arena" and not mechanism.has("thp") and limits.commit is not None


def _private_bytes(plan: Plan, model: Model) -> int:
    mechanism = plan.mechanism
    if plan.closed:
        frames = 0 if mechanism.has("recycle") else plan.expert_bytes
        return slab_geometry(model).resident_bytes + frames
    if mechanism.store in _PRIVATE_STORES:
        return _region_bytes(model, mechanism)
    return plan.dense_bytes + plan.boundary_bytes if mechanism.dense == "anon" else 0


def _pool_bytes(plan: Plan, model: Model) -> int:
    """Where the arena's pages lie until they are first used: beside the regions."""
    if plan.mechanism.store != "arena" or not plan.mechanism.has("recycle"):
        return 0
    parts = zip(slab_geometry(model).parts, plan.capacities, strict=True)
    return sum(_up(part.frame_bytes * capacity, _HUGE) + _HUGE for part, capacity in parts)


def _check_space(what: str, least: str, address: int, private: int, limits: ProcessLimits) -> None:
    _check(
        what, least, "address space", address, limits.address, "`ulimit -v {kib}` (systemd: LimitAS={bytes})"
    )
    _check(
        what, least, "writable memory", private, limits.data, "`ulimit -d {kib}` (systemd: LimitDATA={bytes})"
    )
    remedy = "`sysctl vm.overcommit_memory=0`, or --mechanism mapped+willneed, which commits no experts"
    _check(what, least, "memory to commit (vm.overcommit_memory is 2)", private, limits.commit, remedy)


def _check(what: str, least: str, kind: str, needed: int, bound: Bound | None, remedy: str) -> None:
    if bound is None or needed <= bound.left:
        return
    total = bound.used + needed
    raise RefusedError(
        f"{what} needs {least}{format_bytes(needed)} of {kind} and {format_bytes(bound.left)} is left: "
        + remedy.format(kib=math.ceil(total / 1024), bytes=total)
    )


def _mappings(plan: Plan, model: Model) -> list[str]:
    """A slab with pages is a mapping of its own, and so is the gap behind it: what of an arena this means."""
    if plan.mechanism.store != "arena" or not plan.mechanism.has("recycle"):
        return []
    geometry = slab_geometry(model)
    slabs = 2 * sum(model.banks[b].count * len(part.pages) for part in geometry.parts for b in part.banks)
    held = 2 * sum(
        len(part.pages) * capacity for part, capacity in zip(geometry.parts, plan.capacities, strict=True)
    )
    room = int(plan.max_mappings * _ARENA_MAPPINGS)
    if held > room:
        raise RefusedError(
            f"this budget takes {held} memory mappings and vm.max_map_count allows {plan.max_mappings}: "
            f"`sysctl vm.max_map_count={math.ceil(held / _ARENA_MAPPINGS) + 1}`, or less memory for experts"
        )
    if slabs > room:
        return [
            f"mappings: {slabs} for all slabs are more than vm.max_map_count ({plan.max_mappings}) allows, so what "
            "pages leave is mapped again at once, which takes some CPU"
        ]
    return []


def _locks(plan: Plan, model: Model, limits: ProcessLimits) -> list[str]:
    if plan.mechanism.dense != "mlock" or limits.lock is None:
        return []
    # What a mapped store locks is the file's, and not in the plan.
    wanted = model.bytes if plan.mechanism.store == "resident" else slab_geometry(model).resident_bytes
    if wanted <= limits.lock.left:
        return []
    total = limits.lock.used + wanted
    return [
        f"lock: {format_bytes(limits.lock.left)} of {format_bytes(wanted)} may be locked, the rest can be paged out: "
        f"`ulimit -l {math.ceil(total / 1024)}` (systemd: LimitMEMLOCK={total}, docker: --ulimit memlock={total})"
    ]
