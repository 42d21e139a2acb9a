"""What read_model finds in good files: every expert's bytes, where the ``gguf`` package says they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import typer
from gguf import GGMLQuantizationType as Q
from typer.testing import CliRunner

from ggufs import dense_tensors, expert_tensors, moe_tensors, split_gguf, write_gguf
from moestream.cli.inspect import describe, format_layers, inspect
from moestream.errors import AbiError, ModelError
from moestream.model import check_architecture, known_architecture, locate, read_model
from moestream.model import ggml as model_ggml
from moestream.model.weights import SAMPLE_BYTES

Q8_ROW_64 = 2 * 34  # Q8_0: 34 bytes for each 32 values
Q8_ROW_96 = 3 * 34


def test_every_number_of_a_small_model(tmp_path: Path) -> None:
    model = read_model(write_gguf(tmp_path / "tiny.gguf"))
    assert (model.arch, model.name, model.n_layers, model.n_mtp_layers) == ("olmoe", "Tiny", 2, 0)
    assert (model.n_experts, model.n_experts_used) == (8, 2)
    assert (model.n_ctx_train, model.n_embd, model.n_vocab) == (4096, 64, 300)
    assert model.is_moe and model.paths == (tmp_path / "tiny.gguf",)
    assert [(bank.index, bank.layer, bank.kind, bank.count, bank.used) for bank in model.banks] == [
        (0, 0, "routed", 8, 2),
        (1, 1, "routed", 8, 2),
    ]
    assert [(t.role, t.slab_bytes, t.count, t.type_name) for t in model.banks[0].tensors] == [
        ("gate", 96 * Q8_ROW_64, 8, "q8_0"),
        ("up", 96 * Q8_ROW_64, 8, "q8_0"),
        ("down", 64 * Q8_ROW_96, 8, "q8_0"),
    ]
    expert = 2 * 96 * Q8_ROW_64 + 64 * Q8_ROW_96
    assert model.banks[0].expert_bytes == expert
    assert model.expert_bytes == 2 * 8 * expert
    assert model.demand_bytes_per_token == 2 * 2 * expert
    assert model.bytes == (tmp_path / "tiny.gguf").stat().st_size
    assert model.dense_bytes == model.bytes - model.expert_bytes


@pytest.mark.parametrize("quant", [Q.F32, Q.F16, Q.Q4_0, Q.Q8_0, Q.MXFP4, Q.BF16])
def test_agrees_with_the_gguf_package(tmp_path: Path, quant: Q) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", moe_tensors(quant=quant))
    reader = gguf.GGUFReader(path)
    model = read_model(path)
    assert [t.name for t in model.tensors] == [t.name for t in reader.tensors]
    for ours, theirs in zip(model.tensors, reader.tensors, strict=True):
        assert ours.shape == tuple(int(n) for n in theirs.shape)
        assert (ours.type_id, ours.offset, ours.nbytes) == (
            theirs.tensor_type,
            theirs.data_offset,
            theirs.n_bytes,
        )
    for tensor in (tensor for bank in model.banks for tensor in bank.tensors):
        (theirs,) = (t for t in reader.tensors if t.name == tensor.name)
        for expert in range(tensor.count):
            start = tensor.offset + expert * tensor.slab_bytes
            assert path.read_bytes()[start : start + tensor.slab_bytes] == theirs.data[expert].tobytes()
    assert model.shards[0].data_offset == reader.data_offset


def test_the_file_is_not_changed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    before = hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns
    path.chmod(0o444)
    read_model(path)
    assert (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) == before


def test_a_model_is_a_value(tmp_path: Path) -> None:
    model = read_model(write_gguf(tmp_path / "tiny.gguf"))
    assert model == read_model(str(tmp_path / "tiny.gguf"))
    assert len({model, pickle.loads(pickle.dumps(model))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.arch = "other"  # type: ignore[misc]


def test_dense_model(tmp_path: Path) -> None:
    keys = {"%s.expert_count": None, "%s.expert_used_count": None}
    model = read_model(write_gguf(tmp_path / "d.gguf", dense_tensors(2), arch="llama", keys=keys))
    assert (model.banks, model.is_moe, model.n_experts, model.n_experts_used) == ((), False, 0, 0)
    assert (model.expert_bytes, model.dense_bytes, model.demand_bytes_per_token) == (0, model.bytes, 0)


@pytest.mark.parametrize(
    ("roles", "kept"),
    [
        (("down", "gate_up"), ["gate_up", "down"]),
        (("down", "up"), ["up", "down"]),
        (("down", "up", "gate"), ["gate", "up", "down"]),
    ],
)
def test_layouts(tmp_path: Path, roles: tuple[str, ...], kept: list[str]) -> None:
    model = read_model(write_gguf(tmp_path / "m.gguf", moe_tensors(roles=roles)))
    assert [[t.role for t in bank.tensors] for bank in model.banks] == [kept, kept]
    assert all(t.bank == bank.index and t.layer == bank.layer for bank in model.banks for t in bank.tensors)


def test_names_that_only_look_like_experts_are_dense(tmp_path: Path) -> None:
    looks_alike = [
        ("blk.0.ffn_gate_exps.bias", (96, 8), Q.F32),
        ("blk.0.ffn_up_exps.scale", (8,), Q.F32),
        ("blk.0.ffn_norm_exps.weight", (64,), Q.F32),
        ("blk.0.ffn_gate_shexp.weight", (64, 96), Q.Q8_0),
        ("blk.0.ffn_gate.weight", (64, 96), Q.Q8_0),
        ("blk.0.exp_probs_b.bias", (8,), Q.F32),
    ]
    plain = read_model(write_gguf(tmp_path / "a.gguf"))
    model = read_model(write_gguf(tmp_path / "b.gguf", moe_tensors() + looks_alike))
    assert model.expert_bytes == plain.expert_bytes
    assert len(model.tensors) == len(plain.tensors) + len(looks_alike)


def test_leading_dense_layers_and_used_for_each_layer(tmp_path: Path) -> None:
    tensors = dense_tensors(4) + [t for layer in (1, 3) for t in expert_tensors(layer)]
    keys = {"%s.block_count": 4, "%s.expert_used_count": [0, 3, 0, 6]}
    model = read_model(write_gguf(tmp_path / "m.gguf", tensors, arch="nemotron_h_moe", keys=keys))
    assert [(bank.index, bank.layer, bank.used) for bank in model.banks] == [(0, 1, 3), (1, 3, 6)]
    assert (model.n_layers, model.n_experts_used) == (4, 6)
    assert model.metadata["nemotron_h_moe.expert_used_count"] == (0, 3, 0, 6)
    assert model.demand_bytes_per_token == 9 * model.banks[0].expert_bytes


def test_prediction_heads_are_banks_but_no_demand(tmp_path: Path) -> None:
    tensors = moe_tensors(n_layers=3)
    keys = {"%s.block_count": 3, "%s.nextn_predict_layers": 1}
    model = read_model(write_gguf(tmp_path / "m.gguf", tensors, arch="glm4moe", keys=keys))
    assert (len(model.banks), model.n_mtp_layers) == (3, 1)
    assert model.demand_bytes_per_token == 2 * 2 * model.banks[0].expert_bytes


def test_chunk_experts_are_a_second_bank_of_the_layer(tmp_path: Path) -> None:
    tensors = dense_tensors(1)
    tensors += expert_tensors(0, n_ff=32, n_experts=4, suffix="chexps") + expert_tensors(0)
    keys = {"%s.block_count": 1, "%s.expert_used_count": 6}
    model = read_model(write_gguf(tmp_path / "m.gguf", tensors, arch="grovemoe", keys=keys))
    routed, chunk = model.banks
    assert (routed.kind, routed.layer, routed.count, routed.used) == ("routed", 0, 8, 6)
    assert (chunk.kind, chunk.layer, chunk.count, chunk.used) == ("chunk", 0, 4, 4)
    assert [t.role for t in chunk.tensors] == ["chunk_gate", "chunk_up", "chunk_down"]
    assert (model.n_experts, model.n_experts_used) == (8, 6)


def test_layers_may_differ_in_type(tmp_path: Path) -> None:
    tensors = dense_tensors(2) + expert_tensors(0, quant=Q.Q4_0) + expert_tensors(1, quant=Q.Q8_0)
    model = read_model(write_gguf(tmp_path / "m.gguf", tensors))
    assert [bank.tensors[0].type_name for bank in model.banks] == ["q4_0", "q8_0"]
    assert model.banks[0].expert_bytes * 34 == model.banks[1].expert_bytes * 18


def test_metadata_has_no_tokenizer_arrays(tmp_path: Path) -> None:
    keys = {"%s.small": [1, 2, 3], "%s.large": list(range(5000)), "general.flag": True, "%s.eps": 0.5}
    model = read_model(write_gguf(tmp_path / "m.gguf", keys=keys))
    assert model.metadata["olmoe.small"] == (1, 2, 3)
    assert model.metadata["general.flag"] is True
    assert model.metadata["olmoe.eps"] == 0.5
    assert "olmoe.large" not in model.metadata
    assert not {"tokenizer.ggml.tokens", "tokenizer.ggml.scores"} & set(model.metadata)


@pytest.mark.parametrize(("keys", "vocab"), [({}, 300), ({"%s.vocab_size": 299}, 299)])
def test_vocabulary_without_a_tokenizer(tmp_path: Path, keys: dict[str, int], vocab: int) -> None:
    assert read_model(write_gguf(tmp_path / "m.gguf", n_tokens=0, keys=keys)).n_vocab == vocab


def test_name_and_layers_without_their_keys(tmp_path: Path) -> None:
    model = read_model(write_gguf(tmp_path / "m.gguf", keys={"general.name": None, "%s.block_count": None}))
    assert (model.name, model.n_layers) == ("m", 2)


@pytest.mark.parametrize("small_first_shard", [False, True])
def test_any_shard_stands_for_the_model(tmp_path: Path, small_first_shard: bool) -> None:
    whole = read_model(write_gguf(tmp_path / "whole.gguf"))
    shards = split_gguf(tmp_path / "split.gguf", small_first_shard=small_first_shard)
    assert len(shards) >= 3
    models = [read_model(shard) for shard in shards]
    assert all(model == models[0] for model in models)
    model = models[0]
    assert model.paths == tuple(shards)
    assert model.bytes == sum(shard.stat().st_size for shard in shards)
    assert model.expert_bytes == whole.expert_bytes
    assert [t.name for t in model.tensors] == [t.name for t in whole.tensors]
    data = [path.read_bytes() for path in model.paths]
    original = (tmp_path / "whole.gguf").read_bytes()
    for ours, theirs in zip(model.tensors, whole.tensors, strict=True):
        part = data[ours.shard][ours.offset : ours.offset + ours.nbytes]
        assert part == original[theirs.offset : theirs.offset + theirs.nbytes]
    if small_first_shard:
        assert not any(tensor.shard == 0 for tensor in model.tensors)


def test_identity(tmp_path: Path) -> None:
    first = read_model(write_gguf(tmp_path / "a.gguf", seed=1)).identity
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    assert len(first) == 16
    assert read_model(tmp_path / "b.gguf").identity == first
    others = {
        read_model(write_gguf(tmp_path / "f.gguf", seed=2)).identity,  # equal shapes, other weights
        read_model(write_gguf(tmp_path / "c.gguf", moe_tensors(quant=Q.Q4_0))).identity,
        read_model(write_gguf(tmp_path / "d.gguf", moe_tensors()[::-1])).identity,
        read_model(split_gguf(tmp_path / "e.gguf")[0]).identity,
    }
    assert len(others | {first}) == 5


def test_weights_are_read_when_the_identity_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not by a load."""
    path = write_gguf(tmp_path / "m.gguf")
    before = read_model(path).identity
    read = []
    pread = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        read.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    model = read_model(path)
    assert read == []
    assert model.identity == model.identity == before
    assert read == [min(SAMPLE_BYTES, tensor.nbytes) for tensor in model.tensors]


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("change", ["written to", "replaced", "removed"])
def test_the_identity_is_of_the_model_that_was_read(tmp_path: Path, change: str, shard: int) -> None:
    """Samples of other weights would name a model that never was."""
    model = read_model(split_gguf(tmp_path / "m.gguf")[0])
    assert read_model(model.paths[0]) == model
    path = model.paths[shard]
    other = path.read_bytes()[:-1] + b"x"
    if change == "written to":
        path.write_bytes(other)
    elif change == "replaced":
        (tmp_path / "other").write_bytes(other)
        (tmp_path / "other").rename(path)
    else:
        path.unlink()
    with pytest.raises(ModelError, match=re.escape(str(path))):
        _ = model.identity
    if change != "removed":
        assert read_model(path) != model


