"""System calls that a kernel lacks or a sandbox forbids: replaced or refused in one line, before anything runs."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moestream
from answers import CONTEXT
from children import child_command, child_result, python, refusing, run_child
from conftest import smallest_cap
from moestream import _core

#: io_uring_setup has one number everywhere; madvise and fadvise64 have not.
NO_IO_URING = refusing([425], errno.EPERM)
#: clone is x86-64's, which the C library asks for where clone3 is refused.
NO_THREADS = refusing([56, 435], errno.EAGAIN)
_ADVICE = {"x86_64": [28, 221], "aarch64": [233, 223]}.get(platform.machine(), [])
NO_ADVICE = refusing(_ADVICE, errno.EINVAL)


def unprivileged_mlock() -> tuple[str, ...]:
    return ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "--")


def test_mlock_limited(tiny) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root without setpriv: the limit does not bind")
    path = tiny("olmoe")
    first = f"import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, ({1 << 16}, {1 << 16}))"
    for mechanism in ("arena+uring:24+lru+mlock", "mapped+willneed+mlock", "resident+mlock"):
        prefix = unprivileged_mlock() if os.geteuid() == 0 else ()
        result = run_child(path, "1GiB", mechanism, prefix, first=first)
        assert any("mlock" in line and "ulimit -l" in line for line in result["fallbacks"]), result
        assert result["digests"] == run_child(path, "1GiB", mechanism)["digests"]
        refused = run_child(path, "1GiB", mechanism, prefix, first=first, strict=True)
        assert refused["error"] == "EngagementError"
        assert "mlock" in refused["text"]


@pytest.mark.parametrize("mechanism", ["arena+uring:24+lru", "resident"])
def test_io_uring_refused(mechanism: str, tiny) -> None:
    path = tiny("olmoe")
    result = run_child(path, "1GiB", mechanism, first=NO_IO_URING)
    assert any("io_uring is refused" in line and "threads:4" in line for line in result["fallbacks"]), result
    assert "threads:4" in result["mechanism"]
    assert result["digests"] == run_child(path, "1GiB", mechanism)["digests"]
    refused = run_child(path, "1GiB", mechanism, first=NO_IO_URING, strict=True)
    assert refused["error"] == "EngagementError"
    assert "io_uring is refused" in refused["text"]


@pytest.mark.skipif(not _ADVICE, reason="the numbers of madvise and fadvise64 are not known here")
@pytest.mark.parametrize(
    "mechanism",
    [
        "arena/buffered",
        "mapped+willneed+mlock",
        "mapped+fault+mlock",
        "mapped/random+fault",
        "mapped/random+tiered",
        "mapped+pread+dontneed:0",
    ],
)
def test_advice_that_is_promised_and_refused_refuses_the_load(mechanism: str, tiny) -> None:
    result = run_child(tiny("olmoe"), "1GiB", mechanism, first=NO_ADVICE)
    assert result["error"] in ("RefusedError", "EngagementError")
    assert "Invalid argument" in result["text"]
    assert "\n" not in result["text"]


@pytest.mark.skipif(not _ADVICE, reason="the numbers of madvise and fadvise64 are not known here")
@pytest.mark.parametrize(
    "mechanism",
    [
        "mapped+willneed",
        "mapped+fadvise",
        "mapped+pread+willneed",
        "mapped+willneed+background:1",
    ],
)
def test_advice_that_fails_while_it_runs_ends_the_labs_run(mechanism: str, tiny, tmp_path: Path) -> None:
    document = tmp_path / "document.json"
    module = "import runpy; runpy.run_module('moestream.lab.worker', run_name='__main__', alter_sys=True)"
    words = ["-p", "ab", "-n", "6", "--ctx", "128", "--ram", "1GiB", "--mechanism", mechanism]
    done = subprocess.run(
        [sys.executable, "-c", NO_ADVICE + module, str(tiny("olmoe")), *words, "--json", str(document)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "Invalid argument" in done.stderr.splitlines()[-1]
    assert not document.exists()


@pytest.mark.skipif(not _ADVICE, reason="the numbers of madvise and fadvise64 are not known here")
def test_a_mechanism_that_promises_no_advice_needs_none(tiny) -> None:
    result = run_child(tiny("olmoe"), "1GiB", "mapped+fault", first=NO_ADVICE)
    assert result["fallbacks"] == []
    assert result["digests"] == run_child(tiny("olmoe"), "1GiB", "mapped+fault")["digests"]


@pytest.mark.skipif(not _ADVICE, reason="the numbers of madvise and fadvise64 are not known here")
@pytest.mark.parametrize("tokens", [0, 200])
def test_pages_that_cannot_be_given_back_are_an_error(tokens: int, tiny) -> None:
    """Of experts that leave, or (nothing was computed yet) of frames that no expert has had."""
    program = f"""
import moestream
from moestream.geometry import slab_geometry
llama = moestream.Llama({str(tiny("olmoe"))!r}, ram="1GiB", mechanism="arena", n_ctx={CONTEXT}, n_batch=1)
if {tokens}:
    llama.eval(list(range(1, {tokens})))
llama.governor.close()
{NO_ADVICE}
for call in (lambda: llama._engine.resize(slab_geometry(llama.model_info).smallest(1)), lambda: llama.eval([1])):
    try:
        call()
    except Exception as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dropping an expert's pages: Invalid argument") == 2, done.stdout


