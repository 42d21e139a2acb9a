"""What a machine or a container lets a process have, for real: affinity, quota, locks, address space, system calls.

Each in a process of its own; what this machine lacks is skipped with the reason. Trees that stand for other machines
are in tests/unit/test_box_limits.py.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moestream.box import Box, Cage
from moestream.box.cgroup import groups

MIB = 1 << 20


def run(
    *words: object, prefix: tuple[str, ...] = (), before: Callable[[], object] | None = None
) -> tuple[int, str, str]:
    """A command line: its exit code, stdout and stderr. ``before`` runs in the child ahead of it."""
    command = [*prefix, sys.executable, "-m", "moestream", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, preexec_fn=before, check=False
    )
    return done.returncode, done.stdout, done.stderr


def python(program: str, *words: object, prefix: tuple[str, ...] = ()) -> str:
    """What a program in a fresh process prints."""
    command = [*prefix, sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- processors --

_COUNTS = """
import sys, moestream
with moestream.Llama(sys.argv[1], mechanism="resident", n_ctx=64) as llama:
    print(llama.n_threads, llama.n_threads_batch)
"""


def test_an_affinity_bounds_the_threads(tiny) -> None:
    one = min(os.sched_getaffinity(0))
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one processor: an affinity takes none away")
    code, _, said = run(
        "run", tiny("olmoe"), "-p", "a", "-n", 1, "--ctx", 64, before=lambda: os.sched_setaffinity(0, {one})
    )
    assert code == 0, said
    assert "\nthreads 1: affinity (taskset, a cpuset): 1 of " in said
    first = f"import os; os.sched_setaffinity(0, {{{one}}})"
    assert python(first + _COUNTS, tiny("olmoe")) == "1 1"


@pytest.fixture
def cpu_group() -> Iterator[Path]:
    """A cgroup of the cpu controller below this process's own."""
    for group in groups(Path("/"), "cpu"):
        path = group.path / f"moestream-test-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            path.mkdir()
        except OSError:
            continue
        if not any((path / name).exists() for name in ("cpu.cfs_quota_us", "cpu.max")):
            path.rmdir()
            continue
        yield path
        path.rmdir()
        return
    pytest.skip("no cgroup of the cpu controller can be made here")


@pytest.mark.parametrize(("percent", "count"), [(50, 1), (150, 1)])
def test_a_quota_bounds_the_threads(percent: int, count: int, cpu_group: Path, tiny) -> None:
    if Box().cpus() == 1:
        pytest.skip("one processor: a quota takes none away")
    if (cpu_group / "cpu.max").exists():
        (cpu_group / "cpu.max").write_text(f"{percent * 1000} 100000")
    else:
        (cpu_group / "cpu.cfs_quota_us").write_text(str(percent * 1000))
    enter = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(cpu_group))
    code, out, said = run("plan", tiny("olmoe"), "--ctx", 64, prefix=enter)
    assert code == 0, said
    (line,) = [line for line in out.splitlines() if line.startswith("threads")]
    assert line.split()[1] == f"{count},"
    assert str(cpu_group) in line
    assert f"{percent / 100:g} CPUs' time" in line
    assert python(_COUNTS, tiny("olmoe"), prefix=enter) == f"{count} {count}"


# -- memory --

_HOLDS = """
import ctypes, mmap, os, sys
from moestream.box import Box
limit, locked, cached = 256 << 20, 64 << 20, 96 << 20
with open(sys.argv[1], "wb") as file:
    file.write(bytes(cached))
    file.flush()
    os.fsync(file.fileno())
before = Box().room()
area = mmap.mmap(-1, locked)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
refused = ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(locked))
after = Box().room()
print(refused, before.bytes - after.bytes, limit - before.bytes, after.source)
"""


def test_locked_memory_is_counted_once_and_file_cache_never(tmp_path: Path) -> None:
    """By a real cgroup: what a lock takes is its size, and a file that was written takes nothing."""
    available, how = Cage.available()
    if not available or how == "systemd-run":
        pytest.skip(f"no cgroup directory can be made: {how}")
    with Cage(256 * MIB) as cage:
        done = cage.run(
            [sys.executable, "-c", _HOLDS, str(tmp_path / "file")], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    refused, taken, held, source = done.stdout.split()
    if refused != "0":
        pytest.skip("mlock is refused here")
    assert 60 * MIB < int(taken) < 72 * MIB  # the kernel's own account lags by some pages a processor
    assert int(held) < 64 * MIB  # the interpreter; not the 96 MiB of the file
    assert "moestream-" in source