def test_ggml_log_is_restored_and_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from ggufs import patch, set_tensor_type

    lib = model_ggml.ggml_library()
    kept: list[bytes] = []
    callback = model_ggml._LogCallback(lambda _level, text, _data: kept.append(text))
    address = model_ggml.ctypes.cast(callback, model_ggml.ctypes.c_void_p)
    before, data, after = (model_ggml.ctypes.c_void_p() for _ in range(3))
    lib.ggml_log_get(before, data)
    lib.ggml_log_set(address, None)
    try:
        path = patch(write_gguf(tmp_path / "m.gguf"), set_tensor_type("blk.0.ffn_up_exps.weight", 200))
        with pytest.raises(ModelError):
            read_model(path)
        lib.ggml_log_get(after, data)
        assert after.value == address.value
    finally:
        lib.ggml_log_set(before, None)
    assert kept == []
    assert capfd.readouterr() == ("", "")


def test_import_is_light() -> None:
    code = (
        "import sys, moestream.model; "
        "print(sorted({'numpy', 'llama_cpp', 'gguf', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reading_does_not_import_the_binding(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from moestream.model import read_model; read_model(sys.argv[1]); "
        "print('llama_cpp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_binding_uses_the_same_ggml(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from moestream.model import read_model; read_model(sys.argv[1]); import llama_cpp; "
        "maps = open('/proc/self/maps').read().split(); "
        "print(len({word for word in maps if 'libggml-base' in word}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    "arch", ["llama", "olmoe", "qwen2moe", "qwen3moe", "deepseek2", "gpt-oss", "glm4moe", "grovemoe"]
)
def test_known_architectures(arch: str) -> None:
    assert known_architecture(arch)


