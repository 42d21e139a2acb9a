"""Which saved probes hold: by age, kernel, machine, device and model; and the ten lines of a document."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ggufs import moe_tensors, write_gguf
from moestream.box import Box, cache_directory
from moestream.cli.plan import find_ceilings
from moestream.model import Model, read_model
from moestream.probe import fuller_probe, save_probe, saved_probe
from moestream.probe.saved import MAX_AGE_S, SCHEMA, identity

NOW = 2e9


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return read_model(write_gguf(tmp_path / "m.gguf", moe_tensors(2, n_embd=256, n_ff=256)))


def document(model: Model, for_model: bool = True, **changes: Any) -> dict[str, Any]:
    found = {
        "schema": SCHEMA,
        "measured_at": NOW,
        "identity": identity(model.paths[0], model if for_model else None),
        "disk_bytes_per_s": 2e9,
        "compute_s_per_token": 0.03,
    }
    return {**found, **changes}


def test_what_is_saved_is_found(model: Model) -> None:
    assert saved_probe(model, NOW) is None
    path = save_probe(document(model))
    assert path is not None
    assert path.parent == cache_directory()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert saved_probe(model, NOW) == document(model)


def test_it_expires_after_a_week_and_is_not_from_the_future(model: Model) -> None:
    save_probe(document(model))
    assert saved_probe(model, NOW + MAX_AGE_S) is not None
    assert saved_probe(model, NOW + MAX_AGE_S + 1) is None
    assert saved_probe(model, NOW - 1) is None


def test_a_quick_probe_does_not_replace_a_whole_one_that_holds(model: Model) -> None:
    whole = document(model, quick=False)
    save_probe(whole)
    quick = document(model, quick=True, compute_s_per_token=None, measured_at=NOW + 60)
    assert fuller_probe(quick) == whole
    assert save_probe(quick) is not None
    assert saved_probe(model, NOW + 60) == whole
    late = {**quick, "measured_at": NOW + MAX_AGE_S + 1}
    assert fuller_probe(late) is None
    save_probe(late)
    assert saved_probe(model, NOW + MAX_AGE_S + 1) == late
    save_probe(whole)
    assert saved_probe(model, NOW) == whole


def test_a_quick_probe_that_knows_a_rate_the_whole_one_lacks_is_kept(model: Model) -> None:
    save_probe(document(model, quick=False, compute_s_per_token=None))
    quick = document(model, quick=True)
    save_probe(quick)
    assert saved_probe(model, NOW) == quick


def test_another_kernel_ends_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    save_probe(document(model))
    monkeypatch.setattr(Box, "kernel", lambda self: "99.1")
    assert saved_probe(model, NOW) is None


@pytest.mark.parametrize("what", ["device", "machine", "kernel", "model"])
def test_another_box_or_file_is_not_this_one(model: Model, what: str) -> None:
    path = save_probe(document(model))
    assert path is not None
    changed = document(model)
    changed["identity"][what] = "other"
    path.write_text(json.dumps(changed))
    assert saved_probe(model, NOW) is None


def test_a_probe_of_the_device_stands_in_for_the_models_own(model: Model) -> None:
    save_probe(document(model, for_model=False, compute_s_per_token=None, disk_bytes_per_s=1e9))
    found = saved_probe(model, NOW)
    assert found is not None
    assert found["disk_bytes_per_s"] == 1e9
    save_probe(document(model))
    found = saved_probe(model, NOW)
    assert found is not None
    assert found["disk_bytes_per_s"] == 2e9


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '"x"',
        "{}",
        "DISK 0",
        "DISK -1",
        'DISK "fast"',
        "DISK true",
        "SCHEMA 2",
        "AT null",
    ],
)
def test_a_damaged_file_is_no_probe(model: Model, text: str) -> None:
    path = save_probe(document(model))
    assert path is not None
    name, _, value = text.partition(" ")
    keys = {"DISK": "disk_bytes_per_s", "SCHEMA": "schema", "AT": "measured_at"}
    if name in keys:
        text = json.dumps(document(model, **{keys[name]: json.loads(value)}))
    path.write_text(text)
    assert saved_probe(model, NOW) is None


def test_a_cache_that_cannot_be_written_to_costs_nothing_else(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert save_probe(document(model)) is None
    assert saved_probe(model, NOW) is None


def test_plan_takes_its_ceilings_from_a_probe_and_measures_without_one(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr("moestream.cli.plan.disk_rate", lambda path: asked.append(path))
    found = find_ceilings(model)
    assert (found.disk_bytes_per_s, found.compute_s_per_token, asked) == (None, None, [model.paths[0]])
    monkeypatch.setattr("moestream.probe.saved.time.time", lambda: NOW + 60)
    save_probe(document(model))
    found = find_ceilings(model)
    assert (found.disk_bytes_per_s, found.compute_s_per_token, found.age_s) == (2e9, 0.03, 60.0)
    assert found.reader is None
    assert len(asked) == 1
    save_probe(document(model, disk={"reader": "uring:16"}))
    assert find_ceilings(model).reader == "uring:16"
    save_probe(document(model, disk=[]))
    assert find_ceilings(model).reader is None


@pytest.mark.parametrize("odd", ["pipe", "1" + "0" * 400, "1e999", "NaN", "[" * 3000, '{"schema": 1}'])
def test_a_saved_probe_that_is_none_is_as_if_there_were_none(model: Model, odd: str) -> None:
    path = save_probe(document(model))
    assert path is not None
    if odd == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif odd.startswith(("[", "{")):
        path.write_text(odd)
    else:
        path.write_text(json.dumps(document(model, disk_bytes_per_s="odd")).replace('"odd"', odd))
    assert saved_probe(model, NOW) is None
