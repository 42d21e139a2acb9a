"""Makes the packages, installs them in fresh environments outside the tree and tries what was installed there.

``make packages``; ``PYTHONS="python3.12 /opt/python/bin/python3.14"`` and ``COMPILERS=clang++`` name others than those
found. An sdist; from it, in isolation, a wheel for each compiler and Python (one of the stable ABI serves several);
each is installed twice, streams a small model with stock llama.cpp's logits (``smoke.py``), types a user's program
under ``mypy --strict``, and is uninstalled without a trace. What is not there is skipped, and said. The packages and
the log are left in ``build/packages``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "packages"
LOG = OUT / "log.txt"
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
COMPILERS = ["g++", "clang++"]
#: The first Python of the stable ABI; its wheel serves all later ones.
STABLE = (3, 12)
_FACTS = (
    "import os, sys, sysconfig; print(*sys.version_info[:2], "
    "os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
)

USER = """
from moestream import Llama, Mechanism, ModelError


def words(path: str, ram: str | int | None = "4GiB") -> str:
    mechanism: Mechanism = Mechanism.parse("arena+uring+lru")
    try:
        with Llama(path, ram=ram, mechanism=mechanism, n_ctx=512) as llm:
            llm.cancel()
            return str(llm("Once", max_tokens=1)["choices"][0]["text"])
    except ModelError as error:
        code: int = error.exit_code
        return f"refused, {code}"
"""
#: What a checker that sees the package's types must refuse.
WRONG = "import moestream\n\nmoestream.Llama('a.gguf', ram=1.5)\n"


class Failed(Exception):
    """A step that did not do what it should; its output is in the log."""


@dataclass(frozen=True)
class Python:
    name: str
    path: str
    version: tuple[int, int]
    has_headers: bool


@dataclass
class Row:
    """What became of one Python's wheel by one compiler: a word or two for each step that was taken."""

    compiler: str
    python: str
    cells: dict[str, str] = field(default_factory=dict)
    failure: str = ""


STEPS = ("wheel", "warnings", "smoke", "types", "uninstall")


def run(*command: str | Path, cwd: Path = ROOT, ok: tuple[int, ...] = (0,), **variables: str) -> str:
    """What a command prints, also into the log. Raises Failed with its last line."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with LOG.open("a") as log:
        print("$", *words, file=log)
        log.write(done.stdout)
    if done.returncode not in ok:
        lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Failed(lines[-1])
    return done.stdout


def look_at(name: str) -> Python | str:
    """A Python by its name or path, or why there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = [shutil.which(name)]
    if Path(name).name == name:
        places += map(str, sorted(pyenv.glob(f"versions/*/bin/{name}")))
    for path in filter(None, places):
        done = subprocess.run([path, "-c", _FACTS], capture_output=True, text=True)
        if done.returncode == 0:  # pyenv leaves names on PATH that lead nowhere
            major, minor, headers = done.stdout.split()
            return Python(name, path, (int(major), int(minor)), headers == "True")
    return f"{name}: not on PATH"


def asked_for(named: str, usual: list[str]) -> list[str]:
    return os.environ.get(named, "").split() or usual


def build_sdist() -> Path:
    call = "import sys, build_backend; print(build_backend.build_sdist(sys.argv[1]))"
    return OUT / run(sys.executable, "-c", call, OUT, PYTHONPATH=str(ROOT / "tools")).splitlines()[-1]


def gather_llama_cpp() -> Path:
    """A wheel of the binding, which is for any Python: built once, or pip has it already."""
    house = OUT / "wheelhouse"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (line for line in project["dependencies"] if line.startswith("llama-cpp-python"))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", house, wanted)
    return house


def wheel_of(directory: Path, python: Python) -> Path | None:
    """A wheel already built there that this Python takes."""
    tag = f"cp3{python.version[1]}-cp" if python.version < STABLE else "-abi3-"
    return next((path for path in directory.glob("*.whl") if tag in path.name), None)