@pytest.mark.parametrize("arch", ["foomoe", "", "olmoe2-from-the-future", "a\0b"])
def test_unknown_architectures(arch: str) -> None:
    assert not known_architecture(arch)


def test_check_architecture(tmp_path: Path) -> None:
    check_architecture(read_model(write_gguf(tmp_path / "a.gguf")))
    with pytest.raises(ModelError, match=r"architecture 'foomoe' is unknown to llama-cpp-python \d+\."):
        check_architecture(read_model(write_gguf(tmp_path / "b.gguf", arch="foomoe")))


def test_library_path_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_ggml.find_library("ggml-base")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(real.parent))
    assert model_ggml.find_library("ggml-base") == real
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(AbiError, match=f"no libggml-base in {tmp_path}"):
        model_ggml.find_library("ggml-base")
    (tmp_path / "libggml-base.so").touch()
    assert model_ggml.find_library("ggml-base") == tmp_path / "libggml-base.so"


def test_locate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import moestream.make

    assert locate("some/model.gguf") == Path("some/model.gguf")
    assert locate("~/m.gguf") == Path.home() / "m.gguf"
    monkeypatch.setattr(moestream.make, "demo_path", lambda: tmp_path / "demo.gguf", raising=False)
    with pytest.raises(ModelError, match=r"run: moestream demo-model"):
        locate("demo")
    (tmp_path / "demo.gguf").touch()
    assert locate("demo") == tmp_path / "demo.gguf"


