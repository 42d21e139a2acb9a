"""A real cage around real processes; skipped with the reason where none can be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moestream.box import Cage, process_memory
from moestream.errors import MoestreamError

_MIB = 1 << 20
_LIMIT = 96 * _MIB


@pytest.fixture
def cage() -> Iterator[Cage]:
    available, how = Cage.available()
    if not available or how == "systemd-run":
        pytest.skip(f"no memory cgroup of our own: {how}")
    with Cage(_LIMIT) as made:
        yield made


def _group(cage: Cage) -> Path:
    """The cage's directory, from the command that enters it."""
    return Path(cage.command(["true"])[3]).parent


def test_a_program_that_fits_runs_as_outside(cage: Cage) -> None:
    done = cage.run(
        [
            sys.executable,
            "-c",
            "import sys; b = bytearray(40 << 20); print(len(b), sys.argv[1:])",
            "a b",
            '"$x"',
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "41943040 ['a b', '\"$x\"']\n"
    assert done.returncode == 0
    assert cage.oom_kills() == 0
    peak = cage.peak_bytes()
    assert peak is not None
    assert 40 * _MIB < peak <= _LIMIT


def test_a_program_that_does_not_fit_is_killed_and_counted(cage: Cage) -> None:
    done = cage.run([sys.executable, "-c", "b = bytearray(200 << 20)"], capture_output=True)
    assert done.returncode == -9
    assert cage.oom_kills() == 1
    assert cage.peak_bytes() == _LIMIT


def test_file_cache_is_held_to_the_limit_too(cage: Cage, tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        for _ in range(160):
            file.write(os.urandom(_MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = cage.run(["cat", str(big)], stdout=subprocess.DEVNULL)
    assert done.returncode == 0
    assert cage.oom_kills() == 0
    assert 40 * _MIB < cage.stat()["cache"] <= _LIMIT


def test_the_exit_codes_and_streams_are_the_programs(cage: Cage) -> None:
    assert cage.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3
    with cage.popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.communicate(b"through")[0] == b"through"


def test_a_program_that_cannot_enter_is_not_started(cage: Cage, tmp_path: Path) -> None:
    command = cage.command(["touch", str(tmp_path / "started")])
    command[3] = str(tmp_path / "absent/cgroup.procs")
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 125
    assert not (tmp_path / "started").exists()


def test_leaving_ends_what_runs_inside_and_nothing_else() -> None:
    available, how = Cage.available()
    if not available or how == "systemd-run":
        pytest.skip(f"no memory cgroup of our own: {how}")
    with subprocess.Popen(["sleep", "60"]) as outside:
        with Cage(_LIMIT) as cage:
            group = _group(cage)
            with cage.popen(["cat"], stdin=subprocess.PIPE) as inside:
                while str(inside.pid) not in (group / "cgroup.procs").read_text().split():
                    assert inside.poll() is None
                cage.__exit__(None, None, None)
                assert inside.wait() == -9
            assert not group.exists()
        assert process_memory(outside.pid).rss_bytes > 0
        outside.terminate()


def test_a_cage_is_used_inside_its_block() -> None:
    with pytest.raises(MoestreamError, match="inside its with block"):
        Cage(_LIMIT).run(["true"])


def test_groups_of_a_maker_that_was_killed_are_removed_by_the_next(cage: Cage) -> None:
    parent = _group(cage).parent
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    behind = parent / f"moestream-{gone.pid}-0badcafe"
    ours = parent / f"moestream-{os.getpid()}-0badcafe"
    foreign = parent / "moestream-service"
    nobody = parent / f"moestream-{10**30}-0badcafe"
    made = [behind, nobody, ours, foreign]
    try:
        for path in made:
            path.mkdir()
        with Cage(_LIMIT):
            assert [path.exists() for path in made] == [False, False, True, True]
    finally:
        for path in made:
            if path.exists():
                path.rmdir()
