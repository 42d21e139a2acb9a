"""An llama.cpp whose structures are not the proven ones is refused before anything is read through them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import moestream
import moestream._core as _core
from moestream import assembly
from moestream.binding import libllama_path
from moestream.box.page_cache import cached_bytes, drop
from moestream.version import TESTED_VERSIONS

#: ggml's functions, with tensors whose dimensions lie elsewhere.
STUB = """
#include <stddef.h>
#include <stdbool.h>
#include <string.h>
struct params { size_t size; void *buffer; bool no_alloc; };
static char memory[8192];
static size_t used;
void *ggml_init(struct params p) { (void)p; used = 0; return memory; }
void ggml_free(void *context) { (void)context; }
size_t ggml_tensor_overhead(void) { return 368; }
void *ggml_new_tensor_3d(void *c, int type, long a, long b, long d) {
    (void)c; (void)type;
    long *tensor = (long *)(memory + used);
    used += 512;
    memset(tensor, 0, 512);
    tensor[20] = a; tensor[21] = b; tensor[22] = d;
    return tensor;
}
void *ggml_set_name(void *t, const char *n) { (void)n; return t; }
const char *ggml_get_name(const void *t) { return t; }
void *ggml_get_data(const void *t) { (void)t; return 0; }
size_t ggml_nbytes(const void *t) { (void)t; return 0; }
void *ggml_view_2d(void *c, void *t, long a, long b, size_t n, size_t o) {
    (void)c; (void)a; (void)b; (void)n; (void)o; return t;
}
"""


@pytest.fixture(scope="module")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to build the other library with")
    directory = tmp_path_factory.mktemp("abi")
    source, library = directory / "other.c", directory / "libllama.so"
    source.write_text(STUB)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    ctypes.CDLL(str(library))
    return library


def test_the_installed_llama_cpp_is_proven() -> None:
    _core.prove_abi(libllama_path())


def test_another_layout_is_named(other_library: Path) -> None:
    with pytest.raises(_core.CoreError, match="layout") as caught:
        _core.prove_abi(str(other_library))
    assert caught.value.args[0] == "abi"


def test_a_library_without_ggml_is_named() -> None:
    with pytest.raises(_core.CoreError, match="symbol ggml_init"):
        _core.prove_abi(_core.__file__)


def test_the_error_names_the_versions(
    other_library: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "libllama_path", lambda: str(other_library))
    with pytest.raises(moestream.AbiError, match=f"found llama-cpp-python .*{TESTED_VERSIONS}"):
        moestream.Llama(tiny("olmoe"), ram="1GB", mechanism="arena")


@pytest.fixture
def own(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A cold file that nobody else has mapped: such pages stay whatever the kernel is told."""
    path = tmp_path / "own.gguf"
    shutil.copyfile(tiny("olmoe"), path)
    drop([path])
    return path


def test_buffered_reads_leave_nothing_in_the_page_cache(own: Path) -> None:
    with moestream.Llama(own, ram="1GB", mechanism="arena/buffered", n_ctx=128) as llm:
        llm.create_completion("a", max_tokens=8, temperature=0.0)
        read = llm.stats()["since_load"]["prefill"]["bytes_read"]
        cached = cached_bytes([own])
    if cached is None:
        pytest.skip("this kernel does not say what of a file is cached")
    assert read > 0
    # A read-ahead may still land behind the last drop.
    assert cached < read / 2


def test_cached_reads_stay_in_the_page_cache(own: Path) -> None:
    """Every slab that was read, once, and of the dense bytes nothing but the pages a slab has a part of."""
    with moestream.Llama(own, ram="1GB", mechanism="arena/cached", n_ctx=128) as llm:
        loaded = cached_bytes([own])
        llm.create_completion("a", max_tokens=8, temperature=0.0)
        since = llm.stats()["since_load"]
        read = since["prefill"]["bytes_read"] + since["decode"]["bytes_read"]
        slabs = llm._engine.engagement["slabs left in the page cache"]
        cached = cached_bytes([own])
    if cached is None or loaded is None:
        pytest.skip("this kernel does not say what of a file is cached")
    assert slabs > 0 and read > 0
    assert read <= cached <= read + loaded
