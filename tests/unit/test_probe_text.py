"""The ten lines of a document, and what is doubted in it."""

from __future__ import annotations

from moestream.probe.run import doubts
from moestream.probe.text import lines
from moestream.probe.text_tables import tables
from probe_documents import document, rate


def test_the_lines_of_a_whole_document() -> None:
    found = list(lines(document()))
    assert found == [
        "toy, 3.20 GB on /dev/vda (ext4); 2 CPUs, 16.0 GB, kernel 6.1",
        "sequential  start 3.00 GB/s, middle 2.00 GB/s, end 1.00 GB/s of the file, O_DIRECT",
        "random      slabs of 557 kB: uring:8 is enough at 2.00 GB/s (best 2.05 GB/s, one at a time 1.00 GB/s); "
        "threads:1 is enough at 900 MB/s (best 900 MB/s, one at a time 900 MB/s)",
        "page cache  warm 5.00 GB/s by one thread, best 7.00 GB/s by 4 threads, 2 pieces a slab, in file order "
        "9.00 GB/s; cold through it 500 MB/s",
        "mapping     copied out warm 4.00 GB/s, cold 100 MB/s; faults read 14.5 bytes for each one touched; "
        "touched cold 50.0 MB/s, best with willneed 600 MB/s",
        "device      1.2 operations a read of 500 kB each, the file lies in 3 runs of 116 MB, read-ahead 8192 KiB",
        "counters    /proc/self/io follows what is read; the cgroup's block counter, the block device's do not",
        "memory      limit 4.00 GB (/sys/fs/cgroup/memory.max, cgroup v2), 3.00 GB available, swap 1.00 GB of zram, "
        "lock 8.39 MB, huge pages madvise; copies 8.00 GB/s by 2",
        "compute     40.0 ms a token with 2 threads (25.0 tok/s), prompts 90 tok/s (threads 1: 70.0 ms); "
        "all experts in memory, itself",
        "a token     asks for 400 MB of experts: 200 ms of disk if none is in memory; disk and processor are even "
        "at 80% found in memory",
    ]


def test_there_are_ten_lines_whatever_was_measured() -> None:
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
    assert len(found) == 10
    rows = {line[:12].strip(): line[12:] for line in found[1:]}
    silent = ("sequential", "random", "page cache", "mapping", "device")
    assert [rows[name] for name in silent] == ["not measured"] * 5
    assert "none follows" in rows["counters"]
    assert rows["compute"] == "not measured: no model"
    assert "--model MODEL" in rows["a token"]


def test_a_line_a_doubt_comes_below_the_ten() -> None:
    found = list(lines(document(doubts=["the box is busy; probe again"])))
    assert len(found) == 11
    assert found[10] == "doubt: the box is busy; probe again"


def test_the_tables_hold_what_the_lines_leave_out() -> None:
    table = [
        {"how": "pread, 1 thread", "state": "warm", "bytes_per_s": 5e9, "s_per_route": 0.00123},
        {"how": "pread, 4 threads", "state": "cold, uncached", "bytes_per_s": 2e9, "s_per_route": None},
    ]
    found = list(tables(document(disk={"expert_read": table})))
    assert found == [
        "",
        "One layer's routed experts",
        "  how               state           rate       a route",
        "  pread, 1 thread   warm            5.00 GB/s  1.23 ms",
        "  pread, 4 threads  cold, uncached  2.00 GB/s  -",
        "",
        "Slabs from the page cache, by threads and pieces of a slab",
        "  threads  1 piece    2 pieces",
        "  1        5.00 GB/s  -",
        "  4        6.00 GB/s  7.00 GB/s",
        "",
        "A cold mapping, by advice",
        "  advice    rate       spread",
        "  normal    50.0 MB/s  10%",
        "  willneed  600 MB/s   10%",
        "",
        "Cold reads, by where they land",
        "  destination  rate       spread",
        "  align4k      1.50 GB/s  10%",
        "  huge         2.50 GB/s  10%",
    ]
    assert list(tables(document(disk={"expert_read": [], "grid": {"cold": {}, "warm": {}}}))) == found[10:]


def test_slabs_of_several_sizes_are_named_and_have_a_table() -> None:
    sizes = {"500000": {"uring:1": rate(1e9), "uring:8": rate(2e9)}, "900000": {"uring:8": rate(2.5e9)}}
    made = document(disk={"sizes": sizes, "expert_read": []})
    assert list(lines(made))[2].startswith("random      slabs of 500 kB and 900 kB: uring:8 is enough")
    assert list(tables(made))[1:5] == [
        "Slabs from the disk, by their size",
        "  slab    uring:1    uring:8",
        "  500 kB  1.00 GB/s  2.00 GB/s",
        "  900 kB  -          2.50 GB/s",
    ]


def test_a_processor_slower_than_the_disk_is_told() -> None:
    assert list(lines(document(compute_s_per_token=0.3)))[-1].endswith("the processor limits")


def test_quiet_figures_are_not_doubted() -> None:
    assert doubts(document()) == []


def test_each_doubt_has_its_threshold_and_its_remedy() -> None:
    assert doubts(document(disk={"direct": False})) == [
        "O_DIRECT is refused: cold reads went through the page cache; put the model, not compressed, on ext4, xfs or "
        "btrfs and probe again"
    ]
    reason = "O_DIRECT of m.gguf: open: Invalid argument"
    refused = doubts(document(disk={"direct": False, "direct_refusal": reason}))
    assert refused[0].startswith(f"{reason}: cold reads went through the page cache")
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
