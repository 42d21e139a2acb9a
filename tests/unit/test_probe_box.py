"""What a probe says of counters and memory, from directories that stand for machines and counters that are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestream.box import Box
from moestream.box.accounts import ReadAccounts, cgroup_counter, device_counter, process_counter
from moestream.probe.counters import follow
from moestream.probe.memory import copy_rates, memory_facts

MIB = 1 << 20


def cgroup_root(root: Path, version: int, files: dict[str, str]) -> Path:
    """A machine whose process lies in the group /job of the block controller."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    top = root / "sys/fs/cgroup" / ("blkio" if version == 1 else "")
    (top / "job").mkdir(parents=True)
    for name, text in files.items():
        (top / "job" / name).write_text(text)
    if version == 1:
        (own / "cgroup").write_text("7:blkio:/job\n")
        (own / "mountinfo").write_text("30 25 0:26 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n")
    else:
        (own / "cgroup").write_text("0::/job\n")
        (own / "mountinfo").write_text("30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    return root


V1 = "8:0 Read 4096\n8:0 Write 77\n8:0 Total 4173\n254:0 Read 1000\nTotal 5173\n"
V2 = "8:0 rbytes=4096 wbytes=77 rios=1 wios=2 dbytes=0 dios=0\n254:0 rbytes=1000 wbytes=0\n"


@pytest.mark.parametrize(
    ("version", "name", "text"), [(1, "blkio.throttle.io_service_bytes", V1), (2, "io.stat", V2)]
)
def test_a_groups_reads_are_those_of_the_device(tmp_path: Path, version: int, name: str, text: str) -> None:
    root = cgroup_root(tmp_path, version, {name: text})
    assert cgroup_counter("8:0", root) == 4096
    assert cgroup_counter("254:0", root) == 1000
    assert cgroup_counter("9:9", root) == 0
    assert cgroup_counter(None, root) == 5096


def test_without_a_block_controller_there_is_no_counter(tmp_path: Path) -> None:
    assert cgroup_counter("8:0", tmp_path) is None
    assert cgroup_counter("8:0", cgroup_root(tmp_path, 2, {})) is None


def test_the_processes_own_counter(tmp_path: Path) -> None:
    assert process_counter(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/io").write_text("rchar: 5\nread_bytes: 12288\nwrite_bytes: 1\n")
    assert process_counter(tmp_path) == 12288


def test_a_devices_counter_and_all_that_a_box_keeps(tmp_path: Path) -> None:
    root = cgroup_root(tmp_path, 2, {"io.stat": V2})
    (root / "proc/self/mountinfo").write_text(
        "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n31 25 254:0 / / rw - ext4 /dev/vda rw\n"
    )
    assert ReadAccounts("/m.gguf", root).now() == {"cgroup": 1000}
    (root / "proc/self/io").write_text("read_bytes: 0\nwrite_bytes: 1\n")
    statistics = root / "sys/dev/block/254:0/stat"
    statistics.parent.mkdir(parents=True)
    statistics.write_text(" 10 0 16 7 0 0 0 0 0 0 0\n")
    assert device_counter("254:0", root) == 16 * 512
    assert ReadAccounts("/m.gguf", root).now() == {"process": 0, "cgroup": 1000, "device": 16 * 512}
    assert ReadAccounts("/m.gguf", tmp_path / "absent").now() == {}


class Counted:
    """Counters that each count a share of what is read."""

    def __init__(self, shares: dict[str, float], noise: list[int] | None = None) -> None:
        self.values = dict.fromkeys(shares, 0.0)
        self.shares, self.noise = shares, noise or []

    def read(self) -> tuple[int, str]:
        extra = self.noise.pop(0) if self.noise else 0
        for name, share in self.shares.items():
            self.values[name] += 100 * share + extra
        return 100, ""

    def counter(self, name: str) -> int:
        return int(self.values[name])


def test_the_first_counter_that_follows_in_every_way_is_the_source() -> None:
    box = Counted({"process": 0.0, "cgroup": 1.03, "device": 1.0})
    counters = {name: (lambda name=name: box.counter(name)) for name in box.shares}  # type: ignore[misc]
    found = follow(counters, {"direct": box.read, "buffered": box.read})
    assert found["source"] == "cgroup"
    assert found["follows"] == ["cgroup", "device"]
    assert found["counted"]["direct"] == {"process": 0.0, "cgroup": 1.03, "device": 1.0}


def test_one_disturbed_round_does_not_disqualify_a_counter() -> None:
    box = Counted({"device": 1.0}, noise=[0, 900, 0])
    found = follow({"device": lambda: box.counter("device")}, {"direct": box.read}, rounds=3)
    assert found["follows"] == ["device"]


def test_where_none_follows_the_ledger_is_the_source() -> None:
    box = Counted({"process": 0.0, "device": 1.06})
    counters = {
        "process": lambda: box.counter("process"),
        "device": lambda: box.counter("device"),
        "cgroup": lambda: None,
    }
    found = follow(counters, {"direct": box.read})
    assert found["source"] == "ledger"
    assert found["follows"] == []
    assert found["counted"]["direct"]["cgroup"] is None


def test_a_way_that_could_not_read_says_why_and_decides_nothing() -> None:
    box = Counted({"process": 1.0})
    ways = {"direct": box.read, "buffered": lambda: (0, "8.00 MB stay in the page cache")}
    found = follow({"process": lambda: box.counter("process")}, ways)
    assert found["not_read"] == {"buffered": "8.00 MB stay in the page cache"}
    assert found["follows"] == ["process"]


def test_a_box_where_nothing_could_be_read_claims_nothing() -> None:
    found = follow({"process": lambda: 0}, {"direct": lambda: (0, "no")})
    assert found["follows"] == []
    assert found["source"] == "ledger"


def test_swap_in_memory_is_told_from_swap_on_disk(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/swaps").write_text(
        "Filename Type Size Used Priority\n/dev/zram0 partition 1024 12 100\n/swapfile file 2048 0 -2\nbroken\n"
    )
    assert Box(tmp_path).swaps() == [
        {"name": "zram0", "kind": "zram", "bytes": 1024 * 1024, "used_bytes": 12 * 1024},
        {"name": "swapfile", "kind": "file", "bytes": 2048 * 1024, "used_bytes": 0},
    ]
    assert Box(tmp_path / "nowhere").swaps() == []


def test_the_memory_of_an_empty_machine_is_told_without_a_guess(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024 kB\nMemAvailable: 512 kB\nSwapTotal: 0 kB\n")
    found = memory_facts(tmp_path)
    assert found["ram_bytes"] == MIB
    assert found["available_bytes"] == MIB // 2
    assert found["limit_source"] == "MemTotal"
    assert found["cgroup"] is None
    assert found["swaps"] == []
    assert found["zswap"] is False
    assert found["huge_pages"] == "absent"


def test_copies_are_timed_for_each_count_of_threads() -> None:
    found = copy_rates((1, 2), 0.005)
    assert list(found) == ["1", "2"]
    for rates in found.values():
        assert rates["n"] == 3
        assert 0 < rates["low"] <= rates["median"] <= rates["high"]
