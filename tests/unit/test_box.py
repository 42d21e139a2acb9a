"""The box's facts from directories that stand for machines, and the probes on real files."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from box_trees import GIB, MEMINFO, ROOT_MOUNT, V1_UNLIMITED, v1, v2, write
from moestream.box import (
    Box,
    DiskRate,
    device_name,
    direct_io_alignment,
    disk_rate,
    faults,
    peak_rss_bytes,
    place_of,
    process_io,
    process_memory,
)
from moestream.box.cgroup import groups


def test_no_cgroup_no_limit(tmp_path: Path) -> None:
    box = Box(write(tmp_path, {"proc/meminfo": MEMINFO}))
    assert (box.memory_limit().bytes, box.memory_limit().source) == (16 * GIB, "MemTotal")
    assert box.available_memory() == 12 * GIB


def test_v2_max_means_no_limit(tmp_path: Path) -> None:
    box = Box(v2(tmp_path, a__b__memory_max="max\n", a__b__memory_high="max\n", a__memory_max="max\n"))
    assert box.memory_limit().source == "MemTotal"


@pytest.mark.parametrize("file", ["a__memory_max", "a__memory_high", "a__b__memory_max", "a__b__memory_high"])
def test_v2_takes_the_lowest_of_all_ancestors(tmp_path: Path, file: str) -> None:
    files = {"a__memory_max": "max", "a__b__memory_max": 8 * GIB, file: 2 * GIB}
    limit = Box(v2(tmp_path, **files)).memory_limit()
    assert limit.bytes == 2 * GIB
    assert limit.source == "/sys/fs/cgroup/" + file.replace("__", "/").replace("memory_", "memory.")


def test_v2_file_cache_is_room(tmp_path: Path) -> None:
    held = f"anon {GIB}\nfile {2 * GIB}\nunevictable 0\nshmem 4096\nslab_unreclaimable 8192\n"
    root = v2(tmp_path, a__memory_max=4 * GIB, a__memory_current=3 * GIB, a__memory_stat=held)
    assert Box(root).available_memory() == 3 * GIB - 4096 - 8192


def test_v2_in_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", memory_max=3 * GIB)
    write(root, {"proc/self/cgroup": "0::/../../docker/0123\n"})
    assert Box(root).memory_limit().bytes == 3 * GIB


def test_v1_unlimited_and_nested(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    root = v1(tmp_path, "/job/step")
    write(
        root,
        {
            f"{top}/memory.limit_in_bytes": V1_UNLIMITED,
            f"{top}/job/memory.limit_in_bytes": 5 * GIB,
            f"{top}/job/memory.stat": f"total_rss {GIB}\ntotal_cache {4 * GIB}\ntotal_unevictable 4096\n",
            f"{top}/job/step/memory.limit_in_bytes": V1_UNLIMITED,
        },
    )
    box = Box(root)
    assert (box.memory_limit().bytes, box.memory_limit().source) == (
        5 * GIB,
        f"/{top}/job/memory.limit_in_bytes",
    )
    assert box.available_memory() == 4 * GIB - 4096


def test_v1_in_a_container_whose_ancestors_are_hidden(tmp_path: Path) -> None:
    root = v1(tmp_path, "/docker/0123", mounted="/docker/0123")
    write(
        root,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {2 * GIB}\n",
        },
    )
    assert Box(root).memory_limit().source.endswith("memory/hierarchical_memory_limit")
    assert [group.path for group in groups(root, "memory") if group.version == 1] == [
        root / "sys/fs/cgroup/memory"
    ]


# -- LXC: what a container sees of cgroups and of memory, by its version and whether it has a cgroup namespace --

_LXCFS = "".join(
    f"9{number} 27 0:50 /proc/{name} /proc/{name} rw,nosuid - fuse.lxcfs lxcfs rw,user_id=0,allow_other\n"
    for number, name in enumerate(("meminfo", "swaps", "uptime"))
)
#: The container's own figures, as lxcfs writes them: less than the host has, some lines without a unit.
_LXCFS_MEMINFO = (
    f"MemTotal:       {2 * GIB // 1024} kB\nMemFree:        {GIB // 1024} kB\n"
    f"MemAvailable:   {3 * GIB // 2048} kB\nSwapTotal:             0 kB\nHugePages_Total:       0\n"
)


def _lxcfs(root: Path) -> Path:
    with (root / "proc/self/mountinfo").open("a") as file:
        file.write(_LXCFS)
    return write(root, {"proc/meminfo": _LXCFS_MEMINFO})


def test_lxcfs_shows_the_containers_memory_where_no_cgroup_is_seen(tmp_path: Path) -> None:
    box = Box(_lxcfs(write(tmp_path, {"proc/self/mountinfo": ROOT_MOUNT})))
    assert (box.memory_limit().bytes, box.memory_limit().source) == (2 * GIB, "MemTotal")
    assert box.available_memory() == 3 * GIB // 2
    # Files that lxcfs lays over /proc are no place for a model's file.
    mount = box.filesystem("/proc/meminfo")
    assert mount is not None
    assert (mount.kind, mount.source) == ("fuse.lxcfs", "lxcfs")


def test_lxc_v1_mounts_the_containers_part(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    root = _lxcfs(v1(tmp_path, "/lxc/web", mounted="/lxc/web"))
    write(
        root,
        {
            f"{top}/memory.limit_in_bytes": 2 * GIB - 4096,
            f"{top}/memory.stat": f"total_rss {GIB}\ntotal_cache {GIB // 2}\n",
        },
    )
    limit = Box(root).memory_limit()
    assert (limit.bytes, limit.source) == (2 * GIB - 4096, f"/{top}/memory.limit_in_bytes")
    assert Box(root).available_memory() == GIB - 4096


def test_lxc_v1_with_the_hosts_whole_tree(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    root = v1(tmp_path, "/lxc/web/user.slice")
    write(
        root,
        {
            f"{top}/memory.limit_in_bytes": V1_UNLIMITED,
            f"{top}/lxc/memory.limit_in_bytes": V1_UNLIMITED,
            f"{top}/lxc/web/memory.limit_in_bytes": 3 * GIB,
            f"{top}/lxc/web/user.slice/memory.limit_in_bytes": V1_UNLIMITED,
            f"{top}/lxc/other/memory.limit_in_bytes": GIB,
        },
    )
    limit = Box(root).memory_limit()
    assert (limit.bytes, limit.source) == (3 * GIB, f"/{top}/lxc/web/memory.limit_in_bytes")


@pytest.mark.parametrize("own", ["/lxc/web", "/lxc.payload.web/.lxc", "/lxc.payload/web/init.scope"])
def test_lxc_v2_with_the_hosts_whole_tree(tmp_path: Path, own: str) -> None:
    container = "/".join(own.split("/")[1:3])
    root = v2(tmp_path, own)
    write(root, {f"sys/fs/cgroup/{container}/memory.max": 2 * GIB})
    limit = Box(root).memory_limit()
    assert (limit.bytes, limit.source) == (2 * GIB, f"/sys/fs/cgroup/{container}/memory.max")


@pytest.mark.parametrize(
    ("mounted", "own"),
    [
        ("/", "/"),  # a namespace of its own: the container's group is the root
        ("/", "/init.scope"),  # and its init has made groups in it
        ("/lxc.payload.web", "/lxc.payload.web"),  # no namespace, but only its part is mounted
        ("/../..", "/"),  # mounted before the namespace was entered
        ("/", "/../other.service"),  # entered from outside of it
    ],
)
def test_lxc_v2_whose_root_is_the_container(tmp_path: Path, mounted: str, own: str) -> None:
    root = v2(tmp_path, "/init.scope", memory_max=2 * GIB - 4096, memory_stat=f"anon {GIB}\n")
    write(
        root,
        {
            "proc/self/cgroup": f"0::{own}\n",
            "proc/self/mountinfo": ROOT_MOUNT
            + f"31 27 0:28 {mounted} /sys/fs/cgroup rw - cgroup2 none rw,nsdelegate\n",
        },
    )
    box = Box(_lxcfs(root))
    assert (box.memory_limit().bytes, box.memory_limit().source) == (
        2 * GIB - 4096,
        "/sys/fs/cgroup/memory.max",
    )
    assert box.available_memory() == GIB - 4096


def test_a_group_that_is_full_has_no_room(tmp_path: Path) -> None:
    root = v2(tmp_path, a__memory_max=GIB, a__memory_stat=f"anon {2 * GIB}\n")
    assert Box(root).available_memory() == 0


def test_cpus_are_affinity_cut_by_the_quota(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/status": "Name: x\nCpus_allowed_list:\t0-3,8,10-11\n"})
    assert Box(root).cpus() == 7
    assert Box(v2(root, a__b__cpu_max="max 100000\n", a__cpu_max="250000 100000\n")).cpus() == 2
    v1(root, "/")
    write(root, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1, "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000})
    assert Box(root).cpus() == 7
    write(root, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": 50000})
    assert Box(root).cpus() == 1


def test_filesystem_is_the_deepest_and_latest_mount(tmp_path: Path) -> None:
    mounts = (
        ROOT_MOUNT
        + "28 27 8:17 / /data/my\\040models rw - xfs /dev/sdb1 rw\n"
        + "29 27 0:99 / /data/my\\040models rw - tmpfs tmpfs rw\n"
        + "broken line\n"
    )
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": mounts,
            "sys/class/bdi/254:0/read_ahead_kb": "8192\n",
            "sys/dev/block/0:99/queue/read_ahead_kb": "128\n",
        },
    )
    box = Box(root)
    upper = box.filesystem("/data/my models/x.gguf")
    assert upper is not None
    assert (upper.kind, upper.source, upper.device) == ("tmpfs", "tmpfs", "0:99")
    lower = box.filesystem("/data/my modelsX")
    assert lower is not None
    assert (lower.kind, lower.device) == ("ext4", "254:0")
    assert box.read_ahead_kb("/data/x") == 8192
    assert box.read_ahead_kb("/data/my models/x") == 128


def test_kernel_settings(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "proc/self/limits": "Max locked memory         65536                8388608              bytes\n",
            "proc/sys/vm/max_map_count": "1048576\n",
            "proc/sys/kernel/osrelease": "6.1.0-test\n",
        },
    )
    box = Box(root)
    assert box.huge_pages() == "madvise"
    assert box.memlock_limit_bytes() == 8388608
    assert box.max_map_count() == 1048576
    assert box.kernel() == "6.1.0-test"
    bare = Box(tmp_path / "nothing")
    assert bare.huge_pages() == "absent"
    assert bare.max_map_count() == 65530
    write(root, {"proc/self/limits": "Max locked memory         unlimited   unlimited    bytes\n"})
    assert box.memlock_limit_bytes() is None


def test_a_machine_is_known_by_a_hash_of_its_id(tmp_path: Path) -> None:
    own = "0123456789abcdef0123456789abcdef"
    first = Box(write(tmp_path / "a", {"etc/machine-id": own + "\n"}))
    assert len(first.machine_id()) == 12
    assert first.machine_id() not in own
    assert own not in json.dumps(first.describe(tmp_path))
    # Where systemd keeps none, the bus's is the same id.
    assert Box(write(tmp_path / "b", {"var/lib/dbus/machine-id": own})).machine_id() == first.machine_id()
    other = Box(write(tmp_path / "c", {"etc/machine-id": own[::-1]}))
    assert other.machine_id() != first.machine_id()
    assert Box(tmp_path / "nothing").machine_id() == ""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD  EPYC\n\nmodel name\t: other\n", "AMD EPYC"),
        ("processor: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "implementer 0x41 part 0xd0c"),
        ("processor: 0\nCPU part\t: 0xd08\nModel\t\t: Raspberry Pi 4\n", "Raspberry Pi 4"),
        ("processor: 0\n", ""),
    ],
)
def test_what_processors_call_themselves(tmp_path: Path, text: str, name: str) -> None:
    assert Box(write(tmp_path, {"proc/cpuinfo": text})).cpu_model() == name


def test_describe_this_machine(tmp_path: Path) -> None:
    facts = Box().describe(tmp_path)
    assert {"cpus", "ram_bytes", "limit_bytes", "kernel", "fs", "device", "read_ahead_kb"} <= set(facts)
    assert 1 <= facts["cpus"] <= (os.cpu_count() or 1)
    assert 0 < facts["available_bytes"] <= facts["ram_bytes"]
    assert facts["limit_bytes"] <= facts["ram_bytes"]
    assert json.loads(json.dumps(facts)) == facts


def test_a_machine_without_proc_is_described_too(tmp_path: Path) -> None:
    facts = Box(tmp_path / "nothing").describe(tmp_path)
    assert (facts["ram_bytes"], facts["fs"], facts["read_ahead_kb"]) == (0, "", None)


# -- processes --


def test_process_memory_counts_what_is_touched() -> None:
    before = process_memory()
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        for at in range(0, len(region), mmap.PAGESIZE):
            region[at] = 1
        during = process_memory()
    assert 60 << 20 < during.anon_bytes - before.anon_bytes < 70 << 20
    assert during.rss_bytes >= during.anon_bytes
    assert peak_rss_bytes() >= during.rss_bytes - (2 << 20)
    assert process_memory().anon_bytes < during.anon_bytes - (50 << 20)


def test_another_process_and_one_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert process_memory(child.pid).rss_bytes > 0
        child.communicate(b"\n")
        with pytest.raises(ProcessLookupError):
            process_memory(child.pid)
        assert process_io(child.pid) == {}


def test_without_a_rollup_the_status_serves(tmp_path: Path) -> None:
    status = (
        "Name:\tx\nVmHWM:\t 300 kB\nVmRSS:\t 200 kB\nVmLck:\t 8 kB\nRssAnon:\t 120 kB\nRssFile:\t 80 kB\n"
    )
    found = process_memory(7, write(tmp_path, {"proc/7/status": status}))
    assert (found.rss_bytes, found.anon_bytes, found.file_bytes) == (200 << 10, 120 << 10, 80 << 10)
    assert (found.locked_bytes, found.peak_bytes, found.huge_bytes) == (8 << 10, 300 << 10, 0)


def test_faults_and_io_go_up() -> None:
    before = faults()
    with mmap.mmap(-1, 4 << 20) as region:
        region.write(bytes(4 << 20))
    assert faults().minor > before.minor
    assert process_io().get("rchar", 1) > 0


# -- the disk --


@pytest.mark.parametrize("size", [1, 100, 512, 4096, 5000, 1 << 20, (1 << 20) + 77])
def test_direct_io_alignment_is_proved_by_reads(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    found = direct_io_alignment(path)
    if found.alignment is None:
        pytest.skip(found.reason)
    assert found.alignment in (512, 1024, 2048, 4096)


def test_direct_io_refusal_has_a_reason(tmp_path: Path) -> None:
    found = direct_io_alignment("/proc/self/status")
    assert found.alignment is None
    assert "/proc/self/status" in found.reason
    assert "No such file" in direct_io_alignment(tmp_path / "absent").reason


def test_disk_rate_is_remembered_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "file"
    path.write_bytes(os.urandom(16 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    first = disk_rate(path, 0.05)
    if place_of([path], Box()).in_memory:
        pytest.skip("the tests' directory is memory, which has no disk's rate")
    assert first is not None
    assert first.bytes_per_s > 1e6
    assert disk_rate(path, 0.05) == first
    store = tmp_path / "cache/moestream/disk.json"
    old = {
        name: {**entry, "measured_at": time.time() - 90000}
        for name, entry in json.loads(store.read_text()).items()
    }
    store.write_text(json.dumps(old))
    fresh = disk_rate(path, 0.05)
    assert fresh is not None
    assert fresh.age_s < 60
    store.write_text("{ damaged")
    assert isinstance(disk_rate(path, 0.05), DiskRate)


def test_a_number_that_mounts_share_is_no_devices_name(tmp_path: Path) -> None:
    """What is kept of one network file system is not taken for the next one's."""
    assert re.fullmatch(r"0:\d+-[0-9a-f]{12}", device_name("/proc/self/status"))
    assert re.fullmatch(r"\d+:\d+(-[0-9a-f]{12})?", device_name(tmp_path))
    with pytest.raises(FileNotFoundError):
        device_name(tmp_path / "absent")


def test_disk_rate_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "small").write_bytes(b"x")
    assert disk_rate(tmp_path / "small") is None
    assert disk_rate(tmp_path / "absent") is None
