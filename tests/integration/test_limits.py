"""What a machine or a container lets a process have, for real: affinity, quota, locks, address space, files.

Each in a process of its own; what this machine lacks is skipped with the reason. Trees that stand for other machines
are in tests/unit/test_box_limits.py.
"""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from children import python
from ggufs import write_split
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


# -- what the kernel does not tell --


def run_where(mounts: str, *words: object) -> tuple[int, str, str]:
    """A command line where files of the kernel's are covered by ``mounts``, for that process alone."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    able = subprocess.run(["unshare", "-m", "sh", "-c", mounts], capture_output=True, text=True, check=False)
    if able.returncode != 0:
        pytest.skip(f"no mounts of our own can be had: {able.stderr.strip()}")
    return run(*words, prefix=("unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh"))


@pytest.mark.parametrize(
    "mounts",
    [
        "mount -t tmpfs none /sys",
        "mount --bind /dev/null /proc/meminfo",
        "mount --bind /dev/null /proc/pressure/memory; for f in cgroup mountinfo limits; do "
        "mount --bind /dev/null /proc/self/$f; done",
    ],
    ids=["no /sys", "no meminfo", "no pressure, groups, mounts, limits"],
)
def test_what_is_not_told_is_done_without(mounts: str, tiny) -> None:
    words = ("run", tiny("olmoe"), "-p", "a", "-n", 2, "--ctx", 64, "--mechanism", "arena")
    code, _, errors = run_where(mounts, *words)
    assert code == 0, errors
    code, out, errors = run_where(mounts, "plan", tiny("olmoe"), "--ctx", 64, "--json")
    assert code == 0, errors
    assert json.loads(out)["cap_bytes"] > 0


def test_without_proc_a_run_is_refused_in_one_line(tiny) -> None:
    """What this process uses is not known then, so no cap could be kept."""
    words = ("run", tiny("olmoe"), "-p", "a", "-n", 2, "--ctx", 64, "--mechanism", "arena")
    code, out, errors = run_where("mount -t tmpfs none /proc", *words)
    assert (code, out) == (3, "")
    assert errors == (
        "moestream: /proc/self/status cannot be read, so what this process uses cannot be known: mount /proc\n"
    )


# -- what a process may take --


_USED = """
import resource, sys, moestream.cli.run, moestream.engine
from moestream.box import Box
for number in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
    resource.setrlimit(number, (1 << 40, 1 << 40))
print(getattr(Box().limits(), sys.argv[1]).used)
"""


@pytest.mark.parametrize("mechanism", ["arena", "resident", "mapped+willneed"])
@pytest.mark.parametrize("kind", ["address", "data"])
def test_the_limit_that_is_named_is_enough(kind: str, mechanism: str, tiny) -> None:
    """One clear line before anything is loaded, and what it names works: the limit is raised to it until it runs."""
    letter, number, free = {
        "address": ("v", resource.RLIMIT_AS, 112 * MIB),
        "data": ("d", resource.RLIMIT_DATA, 56 * MIB),
    }[kind]
    words = ("run", tiny("olmoe"), "-p", "a", "-n", 2, "--ctx", 64, "--ram", "1GiB", "--mechanism", mechanism)
    # Enough to import everything, in the thread that loads.
    limit, said = int(python(_USED, kind)) + free, []
    for _ in range(3):
        code, _, errors = run(*words, before=partial(resource.setrlimit, number, (limit, limit)))
        if code == 0:
            break
        assert code == 3, errors
        (line,) = errors.splitlines()
        found = re.search(
            rf"^moestream: {mechanism.partition('+')[0]} needs .*`ulimit -{letter} (\d+)`", line
        )
        assert found is not None, line
        limit = int(found[1]) * 1024
        said.append(line)
    assert code == 0, said
    # First what the model alone takes, then all of it, once the context's sizes are known.
    assert 1 <= len(said) <= 2


def test_many_shards_are_opened_as_far_as_the_hard_limit_goes(tiny, tmp_path: Path) -> None:
    write_split(tiny("olmoe"), tmp_path / "many.gguf", 40)
    shards = sorted(tmp_path.glob("many-*"))
    assert len(shards) > 15
    words = ("run", shards[7], "-p", "a", "-n", 2, "--ctx", 64, "--mechanism", "arena")
    code, _, errors = run(*words, before=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (40, 400)))
    assert code == 0, errors
    code, _, errors = run(*words, before=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (40, 40)))
    assert code == 3
    (line,) = errors.splitlines()
    found = re.search(rf"shards: {len(shards)}\) takes \d+ open files .*raise `ulimit -n` to (\d+) ", line)
    assert found is not None, line
    enough = int(found[1])
    code, _, errors = run(*words, before=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (40, enough)))
    assert code == 0, errors


_LOCKED = """
import sys, moestream
from moestream.box import process_memory
with moestream.Llama(sys.argv[1], ram="1GiB", mechanism=sys.argv[2], n_ctx=64) as llama:
    print(process_memory().locked_bytes, *llama.fallbacks, sep="\\n")
"""


@pytest.mark.parametrize("mechanism", ["resident+mlock", "arena+mlock", "mapped+willneed+mlock"])
def test_a_lock_goes_as_far_as_it_may_and_names_what_is_enough(mechanism: str, tiny) -> None:
    """The soft limit is raised to the hard one; what that allows is locked; the line's number locks all of it."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root without setpriv: the limit does not bind")
    path = tiny("olmoe")
    free = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "--") if os.geteuid() == 0 else ()

    def locked(hard: int) -> tuple[int, list[str]]:
        first = f"import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, {hard}))"
        count, *said = python(first + _LOCKED, path, mechanism, prefix=free).splitlines()
        return int(count), said

    hard, most = 400 << 10, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if most != resource.RLIM_INFINITY and most < hard:
        pytest.skip("this session's hard limit of locked memory is too low")
    count, said = locked(hard)
    assert hard - (16 << 10) <= count <= hard
    (line,) = [line for line in said if "mlock" in line]
    found = re.search(
        r"`ulimit -l (\d+)` \(systemd: LimitMEMLOCK=(\d+), docker: --ulimit memlock=(\d+)\)", line
    )
    assert found is not None, line
    assert found[2] == found[3]
    if most != resource.RLIM_INFINITY and most < int(found[2]):
        return  # what is enough is more than may be had here
    count, said = locked(int(found[2]))
    assert not [line for line in said if "mlock" in line]
    assert hard < count <= int(found[2])


def test_plan_tells_of_a_lock_before_the_load(tiny) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root without setpriv: the limit does not bind")
    free = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "--") if os.geteuid() == 0 else ()
    words = ("plan", tiny("olmoe"), "--ctx", 64, "--mechanism", "arena+mlock")
    code, out, errors = run(
        *words, prefix=free, before=partial(resource.setrlimit, resource.RLIMIT_MEMLOCK, (8192, 8192))
    )
    assert code == 0, errors
    assert "lock: 8.19 kB of " in out
    assert "--ulimit memlock=" in out
