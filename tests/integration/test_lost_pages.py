"""A mapped model whose file loses its end in the middle of a step: an error in one line, not a signal."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moestream
from answers import prompt_tokens
from conftest import load, same_answer
from moestream import assembly
from moestream.binding import libllama_path, low
from moestream.model import read_model

MECHANISMS = (
    "mapped+fault",
    "mapped+willneed",
    "mapped+pread",
    "mapped+memcpy+background:1",
    "mapped+tiered",
    "mapped+fadvise+mlock",
    "cow+uring:24+lru",
    "cow+sync+none",
)


@pytest.fixture
def copy(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A model of this test's own, to break."""
    return Path(shutil.copy(tiny("olmoe"), tmp_path / "model.gguf"))


class Hand:
    """A hand in llama.cpp's eval callback: ``act`` is called once, before the engine hears of the node of that name."""

    def __init__(self) -> None:
        self.node = ""
        self.act: Callable[[], None] = lambda: None
        ggml = ctypes.CDLL(libllama_path())
        ggml.ggml_get_name.restype = ctypes.c_char_p
        self._name = ggml.ggml_get_name

    def at(self, node: str, act: Callable[[], None]) -> None:
        self.node, self.act = node, act

    def callback(self, address: int) -> Any:
        ours = ctypes.cast(address, low.ggml_backend_sched_eval_callback)

        def each(node: int, ask: bool, data: int) -> bool:
            if ask and self.node and self._name(ctypes.c_void_p(node)).decode() == self.node:
                self.node = ""
                self.act()
            return bool(ours(node, ask, data))

        self._kept = low.ggml_backend_sched_eval_callback(each)
        return self._kept


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(assembly, "node_callback", hand.callback)
    return hand


def check_names(text: str, path: Path) -> str:
    """Asserts that an error of one line names the file, a byte and the tensor that has it; returns the tensor."""
    assert "\n" not in text
    assert "the file ends early" in text
    at = int(re.search(rf"{re.escape(str(path))} at byte (\d+)", text)[1])  # type: ignore[index]
    name = next(t.name for t in read_model(path).tensors if t.offset <= at < t.offset + t.nbytes)
    assert name in text
    return name


#: What llama.cpp is about to compute when the file is cut where a tensor begins, and which tensor it will miss.
CUTS = {
    "experts": ("ffn_moe_gate-1", "blk.1.ffn_gate_exps.weight", "_exps.weight"),
    "dense": ("attn_norm-0", "blk.0.attn_q.weight", "blk.0.attn_"),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_cut_within_a_step(mechanism: str, cut: str, copy: Path, hand: Hand, stock: Any) -> None:
    node, tensor, lost = CUTS[cut]
    whole = copy.read_bytes()
    with load(copy, mechanism, i_know=True) as llama:
        size = next(t.offset for t in llama.model_info.tensors if t.name == tensor)
        tokens = prompt_tokens(20, llama.n_vocab())
        llama.eval(tokens)
        hand.at(node, lambda: os.truncate(copy, size))
        with pytest.raises(moestream.ReadError) as raised:
            llama.eval(tokens[:1])
        assert hand.node == ""
        with pytest.raises(moestream.ReadError, match="was written to while it was in use"):
            llama.eval(tokens[:1])
        copy.write_bytes(whole)
        found = check_names(str(raised.value), copy)
        assert lost in found or "background" in mechanism  # whose worker may miss another one first
    with load(copy, mechanism, i_know=True) as llama:
        same_answer(llama, stock, 7)


def test_what_was_lost_stays_lost(copy: Path, hand: Hand) -> None:
    """The pages that were put in their place are not the file's, whatever the file is now."""
    whole, status = copy.read_bytes(), copy.stat()
    with load(copy, "mapped+fault") as llama:
        hand.at("ffn_moe_gate-1", lambda: os.truncate(copy, 1 << 20))
        with pytest.raises(moestream.ReadError, match="load the model again when the file is whole"):
            llama.eval([1])
        copy.write_bytes(whole)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(moestream.ReadError, match="load the model again when the file is whole"):
            llama.eval([1])


def test_faulthandler_that_was_set_later_is_not_asked(
    copy: Path, hand: Hand, capfd: pytest.CaptureFixture[str]
) -> None:
    with load(copy, "mapped+willneed") as llama:
        faulthandler.disable()
        faulthandler.enable()
        hand.at("ffn_moe_gate-1", lambda: os.truncate(copy, 1 << 20))
        with pytest.raises(moestream.ReadError):
            llama.eval([1, 2, 3])
    assert "Bus error" not in capfd.readouterr().err


def test_a_run_ends_with_one_line(copy: Path) -> None:
    words = ["-p", "a", "-n", "4000", "--ctx", "4096", "--mechanism", "mapped+fault"]
    with subprocess.Popen(
        [sys.executable, "-m", "moestream", "run", str(copy), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.read(1)  # it generates
        os.truncate(copy, 1 << 20)
        _, said = run.communicate(timeout=120)
    assert run.returncode == 4, said
    assert f"{copy} at byte ".encode() in said.splitlines()[-1]
