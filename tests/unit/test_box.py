"""The box's facts from directories that stand for machines, and the probes on real files."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moestream.box import (
    Box,
    Cage,
    DiskRate,
    direct_io_alignment,
    disk_rate,
    faults,
    peak_rss_bytes,
    process_io,
    process_memory,
)
from moestream.box.cgroup import groups
from moestream.errors import RefusedError

_GIB = 1 << 30
_V1_UNLIMITED = 9223372036854771712
_MEMINFO = f"MemTotal: {16 * _GIB // 1024} kB\nMemAvailable: {12 * _GIB // 1024} kB\nSwapTotal: 0 kB\n"
_ROOT_MOUNT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"


def _write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def _v2(root: Path, own: str = "/a/b", **files: object) -> Path:
    """A machine with version 2 at /sys/fs/cgroup. Files' names: ``a__b__memory_max`` is a/b/memory.max."""
    top = root / "sys/fs/cgroup"
    top.joinpath(*own.strip("/").split("/")).mkdir(parents=True, exist_ok=True)
    _write(
        root,
        {
            "proc/meminfo": _MEMINFO,
            "proc/self/cgroup": f"0::{own}\n",
            "proc/self/mountinfo": _ROOT_MOUNT
            + "31 27 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n",
        },
    )
    for name, value in files.items():
        *directories, file = name.split("__")
        _write(top, {"/".join([*directories, file.replace("_", ".", 1)]): value})
    return root


def _v1(root: Path, own: str, mounted: str = "/") -> Path:
    """A machine with version 1 at /sys/fs/cgroup/memory, of which ``mounted`` is visible."""
    return _write(
        root,
        {
            "proc/meminfo": _MEMINFO,
            "proc/self/cgroup": f"5:cpu,cpuacct:/\n4:memory:{own}\n1:name=systemd:/\n0::/\n",
            "proc/self/mountinfo": _ROOT_MOUNT
            + f"35 31 0:32 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            + "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        },
    )


def test_no_cgroup_no_limit(tmp_path: Path) -> None:
    box = Box(_write(tmp_path, {"proc/meminfo": _MEMINFO}))
    assert (box.memory_limit().bytes, box.memory_limit().source) == (16 * _GIB, "MemTotal")
    assert box.available_memory() == 12 * _GIB


def test_v2_max_means_no_limit(tmp_path: Path) -> None:
    box = Box(_v2(tmp_path, a__b__memory_max="max\n", a__b__memory_high="max\n", a__memory_max="max\n"))
    assert box.memory_limit().source == "MemTotal"


@pytest.mark.parametrize("file", ["a__memory_max", "a__memory_high", "a__b__memory_max", "a__b__memory_high"])
def test_v2_takes_the_lowest_of_all_ancestors(tmp_path: Path, file: str) -> None:
    files = {"a__memory_max": "max", "a__b__memory_max": 8 * _GIB, file: 2 * _GIB}
    limit = Box(_v2(tmp_path, **files)).memory_limit()
    assert limit.bytes == 2 * _GIB
    assert limit.source == "/sys/fs/cgroup/" + file.replace("__", "/").replace("memory_", "memory.")


def test_v2_file_cache_is_room(tmp_path: Path) -> None:
    held = f"anon {_GIB}\nfile {2 * _GIB}\nunevictable 0\nshmem 4096\nslab_unreclaimable 8192\n"
    root = _v2(tmp_path, a__memory_max=4 * _GIB, a__memory_current=3 * _GIB, a__memory_stat=held)
    assert Box(root).available_memory() == 3 * _GIB - 4096 - 8192


def test_v2_in_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    root = _v2(tmp_path, "/", memory_max=3 * _GIB)
    _write(root, {"proc/self/cgroup": "0::/../../docker/0123\n"})
    assert Box(root).memory_limit().bytes == 3 * _GIB


def test_v1_unlimited_and_nested(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    root = _v1(tmp_path, "/job/step")
    _write(
        root,
        {
            f"{top}/memory.limit_in_bytes": _V1_UNLIMITED,
            f"{top}/job/memory.limit_in_bytes": 5 * _GIB,
            f"{top}/job/memory.stat": f"total_rss {_GIB}\ntotal_cache {4 * _GIB}\ntotal_unevictable 4096\n",
            f"{top}/job/step/memory.limit_in_bytes": _V1_UNLIMITED,
        },
    )
    box = Box(root)
    assert (box.memory_limit().bytes, box.memory_limit().source) == (
        5 * _GIB,
        f"/{top}/job/memory.limit_in_bytes",
    )
    assert box.available_memory() == 4 * _GIB - 4096


def test_v1_in_a_container_whose_ancestors_are_hidden(tmp_path: Path) -> None:
    root = _v1(tmp_path, "/docker/0123", mounted="/docker/0123")
    _write(
        root,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": _V1_UNLIMITED,
            "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {2 * _GIB}\n",
        },
    )
    assert Box(root).memory_limit().source.endswith("memory/hierarchical_memory_limit")
    assert [group.path for group in groups(root, "memory") if group.version == 1] == [
        root / "sys/fs/cgroup/memory"
    ]


