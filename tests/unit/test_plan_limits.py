"""What a load needs beside memory, held against limits that are told: refusals name the number that is enough."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from box_trees import GIB, v2, write
from children import python
from ggufs import moe_tensors, write_gguf
from moestream.box import Bound, Box, Limit, ProcessLimits
from moestream.errors import RefusedError
from moestream.geometry import PAGE, slab_geometry
from moestream.mechanism import Mechanism
from moestream.model import Model, read_model
from moestream.plan import ContextSizes, Plan, make_plan
from moestream.plan_limits import check_before, files_needed, within
from moestream.plan_load import complete

MIB = 1 << 20
_SIZES = ContextSizes(kv_bytes=10 * MIB, compute_bytes=4 * MIB, output_bytes=MIB)


class _Box:
    def room(self) -> Limit:
        return Limit(64 * GIB, "MemAvailable")

    def limits(self) -> ProcessLimits:
        return ProcessLimits()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    return read_model(write_gguf(path, moe_tensors(2, n_embd=256, n_ff=256)))


def plan_of(model: Model, text: str) -> Plan:
    return make_plan(model, _Box(), GIB, Mechanism.parse(text), _SIZES)


@pytest.mark.parametrize("mechanism", ["arena", "arena/fresh", "resident", "mapped+willneed+anon", "shared"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("address", r"address space .*: `ulimit -v (\d+)` \(systemd: LimitAS=(\d+)\)"),
        ("data", r"writable memory .*: `ulimit -d (\d+)` \(systemd: LimitDATA=(\d+)\)"),
    ],
)
def test_the_number_told_is_enough(name: str, said: str, mechanism: str, model: Model) -> None:
    plan, used = plan_of(model, mechanism), 300 * MIB
    with pytest.raises(RefusedError) as refused:
        within(plan, model, ProcessLimits(**{name: Bound(used + MIB, used)}))
    found = re.search(said, str(refused.value))
    assert found is not None, refused.value
    kib, whole = int(found[1]), int(found[2])
    assert whole <= kib * 1024 < whole + 1024
    assert within(plan, model, ProcessLimits(**{name: Bound(whole, used)})).warnings == plan.warnings
    with pytest.raises(RefusedError):
        within(plan, model, ProcessLimits(**{name: Bound(whole - 1, used)}))


def committed(plan: Plan, model: Model) -> int:
    """The least that may be left to commit for a load to be let through."""
    low, high = 0, 1 << 34
    while high - low > 1:
        middle = (low + high) // 2
        try:
            within(plan, model, ProcessLimits(commit=Bound(middle, 0)))
            high = middle
        except RefusedError:
            low = middle
    return high


def test_what_is_committed_is_what_is_held(model: Model) -> None:
    """Under overcommit 2: of an arena what it holds, of everything in memory the model, of a file's mapping nothing."""
    nothing = committed(plan_of(model, "mapped+willneed"), model)
    whole = -(-model.bytes // PAGE) * PAGE
    assert committed(plan_of(model, "resident"), model) - nothing == whole
    arena = plan_of(model, "arena/fresh")
    for expert_bytes in (0, MIB):
        held = committed(dataclasses.replace(arena, expert_bytes=expert_bytes), model) - nothing
        assert held == slab_geometry(model).resident_bytes + expert_bytes
    assert committed(plan_of(model, "arena/thp"), model) - nothing == whole
    with pytest.raises(RefusedError, match=r"to commit \(vm.overcommit_memory is 2\).*mapped\+willneed"):
        within(arena, model, ProcessLimits(commit=Bound(0, 0)))


def test_what_is_told_before_the_context_is_asked_for(model: Model) -> None:
    needed = files_needed(model)
    check_before(model, None, ProcessLimits(files=Bound(20 + needed, 20)))
    with pytest.raises(RefusedError, match=f"raise `ulimit -n` to {20 + needed} .*LimitNOFILE=.*nofile="):
        check_before(model, None, ProcessLimits(files=Bound(19 + needed, 20)))
    with pytest.raises(RefusedError, match=r"arena needs at least .* of address space and 1.05 MB is left"):
        check_before(model, Mechanism.parse("arena"), ProcessLimits(address=Bound(MIB, 0)))


def test_mappings(model: Model) -> None:
    plan = plan_of(model, "arena")
    slabs = 2 * 2 * 3 * 8  # a mapping and a gap: layers, tensors, experts; all of them fit
    assert not any("mappings" in reason for reason in within(plan, model, ProcessLimits()).reasons)
    with pytest.raises(RefusedError, match=f"takes {slabs} memory mappings and vm.max_map_count allows 90"):
        within(plan, model, ProcessLimits(mappings=90))
    small = dataclasses.replace(plan, capacities=(4,))
    assert any("mapped again at once" in r for r in within(small, model, ProcessLimits(mappings=90)).reasons)
    within(plan_of(model, "arena/fresh"), model, ProcessLimits(mappings=90))


@pytest.mark.parametrize("mechanism", ["arena+mlock", "mapped+willneed+mlock", "resident+mlock"])
def test_locks_name_all_three_remedies(mechanism: str, model: Model) -> None:
    plan = plan_of(model, mechanism)
    (line,) = [
        reason
        for reason in within(plan, model, ProcessLimits(lock=Bound(8192, 4096))).reasons
        if reason.startswith("lock:")
    ]
    found = re.search(r"`ulimit -l (\d+)` .*LimitMEMLOCK=(\d+), docker: --ulimit memlock=(\d+)\)", line)
    assert found is not None, line
    assert found[2] == found[3]
    enough = ProcessLimits(lock=Bound(int(found[2]), 4096))
    assert within(plan, model, enough).reasons == plan.reasons


def test_swap_and_nodes_are_warned_of(model: Model) -> None:
    limits = ProcessLimits(swap="2.00 GB of zram", numa_nodes=2)
    swap, nodes = within(plan_of(model, "arena"), model, limits).warnings
    assert swap.startswith("swap is on (2.00 GB of zram)")
    assert "memory.swap.max" in swap
    assert nodes.startswith("2 NUMA nodes")
    (nodes,) = within(plan_of(model, "mapped+willneed"), model, limits).warnings
    assert nodes.startswith("2 NUMA nodes")


@pytest.mark.parametrize("name", ["memory.high", "memory.max"])
def test_the_plan_names_who_bounds_the_memory(name: str, model: Model, tmp_path: Path) -> None:
    root = v2(tmp_path, a__memory_max=8 * GIB)
    box = Box(write(root, {f"sys/fs/cgroup/a/b/{name}": GIB, "sys/fs/cgroup/a/b/memory.stat": "anon 0\n"}))
    plan = make_plan(model, box, None, Mechanism.parse("arena"), _SIZES)
    assert f"1.07 GB available (/sys/fs/cgroup/a/b/{name}) less" in plan.reasons[0]
    over = make_plan(model, box, 4 * GIB, Mechanism.parse("arena"), _SIZES)
    assert any(f"(/sys/fs/cgroup/a/b/{name})" in warning for warning in over.warnings)


# -- as a box reads them --

_LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max data size             unlimited            unlimited            bytes     \n"
    "Max locked memory         65536                8388608              bytes     \n"
    "Max open files            1024                 4096                 files     \n"
    "Max address space         2147483648           unlimited            bytes     \n"
)
_STATUS = (
    "VmSize:\t  1000 kB\nVmData:\t  500 kB\nVmLck:\t 8 kB\nCapEff:\t{capabilities}\nCpus_allowed_list:\t0-3\n"
)


