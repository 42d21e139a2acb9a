"""What bounds this process, from directories that stand for machines: memory and CPUs, and who says so."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

import pytest

from box_trees import GIB, v1, v2, write
from moestream.box import Box
from moestream.box.accounts import Swapped, swapped


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        ("max 100000", 4),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("9 0", 4),
        ("junk", 4),
        ("", 4),
        ("x y z", 4),
    ],
)
def test_threads_say_which_quota_bounds_them(tmp_path: Path, quota: str, count: int) -> None:
    root = v2(tmp_path, a__cpu_max=quota, a__b__cpu_max="400000 100000")
    write(root, {"proc/self/status": "Cpus_allowed_list:\t0-3\n"})
    found = Box(root).threads()
    assert found.count == count
    assert ("/sys/fs/cgroup/a/cpu.max" in found.limited_by) == (count < 4)


def test_threads_say_when_an_affinity_bounds_them(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t1,3\n"})
    assert (Box(root).threads().count, Box(root).threads().limited_by) == (2, "")
    write(root, {"sys/devices/system/cpu/online": "0-7\n"})
    assert Box(root).threads().limited_by == "affinity (taskset, a cpuset): 2 of 8 CPUs"
    # lxcfs tells of a container's CPUs, whatever the host lets it run on.
    write(root, {"sys/devices/system/cpu/online": "0\n"})
    assert Box(root).threads().count == 1


@pytest.mark.parametrize(("name", "source"), [("memory.high", "high"), ("memory.max", "max")])
def test_room_says_who_bounds_it(tmp_path: Path, name: str, source: str) -> None:
    root = v2(tmp_path, a__memory_max=4 * GIB, a__memory_high="max", a__b__memory_max="max")
    write(root, {f"sys/fs/cgroup/a/b/{name}": 2 * GIB, "sys/fs/cgroup/a/b/memory.stat": f"anon {GIB}\n"})
    room = Box(root).room()
    assert (room.bytes, room.source) == (GIB, f"/sys/fs/cgroup/a/b/memory.{source}")


@pytest.mark.parametrize("version", [1, 2])
def test_locked_memory_is_held_once_and_file_cache_never(tmp_path: Path, version: int) -> None:
    prefix = "total_" if version == 1 else ""
    kinds = {"inactive_anon": GIB // 4, "active_anon": 0, "unevictable": GIB // 2, "active_file": GIB}
    kinds |= {"rss" if version == 1 else "anon": 3 * GIB // 4, "shmem": 0, "inactive_file": GIB}
    stat = "".join(f"{prefix}{name} {value}\n" for name, value in kinds.items())
    top = "sys/fs/cgroup/memory/job" if version == 1 else "sys/fs/cgroup/a"
    root = v1(tmp_path, "/job") if version == 1 else v2(tmp_path)
    limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
    write(root, {f"{top}/{limit}": 2 * GIB, f"{top}/memory.stat": stat})
    assert Box(root).available_memory() == 2 * GIB - 3 * GIB // 4
    if version == 2:
        write(
            root,
            {f"{top}/memory.stat": stat + "slab_unreclaimable 4096\nslab_reclaimable 8192\npagetables 512\n"},
        )
        assert Box(root).available_memory() == 2 * GIB - 3 * GIB // 4 - 4096 - 512


def test_hybrid_takes_the_least_of_both_versions(tmp_path: Path) -> None:
    """Memory by version 1; version 2 beside it, with a controller of its own."""
    root = v1(tmp_path, "/job")
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/job\n0::/app\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 3 * GIB,
            "sys/fs/cgroup/unified/app/memory.max": "max\n",
        },
    )
    assert Box(root).memory_limit().source == "/sys/fs/cgroup/memory/job/memory.limit_in_bytes"
    write(
        root,
        {"sys/fs/cgroup/unified/app/memory.high": 2 * GIB, "proc/self/status": "Cpus_allowed_list: 0-3\n"},
    )
    assert Box(root).memory_limit().source == "/sys/fs/cgroup/unified/app/memory.high"
    write(root, {"sys/fs/cgroup/unified/app/cpu.max": "200000 100000\n"})
    assert Box(root).threads().count == 2


# -- what may be missing --


@pytest.mark.parametrize(
    ("meminfo", "expected"),
    [
        ("MemTotal: 100 kB\nMemFree: 10 kB\nBuffers: 5 kB\nCached: 30 kB\nShmem: 20 kB\n", 25),
        ("MemTotal: 100 kB\nMemFree: 10 kB\nCached: 1 kB\nShmem: 2 kB\n", 10),
        ("MemTotal: 100 kB\nMemAvailable: 40 kB\nMemFree: 10 kB\nCached: 99 kB\n", 40),
        ("MemTotal: much kB\nbroken\n", 0),
        ("", 0),
    ],
)
def test_meminfo_without_memavailable(tmp_path: Path, meminfo: str, expected: int) -> None:
    root = write(tmp_path, {"proc/meminfo": meminfo, "proc/self/cgroup": "broken\n0::/\n"})
    assert Box(root).available_memory() == expected * 1024
    assert Box(root).stalled_percent() == 0.0


def test_numa_nodes(tmp_path: Path) -> None:
    assert Box(tmp_path).numa_nodes() == 1
    root = write(tmp_path, {"sys/devices/system/node/has_memory": "0\n"})
    assert Box(root).numa_nodes() == 1
    write(root, {"sys/devices/system/node/has_memory": "0-1,3\n"})
    assert Box(root).numa_nodes() == 3


def test_swap_is_this_processs_unless_its_cgroup_forbids_it(tmp_path: Path) -> None:
    swaps = {"proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 1024 0 100\n"}
    second = v2(tmp_path / "2", a__memory_max=GIB)
    assert not Box(second).may_swap()
    assert Box(write(second, swaps)).may_swap()
    assert not Box(write(second, {"sys/fs/cgroup/a/memory.swap.max": "0\n"})).may_swap()
    first = write(v1(tmp_path / "1", "/job"), swaps)
    top = "sys/fs/cgroup/memory/job"
    write(first, {f"{top}/memory.limit_in_bytes": GIB, f"{top}/memory.memsw.limit_in_bytes": 2 * GIB})
    assert Box(first).may_swap()
    assert not Box(write(first, {f"{top}/memory.memsw.limit_in_bytes": GIB})).may_swap()


def test_what_was_swapped_is_counted_from_a_beginning(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/vmstat": "pswpin 1\npswpout 2\nbroken\nnr_x much\n"})
    before = swapped(root)
    write(root, {"proc/vmstat": "pswpin 4\npswpout 9\n"})
    assert swapped(root).since(before) == Swapped(3 * PAGESIZE, 7 * PAGESIZE)
    assert swapped(tmp_path / "nothing") == Swapped(0, 0)