def test_a_group_that_is_full_has_no_room(tmp_path: Path) -> None:
    root = _v2(tmp_path, a__memory_max=_GIB, a__memory_stat=f"anon {2 * _GIB}\n")
    assert Box(root).available_memory() == 0


def test_cpus_are_affinity_cut_by_the_quota(tmp_path: Path) -> None:
    root = _write(tmp_path, {"proc/self/status": "Name: x\nCpus_allowed_list:\t0-3,8,10-11\n"})
    assert Box(root).cpus() == 7
    assert Box(_v2(root, a__b__cpu_max="max 100000\n", a__cpu_max="250000 100000\n")).cpus() == 3
    _v1(root, "/")
    _write(root, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1, "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000})
    assert Box(root).cpus() == 7
    _write(root, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": 50000})
    assert Box(root).cpus() == 1


def test_filesystem_is_the_deepest_and_latest_mount(tmp_path: Path) -> None:
    mounts = (
        _ROOT_MOUNT
        + "28 27 8:17 / /data/my\\040models rw - xfs /dev/sdb1 rw\n"
        + "29 27 0:99 / /data/my\\040models rw - tmpfs tmpfs rw\n"
        + "broken line\n"
    )
    root = _write(
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
    root = _write(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "proc/self/limits": "Max locked memory         8388608              unlimited            bytes\n",
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
    _write(root, {"proc/self/limits": "Max locked memory         unlimited   unlimited    bytes\n"})
    assert box.memlock_limit_bytes() is None


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
    found = process_memory(7, _write(tmp_path, {"proc/7/status": status}))
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


def test_disk_rate_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "small").write_bytes(b"x")
    assert disk_rate(tmp_path / "small") is None
    assert disk_rate(tmp_path / "absent") is None


# -- the cage's choice of a place (what it does is tested with a real one) --


def _children(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("moestream-*")]


def _no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestream.box.cage._systemd_works", lambda: False)


def test_no_cage_without_a_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_systemd(monkeypatch)
    with pytest.raises(RefusedError, match="no memory controller"), Cage(_GIB, _v2(tmp_path)):
        pass
    available, reason = Cage.available(tmp_path)
    assert not available
    assert "systemd-run" in reason


@pytest.mark.parametrize(
    ("limits", "place"),
    [
        ({}, "sys/fs/cgroup"),
        ({"a__memory_max": 8 * _GIB}, "sys/fs/cgroup/a"),
        ({"a__b__memory_high": 8 * _GIB}, "sys/fs/cgroup/a/b"),
    ],
)
def test_a_v2_cage_leaves_no_limit_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], place: str
) -> None:
    handed_down = {f"{where}cgroup_subtree_control": "cpu memory\n" for where in ("", "a__", "a__b__")}
    root = _v2(tmp_path, **handed_down, **limits)
    monkeypatch.setattr("moestream.box.cage._remove", lambda group: None)
    with Cage(_GIB, root) as cage:
        assert cage.kind == "cgroup v2"
        (child,) = _children(root)
        assert child.rpartition("/")[0] == place
        assert (root / child / "memory.max").read_text() == str(_GIB)
        assert cage.command(["true"])[-2:] == [str(root / child / "cgroup.procs"), "true"]
        _write(
            root / child,
            {
                "memory.peak": 12345,
                "memory.events": "low 0\noom 2\noom_kill 1\n",
                "memory.stat": "anon 10\nfile 20\nfile_mapped 5\n",
            },
        )
        assert (cage.peak_bytes(), cage.oom_kills()) == (12345, 1)
        assert cage.stat() == {"anon": 10, "cache": 20, "mapped_file": 5}


def test_a_v2_group_that_hands_nothing_down_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_systemd(monkeypatch)
    root = _v2(tmp_path, cgroup_subtree_control="cpu\n", a__cgroup_subtree_control="memory\n")
    monkeypatch.setattr("moestream.box.cage._remove", lambda group: None)
    with Cage(_GIB, root):
        assert _children(root)[0].startswith("sys/fs/cgroup/a/moestream-")


def test_systemd_is_the_last_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestream.box.cage._systemd_works", lambda: True)
    with Cage(12345, _v2(tmp_path)) as cage:
        assert cage.kind == "systemd-run"
        command = cage.command(["prog", "-x"])
        assert command[:3] == ["systemd-run", "--user", "--scope"]
        assert "MemoryMax=12345" in command
        assert command[-2:] == ["prog", "-x"]
        assert (cage.peak_bytes(), cage.oom_kills(), cage.stat()) == (None, None, {})