def test_limits_are_this_processs_own(tmp_path: Path) -> None:
    tree = {"proc/self/limits": _LIMITS, "proc/self/status": _STATUS.format(capabilities="00000000a80425fb")}
    limits = Box(write(tmp_path, {**tree, "proc/self/fd/0": "", "proc/self/fd/1": ""})).limits()
    assert limits.address == Bound(2 * GIB, 1000 * 1024)
    assert (limits.data, limits.commit) == (None, None)
    assert limits.lock == Bound(8 * MIB, 8 * 1024)
    assert limits.files == Bound(4096, 2)
    assert (limits.threads, limits.swap, limits.numa_nodes) == (4, "", 1)


@pytest.mark.parametrize(("users", "free"), [("0 0 4294967295", True), ("0 100000 65536", False), ("", True)])
def test_the_leave_to_lock_counts_outside_of_user_namespaces(tmp_path: Path, users: str, free: bool) -> None:
    status = _STATUS.format(capabilities="000001ffffffffff")
    tree = {"proc/self/limits": _LIMITS, "proc/self/status": status, "proc/self/uid_map": users}
    box = Box(write(tmp_path, tree))
    assert (box.limits().lock is None) == free
    assert box.memlock_limit_bytes() == (None if free else 8 * MIB)


def test_what_may_be_committed_counts_where_it_is_kept(tmp_path: Path) -> None:
    meminfo = "MemTotal: 1024 kB\nCommitLimit: 900 kB\nCommitted_AS: 1000 kB\n"
    box = Box(write(tmp_path, {"proc/meminfo": meminfo, "proc/sys/vm/overcommit_memory": "0\n"}))
    assert box.limits().commit is None
    write(tmp_path, {"proc/sys/vm/overcommit_memory": "2\n"})
    commit = box.limits().commit
    assert commit == Bound(900 * 1024, 1000 * 1024)
    assert commit.left == 0


def test_swap_is_said_by_kind(tmp_path: Path) -> None:
    root = v2(tmp_path, a__memory_max=GIB)
    write(root, {"proc/swaps": "Filename Type Size Used\n/dev/zram0 partition 1024 0\n/swap file 2048 0\n"})
    write(root, {"sys/module/zswap/parameters/enabled": "Y\n"})
    assert Box(root).limits().swap == "1.05 MB of zram, 2.10 MB of file, packed by zswap"


def test_a_machine_that_tells_nothing_bounds_nothing(tmp_path: Path) -> None:
    limits = Box(tmp_path / "nothing").limits()
    assert dataclasses.replace(limits, threads=1, files=None) == ProcessLimits()


def test_no_more_threads_by_default_than_ggml_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestream.plan_load.multiprocessing.cpu_count", lambda: 1536)
    monkeypatch.setattr(Box, "cpus", lambda _: 768)
    arguments: dict[str, Any] = {}
    complete(arguments, [])
    assert (arguments["n_threads"], arguments["n_threads_batch"]) == (512, 512)


def test_trying_threads_takes_no_address_space_that_stays() -> None:
    """An allocation in each would keep 64 MiB of it: the limit that was said to be enough would not be."""
    program = (
        "from moestream.core import _core\n"
        "def mapped():\n"
        "    return int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "before = mapped()\n"
        "print(_core.startable_threads(16), mapped() - before)"
    )
    started, kept = map(int, python(program).split())
    assert started == 16
    assert kept < 128 << 20  # a few stacks, which the next threads have
