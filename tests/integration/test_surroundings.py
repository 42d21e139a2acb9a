"""Commands where the user's surroundings are bare or odd: no home, another locale, optimized, from a zip."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import moestream

ODD: dict[str, tuple[list[str], dict[str, str]]] = {
    "nothing set": ([], {}),
    "isolated": (["-I"], {}),
    "without docstrings": (["-OO"], {}),
    "bytes are not UTF-8": ([], {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "no cache to write": ([], {"XDG_CACHE_HOME": "/proc/no/such/place"}),
}


def command(
    *words: str, options: list[str] | None = None, first: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command of a process that has these variables alone."""
    start = ["-c", f"import sys; {first}; from moestream.cli.main import main; main(sys.argv[1:])"]
    program = [sys.executable, *(options or []), *(start if first else ["-m", "moestream"])]
    return subprocess.run([*program, *words], capture_output=True, text=True, timeout=120, env=variables)


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 3, done
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("odd", ODD)
def test_a_run_is_the_same_run(odd: str, tiny: Callable[..., Path]) -> None:
    options, variables = ODD[odd]
    words = [
        "run",
        str(tiny("olmoe")),
        "--ram",
        "1GB",
        "-p",
        "a",
        "-n",
        "2",
        "--mechanism",
        "arena",
        "--strict",
    ]
    done = command(*words, options=options, **variables)
    assert done.returncode == 0, done.stderr
    assert "mechanism arena" in done.stderr


def test_help_without_docstrings_names_the_options() -> None:
    done = command("run", "--help", options=["-OO"])
    assert done.returncode == 0
    assert "--ram" in done.stdout


def test_a_user_without_a_home_is_told_where_the_demo_would_be() -> None:
    homeless = "import pathlib; pathlib.Path.home = lambda: (_ for _ in ()).throw(RuntimeError('no home'))"
    assert "the demo model is not made yet" in only_line(command("run", "demo", "-p", "a", first=homeless))


def test_a_name_that_this_locale_cannot_say(tiny: Callable[..., Path], tmp_path: Path) -> None:
    named = tmp_path / "modèle.gguf"
    named.symlink_to(tiny("olmoe"))
    _, variables = ODD["bytes are not UTF-8"]
    line = only_line(command("run", str(named), "--ram", "1GB", "-p", "a", **variables))
    assert "set LC_ALL=C.UTF-8" in line


def test_from_a_zip_the_core_is_missed_in_one_line(tiny: Callable[..., Path], tmp_path: Path) -> None:
    package = Path(moestream.__file__).parent
    archive = tmp_path / "moestream.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for path in package.rglob("*.py"):
            made.write(path, Path("moestream") / path.relative_to(package))
    # An editable installation finds the package before any path does.
    only_paths = "sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]"
    first = f"{only_paths}; sys.path.insert(0, {str(archive)!r})"
    words = ["run", str(tiny("olmoe")), "--ram", "1GB", "-p", "a"]
    assert "its core cannot be loaded" in only_line(command(*words, first=first, **os.environ))
