"""A core that was built from other sources than those beside the package is refused in one line."""

from __future__ import annotations

import contextlib
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moestream import core
from moestream.errors import RefusedError

ROOT = Path(__file__).parents[2]
AGAIN = "was built from other sources than those in .*core: build it again with `make setup` there"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for folder in ("bind", "include", "src"):
        shutil.copytree(ROOT / "core" / folder, tmp_path / "core" / folder)
    return tmp_path


def test_the_core_says_what_it_was_built_from(clone: Path) -> None:
    assert core.digest(clone) == core.digest(ROOT) == core._core.SOURCES
    core.check_sources(core._core.SOURCES, clone)
    (clone / "core/src/.engine.cpp.swp").write_text("an editor's")
    core.check_sources(core._core.SOURCES, clone)


@pytest.mark.parametrize("change", ["other", "new", "gone", "renamed"])
def test_any_change_of_the_sources_is_noticed(change: str, clone: Path) -> None:
    source = clone / "core/src/policies/lru.cpp"
    if change == "other":
        source.write_text(source.read_text() + "\n")
    elif change == "new":
        source.with_name("new.cpp").touch()
    elif change == "gone":
        source.unlink()
    else:
        source.rename(source.with_name("lru2.cpp"))
    with pytest.raises(RefusedError, match=AGAIN):
        core.check_sources(core._core.SOURCES, clone)


def test_a_package_without_sources_beside_it_is_as_it_was_built(tmp_path: Path) -> None:
    core.check_sources(None, tmp_path)
    core.check_sources("of the sdist", tmp_path)


@pytest.mark.parametrize("older", ["core.SOURCES = 'of last week'", "del core.SOURCES, core.Engine"])
@pytest.mark.parametrize(
    "words", [["mechanisms"], ["run", "x.gguf", "-p", "a"], ["plan", "x.gguf"], ["analyze", "x.parquet"]]
)
def test_a_command_with_an_older_core_says_build_again(older: str, words: list[str]) -> None:
    script = (
        f"import moestream._core as core, sys; {older}\n"
        "from moestream.cli.main import main; main(sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("moestream: moestream's core was built from other sources than")
    assert "`make setup`" in done.stderr


def test_what_lies_above_an_installed_package_is_somebody_elses(tmp_path: Path) -> None:
    """``pip install --target vendor`` in a project that has a core of its own."""
    (tmp_path / "core/src").mkdir(parents=True)
    (tmp_path / "core/src/main.cpp").touch()
    for folder, refused in (("vendor", False), ("src", True)):
        copy = tmp_path / folder / "moestream/core.py"
        copy.parent.mkdir(parents=True)
        shutil.copy(str(core.__file__), copy)
        with pytest.raises(RefusedError, match=AGAIN) if refused else contextlib.nullcontext():
            runpy.run_path(str(copy))