def build_wheel(sdist: Path, compiler: str, python: Python, row: Row) -> Path:
    """A wheel from the sdist, as pip builds one: with nothing of this environment."""
    directory = OUT / Path(compiler).name
    found = wheel_of(directory, python)
    if found is None:
        pip = (
            python.path,
            "-m",
            "pip",
            "wheel",
            "-v",
            "--no-deps",
            "--no-cache-dir",
            "--wheel-dir",
            directory,
        )
        said = run(*pip, sdist, cwd=OUT, CXX=compiler)
        warnings = re.findall(r"^.*: warning: .*$", said, re.MULTILINE)
        row.cells["warnings"] = str(len(warnings))
        if warnings:
            raise Failed(warnings[0])
        found = wheel_of(directory, python)
    if found is None:
        raise Failed(f"no wheel for {python.name} in {directory}")
    row.cells["wheel"] = found.name.split("-", 2)[2].removesuffix(".whl")
    return found


def check_types(python: Path, directory: Path) -> str:
    """mypy's view of the installed package from a user's program, and that it does see it."""
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", python)
    for name, text in (("user.py", USER), ("wrong.py", WRONG)):
        (directory / name).write_text(text)
    run(*mypy, "user.py", cwd=directory)
    if "[arg-type]" not in run(*mypy, "wrong.py", cwd=directory, ok=(1,)):
        raise Failed("mypy does not see that ram is no float")
    return "strict"


def check_uninstall(python: Path, directory: Path) -> str:
    run(python, "-m", "pip", "uninstall", "--yes", "moestream", cwd=directory)
    left = [path for path in directory.rglob("*") if path.name.startswith("moestream")]
    if left:
        raise Failed(f"left behind: {left[0]}")
    return "nothing left"


def try_out(wheel: Path, house: Path, python: Python, row: Row) -> None:
    """Install, use, type and uninstall a wheel in an environment of its own."""
    with tempfile.TemporaryDirectory(prefix="moestream-packages-") as temporary:
        home, work = Path(temporary) / "venv", Path(temporary) / "work"
        work.mkdir()
        run(python.path, "-m", "venv", home)
        inside = home / "bin" / "python"
        install = (inside, "-m", "pip", "install", "--find-links", house)
        run(*install, wheel, cwd=work)
        run(*install, "--force-reinstall", "--no-deps", wheel, cwd=work)
        row.cells["smoke"] = run(inside, ROOT / "tools" / "smoke.py", cwd=work).splitlines()[-1]
        row.cells["types"] = check_types(inside, work)
        row.cells["uninstall"] = check_uninstall(inside, home)


def rows(sdist: Path, house: Path, compilers: list[str], pythons: list[Python]) -> Iterator[Row]:
    for compiler in compilers:
        for python in pythons:
            row = Row(compiler, f"{python.version[0]}.{python.version[1]}")
            try:
                wheel = build_wheel(sdist, compiler, python, row)
                try_out(wheel, house, python, row)
            except Failed as failure:
                row.failure = str(failure)
            print(f"{compiler}, Python {row.python}: {row.failure or 'done'}", file=sys.stderr, flush=True)
            yield row


def print_table(made: list[Row]) -> None:
    lines: list[tuple[str, ...]] = [("compiler", "python", *STEPS)]
    lines += [(row.compiler, row.python, *(row.cells.get(step, "-") for step in STEPS)) for row in made]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> int:
    looked = [look_at(name) for name in asked_for("PYTHONS", PYTHONS)]
    pythons = [python for python in looked if isinstance(python, Python)]
    compilers = [name for name in asked_for("COMPILERS", COMPILERS) if shutil.which(name)]
    for reason in (reason for reason in looked if isinstance(reason, str)):
        print(f"skipped: {reason}")
    for name in asked_for("COMPILERS", COMPILERS):
        if name not in compilers:
            print(f"skipped: {name}: not on PATH")
    if not pythons or not compilers:
        print("packages: nothing to try: name Pythons with PYTHONS= and compilers with COMPILERS=")
        return 1
    # A Python without headers takes the wheel that another of the stable ABI built.
    pythons.sort(key=lambda python: (not python.has_headers, python.version))
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    try:
        sdist, house = build_sdist(), gather_llama_cpp()
    except Failed as failure:
        print(f"packages: {failure}; see {LOG}")
        return 1
    print(f"{sdist.name}: {sdist.stat().st_size} bytes", flush=True)
    made = list(rows(sdist, house, compilers, pythons))
    print_table(made)
    failed = [row for row in made if row.failure]
    for row in failed:
        print(f"failed: {row.compiler}, Python {row.python}: {row.failure}; see {LOG}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
