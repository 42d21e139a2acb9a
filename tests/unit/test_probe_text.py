"""The ten lines of a document, and what is doubted in it."""

from __future__ import annotations

from typing import Any

from moestream.probe.run import doubts
from moestream.probe.text import lines


def rate(median: float, spread: float = 0.1, **more: Any) -> dict[str, Any]:
    width = median * spread / 2
    return {
        "bytes_per_s": {
            "median": median,
            "low": median - width,
            "high": median + width,
            "spread": spread,
            "n": 5,
        },
        "device_ops_per_read": 1.25,
        "device_op_bytes": 500_000,
        "amplification": 1.0,
        **more,
    }


def document(**changes: Any) -> dict[str, Any]:
    disk = {
        "direct": True,
        "cold_checked": True,
        "what": "slabs",
        "range_bytes": 557_056,
        "sequential": {"start": rate(3e9), "middle": rate(2e9), "end": rate(1e9)},
        "sequential_warm": {"start": rate(9e9)},
        "random": {"uring:1": rate(1e9), "uring:8": rate(2e9), "threads:1": rate(0.9e9)},
        "knee": {
            "uring": {"at": 8, "bytes_per_s": 2e9, "best_bytes_per_s": 2.05e9},
            "threads": {"at": 1, "bytes_per_s": 0.9e9, "best_bytes_per_s": 0.9e9},
        },
        "buffered": {"threads:1": rate(0.5e9)},
        "warm": {"threads:1": rate(5e9)},
        "grid": {"cold": {}, "warm": {"1": {"1": 5e9}, "4": {"1": 6e9, "2": 7e9}}},
        "mapped_cold": {"memcpy:1": rate(0.1e9)},
        "mapped_warm": {"memcpy:1": rate(4e9)},
        "advice": {"normal": rate(0.05e9, amplification=14.5), "willneed": rate(0.6e9)},
        "alignment_cold": {"align4k": rate(1.5e9), "huge": rate(2.5e9)},
        "layout": [{"extents": 28, "runs": 3, "run_bytes": 1.16e8}],
        "read_ahead_kb": 8192,
        "random_bytes_per_s": 2e9,
        "not_measured": {},
    }
    found: dict[str, Any] = {
        "disk_bytes_per_s": 2e9,
        "compute_s_per_token": 0.04,
        "load_average": 1.0,
        "box": {"device": "/dev/vda", "fs": "ext4", "cpus": 2, "ram_bytes": 16e9, "kernel": "6.1"},
        "model": {"name": "toy", "bytes": 3.2e9, "demand_bytes_per_token": 400_000_000},
        "counters": {"follows": ["process"], "source": "process"},
        "memory": {
            "limit_bytes": 4e9,
            "limit_source": "/sys/fs/cgroup/memory.max",
            "cgroup": 2,
            "available_bytes": 3e9,
            "swaps": [{"name": "zram0", "kind": "zram", "bytes": 1e9, "used_bytes": 0}],
            "lock_bytes": 8_388_608,
            "huge_pages": "madvise",
            "copy_bytes_per_s": {"1": rate(5e9)["bytes_per_s"], "2": rate(8e9)["bytes_per_s"]},
        },
        "compute": {
            "model": "itself",
            "reason": None,
            "best": {"threads": 2, "s_per_token": 0.04, "prefill_tok_per_s": 90.0},
            "by_threads": {
                "1": {"s_per_token": {"median": 0.07, "spread": 0.1}},
                "2": {"s_per_token": {"median": 0.04, "spread": 0.1}},
            },
        },
        "doubts": [],
    }
    found["disk"] = {**disk, **changes.pop("disk", {})}
    return {**found, **changes}


def test_the_lines_of_a_whole_document() -> None:
    found = list(lines(document()))
    assert found == [
        "toy, 3.20 GB on /dev/vda (ext4); 2 CPUs, 16.0 GB, kernel 6.1",
        "sequential  start 3.00 GB/s, middle 2.00 GB/s, end 1.00 GB/s of the file, O_DIRECT",
        "random      slabs of 557 kB: uring:8 is enough at 2.00 GB/s (best 2.05 GB/s, one at a time 1.00 GB/s); "
        "threads:1 is enough at 900 MB/s (best 900 MB/s, one at a time 900 MB/s)",
        "page cache  warm 5.00 GB/s by one thread, best 7.00 GB/s by 4 threads, 2 pieces a slab, in file order "
        "9.00 GB/s; cold through it 500 MB/s",
        "mapping     copied out warm 4.00 GB/s, cold 100 MB/s; touched cold: normal 50.0 MB/s, willneed 600 MB/s; "
        "faults read 14.5 bytes for each one touched (read-ahead 8192 KiB)",
        "destination cold align4k 1.50 GB/s, huge 2.50 GB/s",
        "device      1.2 operations a read of 500 kB each, the file lies in 3 runs of 116 MB, read-ahead 8192 KiB",
        "counters    /proc/self/io follows what is read; the cgroup's block counter, the block device's do not",
        "memory      limit 4.00 GB (/sys/fs/cgroup/memory.max, cgroup v2), 3.00 GB available, swap 1.00 GB of zram, "
        "lock 8.39 MB, huge pages madvise; copies 8.00 GB/s by 2",
        "compute     40.0 ms a token with 2 threads (25.0 tok/s), prompts 90 tok/s (threads 1: 70.0 ms); "
        "all experts in memory, itself",
        "a token     asks for 400 MB of experts: 200 ms of disk if none is in memory; disk and processor are even "
        "at 80% found in memory",
    ]


def test_parts_that_were_not_measured_have_no_line_and_no_figure() -> None:
    bare = {
        "direct": False,
        "cold_checked": True,
        "what": "blocks",
        "range_bytes": 1,
        "knee": {"uring": None, "threads": None},
        "grid": {"cold": {}, "warm": {}},
        "layout": None,
        "read_ahead_kb": None,
        "random": {},
    }
    made = document(
        model=None,
        compute={"best": None, "reason": "no model"},
        counters={"follows": []},
        disk_bytes_per_s=None,
        compute_s_per_token=None,
    )
    made["disk"] = bare
    found = list(lines(made))
    assert [line.split("  ")[0] for line in found[1:]] == ["counters", "memory", "compute"]
    assert "none follows" in found[1]
    assert found[3].endswith("not measured: no model")


def test_a_processor_slower_than_the_disk_is_told() -> None:
    assert list(lines(document(compute_s_per_token=0.3)))[-1].endswith("the processor limits")


def test_quiet_figures_are_not_doubted() -> None:
    assert doubts(document()) == []


def test_each_doubt_has_its_threshold_and_its_remedy() -> None:
    assert doubts(document(disk={"direct": False})) == [
        "the file system refuses O_DIRECT: cold reads went through the page cache"
    ]
    assert "own it, or copy it" in doubts(document(disk={"cold_checked": False}))[0]
    drifting = {"uring:8": rate(2e9, spread=0.51)}
    assert "random reads moved by 51% between rounds" in doubts(document(disk={"random": drifting}))[0]
    unknown = {
        "random_bytes_per_s": None,
        "not_measured": {"random/uring:1": "9.0 MB stay in the page cache"},
    }
    assert doubts(document(disk=unknown))[0].endswith("not known: 9.0 MB stay in the page cache")
    assert "load 1.1 on 2 CPUs" in doubts(document(load_average=1.1))[0]
    made = document()
    made["compute"]["by_threads"]["2"]["s_per_token"]["spread"] = 1.01
    assert "a token's time moved by 101%" in doubts(made)[0]
