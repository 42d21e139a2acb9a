"""What is packed: an sdist of what a wheel is built from and no more, a wheel that is typed and says what it is."""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from moestream.version import TESTED_VERSIONS, __version__

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

import needs  # noqa: E402


def hook(call: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A call of the build backend's, as pip would make it."""
    return subprocess.run(
        [sys.executable, "-c", f"import build_backend; print(build_backend.{call})"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(TOOLS), **variables},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def build(kind: str, into: Path, settings: dict[str, str] | None = None) -> Path:
    done = hook(f"build_{kind}({str(into)!r}, {settings or {}})")
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with tarfile.open(build("sdist", tmp_path_factory.mktemp("sdist"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """All of a wheel but the core itself, which takes a compiler minutes."""
    return zipfile.ZipFile(
        build("wheel", tmp_path_factory.mktemp("wheel"), {"wheel.cmake": "false", "wheel.platlib": "true"})
    )


def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_bytes(wheel.read(f"moestream-{__version__}.dist-info/METADATA"))


def dependency(said: Message, name: str) -> str:
    (line,) = (line for line in said.get_all("Requires-Dist", []) if line.startswith(name))
    return line.removeprefix(name)


def tracked(*under: str) -> set[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *under]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def test_the_sdist_has_what_is_built_from_and_no_more(sdist: set[str]) -> None:
    needed = tracked("src/moestream", "core/src", "core/include", "core/bind")
    assert sdist - needed == {
        "CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml",
        "tools/build_backend.py", "tools/needs.py",
    }  # fmt: skip
    assert needed <= sdist


def test_the_wheel_is_the_package_and_typed(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if not name.startswith(f"moestream-{__version__}.dist-info/")}
    assert packed == {name.removeprefix("src/") for name in tracked("src/moestream")}
    assert {"moestream/py.typed", "moestream/_core.pyi"} <= packed


def test_the_metadata_is_whole(wheel: zipfile.ZipFile) -> None:
    said = metadata(wheel)
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("moestream", __version__, "MIT")
    assert f"moestream-{__version__}.dist-info/licenses/LICENSE" in wheel.namelist()
    classifiers = said.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert TESTED_VERSIONS.split(",") == sorted(dependency(said, "llama-cpp-python").split(","), reverse=True)
    oldest = said["Requires-Python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in classifiers
    entry_points = wheel.read(f"moestream-{__version__}.dist-info/entry_points.txt").decode()
    assert "moestream = moestream.cli.start:main" in entry_points.splitlines()


@pytest.mark.parametrize("call", ["get_requires_for_build_wheel()", "build_editable('.')"])
def test_no_compiler_is_one_line(call: str, tmp_path: Path) -> None:
    done = hook(call, PATH=str(tmp_path), CXX="", CMAKE_ARGS="")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("moestream needs a C++20 compiler")
    assert "apt install" in line


def test_an_sdist_needs_no_compiler(tmp_path: Path) -> None:
    done = hook(f"build_sdist({str(tmp_path)!r})", PATH=str(tmp_path), CXX="/nonexistent")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("/nonexistent/c++ -O2", r"CXX=/nonexistent/c\+\+ is no program"),
        (shutil.which("false") or "false", "which .*false is not"),
        ("c++ -std=c++11 -nostdinc", "is not: name another with CXX"),
    ],
)
def test_what_cannot_compile_the_core_is_named(
    compiler: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    assert re.search(says, str(needs.lacks()))


def test_this_machine_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert needs.lacks() is None


def test_python_without_headers_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert f"there is no {tmp_path}/Python.h" in str(needs.lacks())


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "riscv64")]
)
def test_another_machine_is_named(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    line = str(needs.lacks())
    assert line.startswith("moestream runs on 64-bit Linux, x86-64 or aarch64")
    assert machine in line


def test_packages_says_what_it_skips(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TOOLS / "packages.py"],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONS": f"python9.99 {tmp_path}/python", "COMPILERS": "no-such-c++"},
    )  # fmt: skip
    assert done.returncode == 1, done
    *skipped, last = done.stdout.splitlines()
    assert skipped == [
        "skipped: python9.99: not on PATH",
        f"skipped: {tmp_path}/python: not on PATH",
        "skipped: no-such-c++: not on PATH",
    ]
    assert "PYTHONS=" in last