def test_direct_refused(tiny, tmp_path: Path) -> None:
    """ramfs has no O_DIRECT; mounted for one child alone."""
    mount = f"mount -t ramfs none {tmp_path} 2>/dev/null || exit 77; cp {tiny('olmoe')} {tmp_path}/m.gguf; "
    path = tmp_path / "m.gguf"

    def run(mechanism: str, strict: bool) -> dict[str, object]:
        command = child_command(path, "1GiB", mechanism, strict=strict)
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount + 'exec "$@"', "sh", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode in (1, 77) and not done.stdout:
            pytest.skip(f"no mount of our own can be had: {done.stderr.strip()}")
        return child_result(done)

    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    for mechanism in ("arena+uring:24+lru", "arena+threads:2+lru", "resident"):
        result = run(mechanism, strict=False)
        assert any("O_DIRECT is refused" in line for line in result["fallbacks"]), result
        assert result["digests"] == run_child(tiny("olmoe"), "1GiB", mechanism)["digests"]
        assert run(mechanism, strict=True)["error"] == "EngagementError"
    assert "error" not in run("arena/buffered", strict=True)


def test_strict_takes_what_engages(tiny) -> None:
    path = tiny("olmoe")
    cap = smallest_cap(path, "arena") + (200 << 20)
    with moestream.Llama(path, ram=cap, mechanism="arena+threads:2+lru", strict=True, n_ctx=CONTEXT) as llama:
        assert llama.fallbacks == []


_MREMAP, _MINCORE, _MADVISE = {"x86_64": (25, 27, 28), "aarch64": (216, 232, 233)}.get(
    platform.machine(), (0, 0, 0)
)
_KNOWN = pytest.mark.skipif(not _MREMAP, reason="the numbers of system calls are not known here")
#: MREMAP_DONTUNMAP in mremap's flags, as a kernel before 5.7 answers it.
NO_DONTUNMAP = refusing([(_MREMAP, 3, 4)], errno.EINVAL)
_IO_URING, _CACHESTAT, _POPULATE = 425, 451, 23


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_io_uring_is_replaced_and_that_is_said_once(error: int, tiny) -> None:
    """ENOSYS: a kernel without it; EPERM: a container's filter, or kernel.io_uring_disabled."""
    result = run_child(tiny("olmoe"), "1GiB", "arena+uring:8", first=refusing([_IO_URING], error))
    (line,) = result["fallbacks"]
    assert f"io_uring is refused (io_uring_setup: {os.strerror(error)})" in line
    assert line.endswith("threads:4 instead of uring:8")
    assert "+threads:4+" in result["mechanism"]


@_KNOWN
@pytest.mark.parametrize("mechanism", ["arena", "arena/align2m+threads:2+lru", "arena+sync+lru+gate:1"])
def test_without_dontunmap_pages_are_had_anew(mechanism: str, tiny) -> None:
    path = tiny("olmoe")
    result = run_child(path, "1GiB", mechanism, first=NO_DONTUNMAP)
    (line,) = result["fallbacks"]
    assert line.startswith(
        "mremap(MREMAP_DONTUNMAP) is refused (Invalid argument): Linux 5.7 or newer has it"
    )
    assert result["mechanism"].startswith("arena/fresh")
    assert result["digests"] == run_child(path, "1GiB", mechanism)["digests"]
    refused = run_child(path, "1GiB", mechanism, first=NO_DONTUNMAP, strict=True)
    assert refused["error"] == "EngagementError"
    assert "Linux 5.7" in refused["text"]
    assert "\n" not in refused["text"]


@_KNOWN
@pytest.mark.parametrize(
    ("mechanism", "call", "error", "said"),
    [
        ("mapped+hybrid:cachestat", _CACHESTAT, errno.ENOSYS, "cachestat is refused on"),
        ("mapped+hybrid:mincore", _MINCORE, errno.EPERM, "mincore is refused (Operation not permitted)"),
        ("arena/populate+lru", (_MADVISE, 2, _POPULATE), errno.EINVAL, "MADV_POPULATE_WRITE is refused"),
    ],
)
def test_what_a_member_needs_is_asked_at_the_load(mechanism: str, call, error: int, said: str, tiny) -> None:
    result = run_child(tiny("olmoe"), "1GiB", mechanism, first=refusing([call], error))
    assert result["error"] in ("RefusedError", "EngagementError")
    assert said in result["text"]
    assert "\n" not in result["text"]


@_KNOWN
def test_abilities_are_the_cores_and_follow_the_kernel(tiny) -> None:
    """`mechanisms` tells what the engine would find: both ask the same function."""
    calls = [_IO_URING, _CACHESTAT, _MINCORE, (_MREMAP, 3, 4)]
    program = refusing(calls, errno.ENOSYS) + (
        "from pathlib import Path\n"
        "from moestream.box.abilities import tests\n"
        "print(sorted(name for name, test in tests(Path()).items() if 'not implemented' in test()))"
    )
    assert python(program) == "['cachestat', 'io_uring', 'mincore', 'mremap']"
    assert set(_core.abilities()) == {"cachestat", "io_uring", "mincore", "mremap", "populate"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of clone is not known here")
@pytest.mark.parametrize("mechanism", ["arena", "mapped"])
def test_threads_that_cannot_be_had_are_told_before_openmp_ends_the_process(mechanism: str, tiny) -> None:
    refused = run_child(tiny("olmoe"), "1GiB", mechanism, first=f"import numpy\n{NO_THREADS}")
    assert refused["error"] == "RefusedError"
    assert "2 threads are to compute and this process can start 0: raise `ulimit -u`" in refused["text"]