@pytest.mark.parametrize(
    ("layers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7"), ([1, 3], "1, 3")],
)
def test_format_layers(layers: list[int], text: str) -> None:
    assert format_layers(layers) == text


def _inspect(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(inspect)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_inspect_json(tmp_path: Path) -> None:
    tensors = dense_tensors(3) + expert_tensors(0) + expert_tensors(1, quant=Q.Q4_0) + expert_tensors(2)
    path = write_gguf(tmp_path / "m.gguf", tensors, keys={"%s.block_count": 3})
    model = read_model(path)
    found = json.loads(_inspect(str(path), "--json"))
    assert found == describe(model)
    assert found["paths"] == [str(path)]
    for key in ("bytes", "dense_bytes", "expert_bytes", "demand_bytes_per_token", "identity", "arch"):
        assert found[key] == getattr(model, key)
    assert (found["layers"], found["moe_layers"], found["experts"], found["experts_used"]) == (3, 3, 8, 2)
    assert [bank["layers"] for bank in found["banks"]] == [[0, 2], [1]]
    assert found["banks"][0]["tensors"][2] == {
        "role": "down",
        "type": "q8_0",
        "slab_bytes": 64 * Q8_ROW_96,
        "count": 8,
    }


def test_inspect_tables(tmp_path: Path) -> None:
    shards = split_gguf(tmp_path / "m[red].gguf")
    text = _inspect(str(shards[1]))
    model = read_model(shards[0])
    for needed in (
        "Tiny",
        "olmoe",
        model.identity,
        "0-1",
        "gate",
        "q8_0",
        str(64 * Q8_ROW_96),
        *map(str, shards),
    ):
        assert needed in text
    assert "8 a layer, 2 used, in 2 layers" in text


def test_inspect_dense(tmp_path: Path) -> None:
    keys = {"%s.expert_count": None, "%s.expert_used_count": None}
    path = write_gguf(tmp_path / "m.gguf", dense_tensors(2), arch="llama", keys=keys)
    assert "a dense model" in _inspect(str(path))
    assert json.loads(_inspect(str(path), "--json"))["banks"] == []
