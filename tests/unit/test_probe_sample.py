"""What a probe reads, and that it is cold or warm as said; timed reads and mappings count what they did."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest

import moestream._core as _core
from ggufs import Q, dense_tensors, expert_tensors, moe_tensors, write_gguf
from moestream.errors import RefusedError
from moestream.model import Model, read_model
from moestream.probe import disk
from moestream.probe.sample import PAGE, Sample, directory_sample, model_sample
from moestream.probe.schedule import Measured, Shot

SCOPE = replace(
    disk.QUICK, depths=(1, 2), threads=(1, 4), splits=(1, 2), rounds=1, case_bytes=1 << 20, case_s=0.05
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return read_model(
        write_gguf(tmp_path_factory.mktemp("model") / "m.gguf", moe_tensors(4, n_embd=256, n_ff=512))
    )


@pytest.fixture
def sample(model: Model) -> Sample:
    return model_sample(model)


def test_every_slab_is_read_in_whole_pages_that_lie_in_the_file(model: Model, sample: Sample) -> None:
    slabs = [
        (tensor.offset + number * tensor.slab_bytes, tensor.slab_bytes)
        for bank in model.banks
        for tensor in bank.tensors
        for number in range(tensor.count)
    ]
    assert len(sample.ranges) == len(slabs)
    last_page = model.bytes // PAGE * PAGE
    rows = {row[1]: row for row in sample.ranges}
    for offset, length in slabs:
        file, begin, span = rows[offset // PAGE * PAGE]
        assert (file, begin % PAGE, span % PAGE) == (0, 0, 0)
        assert begin + span >= min(offset + length, last_page)
        assert begin + span <= last_page
    assert sample.route_slabs == model.banks[0].used * 3
    assert sample.route_bytes == model.banks[0].used * model.banks[0].expert_bytes


def test_ranges_are_taken_in_turn_and_none_twice_in_one_shot(sample: Sample) -> None:
    first = sample.take(3 * sample.range_bytes)
    assert sum(row[2] for row in first) >= 3 * sample.range_bytes
    second = sample.take(1, at_least=5)
    assert len(second) == 5
    assert not set(first) & set(second)
    assert sorted(sample.take(1 << 40)) == sorted(sample.ranges)


def test_blocks_in_file_order_begin_where_they_should(model: Model, sample: Sample) -> None:
    size = model.bytes // PAGE * PAGE
    for share in (0.0, 0.5, 1.0):
        rows = sample.sequential(share, 1 << 20)
        assert rows
        assert [row[1] for row in rows] == sorted(row[1] for row in rows)
        assert all(row[1] % PAGE == 0 and row[1] + row[2] <= size for row in rows)
    assert sample.sequential(0.0, 1 << 20)[0][1] == 0


def test_cold_is_dropped_and_warm_is_there(sample: Sample) -> None:
    ranges = sample.take(1 << 20)
    assert sample.make_warm(ranges) == ""
    assert sample.cached(ranges) == sum(row[2] for row in ranges)
    assert sample.make_cold(ranges) == ""
    assert sample.cached(ranges) == 0


def test_pages_that_somebody_holds_are_told_and_not_called_cold(sample: Sample) -> None:
    ranges = sample.take(1 << 40)
    with sample.files[0].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        touched = sum(held[at] for at in range(0, len(held), PAGE))
        assert touched > 0
        assert "stay in the page cache" in sample.make_cold(ranges)
    assert sample.make_cold(ranges) == ""


def test_a_dense_model_is_read_in_blocks_and_a_tiny_one_refused(tmp_path: Path) -> None:
    large = read_model(write_gguf(tmp_path / "large.gguf", dense_tensors(1, n_embd=512, n_vocab=8000)))
    found = model_sample(large)
    assert (found.what, found.route_bytes) == ("blocks", None)
    small = read_model(write_gguf(tmp_path / "small.gguf", dense_tensors(1)))
    with pytest.raises(RefusedError, match="too small to measure"):
        model_sample(small)


def test_a_directorys_file_has_no_name_and_is_gone_after(tmp_path: Path) -> None:
    free: list[int] = []
    with (
        pytest.raises(KeyboardInterrupt),
        directory_sample(tmp_path, 8 << 20, lambda done, total: free.append(done)) as found,
    ):
        assert list(tmp_path.iterdir()) == []
        assert found.files[0].stat().st_size == 8 << 20
        assert len(found.ranges) == 8
        assert found.make_warm(found.ranges) == ""
        path = found.files[0]
        raise KeyboardInterrupt
    assert free[-1] == 8 << 20
    assert list(tmp_path.iterdir()) == []
    assert not path.exists() or path.resolve().parent != tmp_path


def test_a_directory_without_room_without_a_disk_or_not_there_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(RefusedError, match=r"a file of .* is needed and .* are free"),
        directory_sample(tmp_path, 1 << 59),
    ):
        pass
    with pytest.raises(RefusedError, match="no such directory"), directory_sample(tmp_path / "none"):
        pass
    if not os.path.ismount("/dev/shm"):
        pytest.skip("this box has no tmpfs at /dev/shm")
    with pytest.raises(RefusedError, match="no disk to measure"), directory_sample(Path("/dev/shm")):
        pass


# -- the core's timed reads --


def timed(sample: Sample, **changes: object) -> dict[str, float]:
    options = {
        "reader": "threads:2",
        "in_flight": 2,
        "direct": sample.direct,
        "buffer_bytes": 1 << 20,
        "seconds": 60.0,
        **changes,
    }
    return _core.probe_reads(sample.names, sample.ranges, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reader": "sync", "in_flight": 1},
        {"split_bytes": 8192},
        {"alignment": 16384},
        {"alignment": 2 << 20},
        {"direct": False},
    ],
)
def test_every_range_is_read_once(sample: Sample, changes: dict[str, object]) -> None:
    found = timed(sample, **changes)
    assert found["reads"] == len(sample.ranges)
    assert found["bytes"] == sum(row[2] for row in sample.ranges)
    assert found["seconds"] > 0


def test_time_that_is_up_ends_the_asking(sample: Sample) -> None:
    assert timed(sample, seconds=0.0)["reads"] == 0


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"in_flight": 0}, "usage", "in flight"),
        ({"alignment": 6000}, "usage", "power of two"),
        ({"alignment": 512}, "usage", "power of two"),
        ({"reader": "uringo:8"}, "usage", "unknown member"),
    ],
)
def test_wrong_words_to_timed_reads_are_told(
    sample: Sample, changes: dict[str, object], kind: str, text: str
) -> None:
    with pytest.raises(_core.CoreError) as refused:
        timed(sample, **changes)
    assert refused.value.args[0] == kind
    assert text in refused.value.args[1]


def test_ranges_that_are_none_are_told(sample: Sample) -> None:
    name, size = sample.names, sample.files[0].stat().st_size

    def read(row: tuple[int, int, int], direct: bool = False) -> str:
        with pytest.raises(_core.CoreError) as refused:
            _core.probe_reads(
                name, [row], reader="sync", in_flight=1, direct=direct, buffer_bytes=1, seconds=1.0
            )
        return f"{refused.value.args[0]}: {refused.value.args[1]}"

    assert read((1, 0, 4096)).startswith("usage: probe: a range of no file")
    assert read((0, 0, 0)).startswith("usage: probe: a range of no file")
    assert read((0, 100, 4096), direct=True).startswith("usage: probe: a direct read is of whole pages")
    assert read((0, (size // PAGE + 2) * PAGE, 4096)).startswith("io: read of ")
    with pytest.raises(_core.CoreError, match="past the end"):
        _core.probe_mapping(name, [(0, size // PAGE * PAGE, 3 * PAGE)], warmer="fault", seconds=1.0)
    with pytest.raises(_core.CoreError, match="cannot be opened"):
        _core.probe_mapping([str(sample.files[0]) + "-not"], [(0, 0, 4096)], warmer="fault", seconds=1.0)


@pytest.mark.parametrize("warmer", ["fault", "willneed", "readahead", "fadvise", "memcpy:2"])
@pytest.mark.parametrize("advice", ["normal", "random", "sequential"])
def test_every_range_of_a_mapping_is_touched_once(sample: Sample, warmer: str, advice: str) -> None:
    found = _core.probe_mapping(sample.names, sample.ranges, warmer=warmer, advice=advice, seconds=60.0)
    assert found["reads"] == len(sample.ranges)
    assert found["bytes"] == sum(row[2] for row in sample.ranges)
    assert sample.cached(sample.ranges) == sum(row[2] for row in sample.ranges)


# -- the cases and their tables --


def test_every_case_runs_and_cold_ones_come_from_the_disk(sample: Sample) -> None:
    measurer = disk.Disk(
        sample, replace(SCOPE, alignments=("align4k", "align2m")), None, uring=False, huge_pages=False
    )
    measured = measurer.measure()
    assert measured.reasons == {}
    keys = [case.key for case in measurer.cases()]
    assert len(keys) == len(set(keys))
    assert set(measured.shots) == set(keys)
    tables = disk.tables(measured, sample)
    assert {"sequential", "random", "warm", "buffered", "mapped_cold", "advice", "alignment_cold"} <= set(
        tables
    )
    assert set(tables["grid"]["warm"]) == {"1", "4"}
    assert set(tables["grid"]["cold"]["4"]) == {"1", "2"}
    assert tables["knee"]["uring"] is None
    assert tables["knee"]["threads"]["at"] in (1, 4)
    assert len(tables["expert_read"]) == 10
    for row in tables["expert_read"]:
        assert row["s_per_route"] == pytest.approx(sample.route_bytes / row["bytes_per_s"])


def test_huge_pages_and_rings_that_are_not_there_have_no_case(sample: Sample) -> None:
    scope = replace(SCOPE, alignments=("align4k", "huge"))

    def keys(uring: bool, huge: bool) -> set[str]:
        return {c.key for c in disk.Disk(sample, scope, None, uring=uring, huge_pages=huge).cases()}

    assert "alignment-cold/huge" in keys(True, True)
    assert "alignment-cold/huge" not in keys(True, False)
    assert {"random/uring:1", "random/uring:2"} <= keys(True, True)
    assert not any("uring" in key for key in keys(False, True))


def test_a_depth_of_too_many_bytes_in_flight_is_left_out(sample: Sample) -> None:
    large = replace(sample, ranges=[(0, 0, 300 << 20)])
    keys = [c.key for c in disk.Disk(large, SCOPE, None, uring=True, huge_pages=True).cases()]
    assert "random/uring:1" in keys
    assert "random/uring:2" not in keys


@pytest.fixture
def mixed(tmp_path: Path) -> Sample:
    """Of a model whose down projections are of another type, and so of another size."""
    shape = {"n_embd": 256, "n_ff": 512}
    tensors = dense_tensors(2, 256)
    for layer in range(2):
        tensors += expert_tensors(layer, ("gate", "up"), **shape)
        tensors += expert_tensors(layer, ("down",), quant=Q.Q4_0, **shape)
    return model_sample(read_model(write_gguf(tmp_path / "mixed.gguf", tensors)))


def test_slabs_of_each_size_are_taken_by_themselves(mixed: Sample, sample: Sample) -> None:
    assert sample.by_size == {}
    small, large = sorted(mixed.by_size)
    assert (small, large) == (256 * 512 // 32 * 18, 256 * 512 // 32 * 34)
    assert sorted([*mixed.by_size[small], *mixed.by_size[large]]) == sorted(mixed.ranges)
    first, second = mixed.take(1, size=small), mixed.take(1, size=small)
    assert first != second
    # Whole pages: one more than the slab fills, at most two.
    assert all(small <= row[2] <= small + 2 * PAGE for row in (*first, *second))
    assert sorted(mixed.take(1 << 40, size=large)) == sorted(mixed.by_size[large])


def test_mixed_sizes_are_measured_each_by_itself(mixed: Sample, sample: Sample) -> None:
    def keys(one: Sample, uring: bool) -> list[str]:
        cases = disk.Disk(one, disk.FULL, None, uring=uring, huge_pages=False).cases()
        return [case.key for case in cases if case.key.startswith("sizes/")]

    small, large = sorted(mixed.by_size)
    assert keys(sample, uring=True) == []
    assert keys(mixed, uring=True) == [f"sizes/{s}/uring:{n}" for s in (small, large) for n in (1, 8, 32)]
    assert keys(mixed, uring=False) == [f"sizes/{s}/threads:{n}" for s in (small, large) for n in (1, 4)]
    measured = disk.Disk(mixed, SCOPE, None, uring=False, huge_pages=False).measure(groups=("sizes",))
    found = disk.tables(measured, mixed)
    assert {size: set(of) for size, of in found["sizes"].items()} == {
        str(size): {"threads:1", "threads:4"} for size in (small, large)
    }
    for size, of in found["sizes"].items():
        assert int(size) <= of["threads:1"]["read_bytes"] <= int(size) + 2 * PAGE
    # They are no part of the disk's rate, which is of slabs as they come.
    assert found["random_bytes_per_s"] is None


def test_the_reader_that_is_enough_is_named(sample: Sample) -> None:
    def tables(**rates: int) -> str | None:
        shots = {f"random/{key.replace('_', ':')}": [Shot(rate, 1, 1.0)] for key, rate in rates.items()}
        reader: str | None = disk.tables(Measured(shots), sample)["reader"]
        return reader

    assert tables(uring_1=10, uring_8=97, uring_32=100, threads_4=90) == "uring:8"
    assert tables(uring_8=50, threads_4=90) == "threads:4"
    assert tables() is None


def test_tables_of_nothing_say_so(sample: Sample) -> None:
    found = disk.tables(Measured({}, {"random/uring:1": "12 MB stay"}), sample)
    assert found["random_bytes_per_s"] is None
    assert found["knee"] == {"uring": None, "threads": None}
    assert found["expert_read"] == []
    assert found["not_measured"] == {"random/uring:1": "12 MB stay"}


def test_the_ceiling_is_the_best_of_the_random_reads(sample: Sample) -> None:
    def shots(rate: int) -> list[Shot]:
        return [Shot(rate, 1, 1.0)]

    measured = Measured(
        {
            "random/uring:1": shots(10),
            "random/uring:8": shots(30),
            "random/threads:4x2": shots(40),
            "warm/threads:1": shots(99),
        }
    )
    found = disk.tables(measured, sample)
    assert found["random_bytes_per_s"] == 40
    assert found["knee"]["uring"] == {"at": 8, "bytes_per_s": 30, "best_bytes_per_s": 30}
    assert found["knee"]["threads"] is None
    assert found["grid"]["cold"] == {"4": {"2": 40}}
