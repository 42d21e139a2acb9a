"""Files made for experiments: the same weights on pages or in another quantisation, no half of one, and gone again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moestream.errors import RefusedError
from moestream.lab import files
from moestream.model import Model, read_model


@pytest.fixture
def model(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return read_model(tiny("olmoe"))


def tensor_bytes(model: Model, name: str) -> bytes:
    tensor = next(t for t in model.tensors if t.name == name)
    path = model.shards[tensor.shard].path
    return path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


def test_an_aligned_copy_has_the_same_tensors_on_pages(model: Model) -> None:
    aligned = read_model(files.make(model, "aligned"))
    assert aligned.metadata["general.alignment"] == files.PAGE
    assert all(tensor.offset % files.PAGE == 0 for tensor in aligned.tensors)
    assert any(tensor.offset % files.PAGE for tensor in model.tensors)
    assert [tensor.name for tensor in aligned.tensors] == [tensor.name for tensor in model.tensors]
    for tensor in model.tensors:
        assert tensor_bytes(aligned, tensor.name) == tensor_bytes(model, tensor.name)
    same = {key: value for key, value in model.metadata.items() if key != "general.alignment"}
    assert {key: aligned.metadata[key] for key in same} == same


def test_another_quantisation_changes_the_experts_and_nothing_else(model: Model) -> None:
    import gguf

    other = read_model(files.make(model, "requantized"))
    experts = {tensor.name for bank in model.banks for tensor in bank.tensors}
    assert experts
    for was, now in zip(model.tensors, other.tensors, strict=True):
        assert (was.name, was.shape) == (now.name, now.shape)
        if was.name not in experts:
            assert tensor_bytes(other, was.name) == tensor_bytes(model, was.name)
            continue
        assert (was.type_name, now.type_name) == ("q4_K", "q8_0")
        values = [
            gguf.quants.dequantize(
                np.frombuffer(tensor_bytes(which, was.name), np.uint8).reshape(
                    int(np.prod(was.shape[1:])), -1
                ),
                gguf.GGMLQuantizationType(kind.type_id),
            )
            for which, kind in ((model, was), (other, now))
        ]
        assert np.abs(values[0] - values[1]).max() <= np.abs(values[0]).max() / 100


def test_a_file_is_made_once_and_clean_removes_it_and_what_was_left_unfinished(model: Model) -> None:
    made = files.make(model, "aligned")
    before = made.stat().st_mtime_ns
    assert files.make(model, "aligned") == made
    assert made.stat().st_mtime_ns == before
    assert files.bytes_needed(model, ["aligned"]) == 0
    left = made.with_name(f".{made.name}.1.partial")
    left.write_bytes(b"half")
    assert {path for path, _ in files.clean()} == {made, left}
    assert not made.exists() and not left.exists()
    assert files.clean() == []


def test_a_disk_too_small_is_refused_before_anything_is_written(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": model.bytes})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RefusedError, match=r"the files this needs take .* free: free some space"):
        files.check_room(model, ["aligned", "requantized"])
    assert not files.directory().exists()
    files.check_room(model, [])


def test_experts_that_cannot_be_taken_apart_leave_no_file(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    def refuse(data: object, kind: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    with pytest.raises(RefusedError, match="cannot be taken apart here: name a --model of another"):
        files.make(model, "requantized")
    assert list(files.directory().iterdir()) == []
