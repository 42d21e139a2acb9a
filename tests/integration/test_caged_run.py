"""``run`` in a memory cgroup a little larger than the smallest cap: the same text, and nobody killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from children import run_child
from moestream.box import Cage

#: Several steps of a prompt, and the same steps whatever the cap.
WORDS = ("-p", "ab cd " * 40, "-n", "12", "--ctx", "384", "--batch", "32")
MECHANISMS = ("arena", "arena/fresh+threads:2+lru", "mapped+pread+dontneed:8", "shared+sync+lru")


def command(model: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "moestream", "run", str(model), *WORDS, *words]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    available, how = Cage.available()
    if not available or how == "systemd-run":
        pytest.skip(f"no memory cgroup of our own: {how}")
    return tiny("olmoe")


@pytest.fixture(scope="module")
def expected(model: Path) -> bytes:
    return subprocess.run(command(model, "--mechanism", "resident"), check=True, capture_output=True).stdout


@pytest.mark.parametrize("named", [True, False], ids=["named", "the container's"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_run_fits(
    mechanism: str, named: bool, model: Path, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no cap named a quarter of the container is left to others, so it must be that much larger."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    smallest = int(run_child(model, 1, mechanism, i_know=True)["smallest_bytes"])
    limit = int(smallest * (1.1 if named else 1.5))
    words = ["--mechanism", mechanism, *(["--ram", str(smallest)] if named else [])]
    with Cage(limit) as cage:
        done = cage.run(command(model, *words), capture_output=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected
        assert cage.oom_kills() == 0
