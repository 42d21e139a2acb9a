"""A probe's document made by hand, for tests of what is read off it."""

from __future__ import annotations

from typing import Any


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
