"""What a mechanism's files bring to the core, and which files are refused."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moestream import seeds
from moestream.errors import RefusedError
from moestream.seeds import Fit, Linear
from replay_traces import build, meta
from trace_files import save_trace

IDENTITY = "0123456789abcdef"


def small_fit(identity: str = IDENTITY) -> Fit:
    """Two banks of two and three experts; only the second has a map."""
    weights = np.arange(15, dtype=np.float32).reshape(3, 5)
    linear = Linear(0, weights, np.array([1, 2, 3], np.float32))
    return Fit(identity, "small", (2, 3), 2, (None, linear), np.arange(5), {"lambda": 1.0})


def save(path: Path, fit: Fit, **changed: Any) -> Path:
    """Write the file, some of its arrays or entries of its header changed."""
    arrays = fit.arrays()
    header = json.loads(str(arrays["header"]))
    for name, value in changed.items():
        if name in header:
            header[name] = value
        else:
            arrays[name] = value
    arrays["header"] = np.array(json.dumps(header))
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path


def test_ridge_as_the_core_takes_it(tmp_path: Path) -> None:
    found = seeds.load_ridge(save(tmp_path / "a.npz", small_fit()), IDENTITY)
    none, (inputs, weights, bias) = found["ridge"]
    assert none is None
    assert (inputs, weights.tolist(), bias.tolist()) == (5, list(range(15)), [1, 2, 3])
    assert weights.dtype == bias.dtype == np.float32
    assert found["ridge_wishes"] == 2


def test_a_fit_s_counts_are_priorities(tmp_path: Path) -> None:
    found = seeds.load_priorities(save(tmp_path / "a.npz", small_fit()), IDENTITY)
    assert found.dtype == np.float64
    assert found.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("load", [seeds.load_ridge, seeds.load_priorities, seeds.load_fit])
def test_another_model_s_fit_is_refused_with_both_names(load: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", small_fit("feedfeedfeedfeed"))
    with pytest.raises(RefusedError, match=rf"feedfeedfeedfeed \(small\), this is model {IDENTITY}"):
        load(path, IDENTITY)


def test_a_newer_fit_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", small_fit(), version=2)
    with pytest.raises(RefusedError, match="has fit format 2, this version reads up to 1"):
        seeds.read_fit(path)


def test_every_shortened_fit_is_refused(tmp_path: Path) -> None:
    whole = save(tmp_path / "a.npz", small_fit()).read_bytes()
    cut = tmp_path / "cut.npz"
    for length in range(0, len(whole), 7):
        cut.write_bytes(whole[:length])
        with pytest.raises(RefusedError, match=r"cut\.npz is (damaged or cut short|not a fit file)"):
            seeds.read_fit(cut)
        assert not seeds.is_fit(cut)


def test_every_flipped_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = bytearray(save(tmp_path / "a.npz", small_fit()).read_bytes())
    path = tmp_path / "flipped.npz"
    for at in range(0, len(whole), 5):
        whole[at] ^= 0x55
        path.write_bytes(whole)
        whole[at] ^= 0x55
        try:
            found = seeds.read_fit(path)
        except RefusedError:
            continue
        # Bytes of the zip's own that mean nothing to a reader.
        assert {name: array.tolist() for name, array in found.arrays().items()} == {
            name: array.tolist() for name, array in small_fit().arrays().items()
        }


@pytest.mark.parametrize(
    "changed",
    [
        {"weights_1": np.zeros((3, 4), np.float32)},
        {"weights_1": np.zeros((3, 5), np.float64)},
        {"weights_1": np.full((3, 5), np.nan, np.float32)},
        {"bias_1": np.zeros(2, np.float32)},
        {"counts": np.zeros(4, np.int64)},
        {"before": [None, 2]},
        {"before": [None, -1]},
        {"before": [0, 0]},
        {"before": [None]},
        {"wishes": 0},
        {"wishes": None},
        {"model": {"identity": IDENTITY}},
        {"model": None},
        {"model": {"identity": IDENTITY, "name": "small", "experts": [2, 10**12]}},
        {"model": {"identity": IDENTITY, "name": None, "experts": [2, 3]}},
        {"before": "ab"},
        {"before": [None, 0.5]},
        {"before": [None, True]},
        {"wishes": 1e400},
        {"wishes": 2.0},
        {"version": "1"},
        {"version": None},
        {"counts": np.array([0, 1, 2, 3, -4])},
        {"counts": np.zeros(5)},
        {"counts": np.array("counts")},
        {"weights_1": np.full((3, 5), np.inf, np.float32)},
        {"weights_1": np.zeros((3, 5), ">f4")},
        {"weights_1": np.zeros((3, 5), object)},
        {"bias_1": np.array(1.0, np.float32)},
    ],
)
def test_a_fit_that_contradicts_itself_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="damaged"):
        seeds.read_fit(save(tmp_path / "a.npz", small_fit(), **changed))


def test_entries_of_an_archive_that_are_no_arrays(tmp_path: Path) -> None:
    def written(**entries: bytes) -> Path:
        path = save(tmp_path / "a.npz", small_fit())
        with zipfile.ZipFile(path, "a") as archive:
            for name, content in entries.items():
                with pytest.warns(UserWarning, match="Duplicate name"):
                    archive.writestr(f"{name}.npy", content)
        return path

    shape = (
        b"\x93NUMPY\x01\0\x76\0"
        + b"{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999999,), }".ljust(118)
    )
    for content in (b"", b"counts", shape, b"\x93NUMPY\x01\0\x08\0{'a': 'b"):
        for name in ("counts", "header", "weights_1"):
            with pytest.raises(RefusedError, match="damaged") as refused:
                seeds.read_fit(written(**{name: content}))
            assert "\n" not in str(refused.value)


def test_what_is_no_file_is_no_fit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name, why in (
        ("pipe", "is not a regular file"),
        (".", "is not a regular file"),
        ("/dev/null", "is not a regular file"),
        ("empty", "is not a fit file"),
    ):
        with pytest.raises(RefusedError, match=why):
            seeds.read_fit(tmp_path / name)
        with pytest.raises(RefusedError):
            seeds.load_priorities(tmp_path / name, IDENTITY)


def test_other_archives_and_files_are_no_fit(tmp_path: Path) -> None:
    other = save(tmp_path / "a.npz", small_fit(), format="something else")
    with pytest.raises(RefusedError, match="is not a fit file"):
        seeds.read_fit(other)
    assert not seeds.is_fit(other)
    text = tmp_path / "model.gguf"
    text.write_bytes(b"GGUF")
    with pytest.raises(RefusedError, match="is not a fit file: make one with `moestream fit"):
        seeds.load_ridge(text, IDENTITY)
    with pytest.raises(RefusedError, match="there is no file"):
        seeds.load_ridge(tmp_path / "missing.npz", IDENTITY)
    pickled = tmp_path / "pickled.npz"
    with pickled.open("wb") as file:
        np.savez(file, header=np.array([{"format": "moestream-fit"}], dtype=object))
    with pytest.raises(RefusedError, match="damaged"):
        seeds.read_fit(pickled)


def test_counts_of_a_trace() -> None:
    steps = [[(0, [[1, 0], [1, 2]], []), (1, [[0, 1, 2, 3]], [])], [(0, [[2, 1]], []), (1, [[3, 0]], [])]]
    trace = build(meta([3, 4], 2, [([0, 1], 4096)], [7]), steps)
    # Bank 1 was read whole in the first step: nobody saw a choice.
    assert seeds.route_counts(trace).tolist() == [1, 3, 2, 1, 0, 0, 1]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = [
        [(0, [[1, 0], [1, 2]], []), (1, [[3, 0], [0, 3]], [])],
        [(0, [[2, 1]], []), (1, [[0, 1, 2, 3]], [])],
    ]
    trace = build(meta([3, 4], 2, [([0, 1], 4096)], [7], identity=IDENTITY), steps)
    return save_trace(trace, tmp_path_factory.mktemp("traces") / "a.parquet")


def test_an_oracle_s_routes_are_distinct_ascending_and_global(trace_file: Path) -> None:
    found = seeds.load_oracle(trace_file, IDENTITY)
    assert found["oracle_experts"].tolist() == [0, 1, 2, 3, 6, 1, 2, 3, 4, 5, 6]
    assert found["oracle_start"].tolist() == [0, 3, 5, 7, 11]
    assert (found["oracle_experts"].dtype, found["oracle_start"].dtype) == (np.uint32, np.uint64)


def test_a_trace_s_counts_are_priorities(trace_file: Path) -> None:
    # The second step's bank 1 was read whole: nobody saw a choice.
    assert seeds.load_priorities(trace_file, IDENTITY).tolist() == [1, 3, 2, 2, 0, 0, 2]


@pytest.mark.parametrize("load", [seeds.load_oracle, seeds.load_priorities])
def test_another_model_s_trace_is_refused_with_both_names(load: Any, trace_file: Path) -> None:
    with pytest.raises(
        RefusedError, match=rf"belongs to model {IDENTITY} \(test\), this is model feedfeedfeedfeed"
    ):
        load(trace_file, "feedfeedfeedfeed")


def test_a_trace_is_no_fit_and_a_fit_no_trace(trace_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="is not a fit file"):
        seeds.load_ridge(trace_file, IDENTITY)
    with pytest.raises(RefusedError, match="is not a trace"):
        seeds.load_oracle(save(tmp_path / "a.npz", small_fit()), IDENTITY)
    with pytest.raises(RefusedError, match="there is no file"):
        seeds.load_priorities(tmp_path / "missing.parquet", IDENTITY)


def test_a_trace_without_routes_seeds_nothing(tmp_path: Path) -> None:
    empty = build(meta([3, 4], 2, [([0, 1], 4096)], [7], identity=IDENTITY), [])
    empty.steps.update(step=np.array([0]), phase=np.array([1]), tokens=np.array([1]))
    path = save_trace(empty, tmp_path / "empty.parquet")
    for load in (seeds.load_oracle, seeds.load_priorities):
        with pytest.raises(RefusedError, match=r"holds no routes .*: record one under a mechanism"):
            load(path, IDENTITY)
