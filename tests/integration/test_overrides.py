"""Other llama.cpps than the installed one: a build that ``LLAMA_CPP_LIB_PATH`` names, and untested versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from answers import Answer, prompt_tokens
from children import run_child
from moestream.binding import libllama_path, library_versions, llama_cpp, unproven
from moestream.errors import AbiError
from moestream.version import INSTALL_TESTED, TESTED_VERSIONS

OVERRIDE = "LLAMA_CPP_LIB_PATH"
#: One of what llama.cpp's build makes, by its plain name and the one that the others ask for.
LIBRARIES = ("libllama", "libggml", "libggml-base", "libggml-cpu")


def copy_libraries(into: Path) -> Path:
    """The installed llama.cpp at another place, as a build of one's own would lie there."""
    into.mkdir()
    for name in LIBRARIES:
        for found in Path(libllama_path()).parent.glob(f"{name}.so*"):
            if len(found.suffixes) <= 2:  # .so and .so.0, which is all that is asked for
                shutil.copy(found, into)
    return into


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_libraries(tmp_path_factory.mktemp("build") / "lib")


@pytest.fixture(scope="module")
def another_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same library under another version's name."""
    directory = copy_libraries(tmp_path_factory.mktemp("newer") / "lib")
    said = library_versions()[0].encode() + b"\0"
    other = b"9" + said[1:]
    for library in directory.glob("libllama.so*"):
        code = library.read_bytes()
        assert said in code
        library.write_bytes(code.replace(said, other))
    return directory


def expected(path: Path, stock: Callable[..., Answer]) -> tuple[str, ...]:
    tokens = prompt_tokens(7, 256)
    return stock(path, tokens, 6, 2, 64, 64).digests


def test_a_library_elsewhere_streams_bit_for_bit(
    elsewhere: Path, tiny: Callable[..., Path], stock: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("olmoe")
    monkeypatch.setenv(OVERRIDE, str(elsewhere))
    got = run_child(path, "1GB", "arena", strict=True)
    assert tuple(got["digests"]) == expected(path, stock)
    assert got["counters"]["misses"] > 0
    assert got["libllama"] == str(elsewhere / "libllama.so")


def test_a_relative_place_stays_where_it_was(
    elsewhere: Path,
    tiny: Callable[..., Path],
    stock: Callable[..., Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a link to it serves as well."""
    path = tiny("olmoe")
    (tmp_path / "link").symlink_to(elsewhere)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OVERRIDE, "link")
    got = run_child(path, "1GB", "arena", strict=True, first="import os, moestream.engine; os.chdir('/')")
    assert tuple(got["digests"]) == expected(path, stock)
    assert got["libllama"] == str(tmp_path / "link" / "libllama.so")


def test_another_version_there_is_refused_unless_told(
    another_version: Path,
    tiny: Callable[..., Path],
    stock: Callable[..., Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny("olmoe")
    monkeypatch.setenv(OVERRIDE, str(another_version))
    refused = run_child(path, "1GB", "arena")
    assert refused["error"] == "AbiError"
    tested = library_versions()[0]
    for words in (f"{another_version}/libllama.so is llama.cpp 9", tested, f"unset {OVERRIDE}", "--i-know"):
        assert words in refused["text"]
    got = run_child(path, "1GB", "arena", i_know=True)
    assert tuple(got["digests"]) == expected(path, stock)
    assert any("which is not tested" in remark for remark in got["fallbacks"])


@pytest.mark.parametrize("version", ["0.3.35", "0.3.37", "0.4.0", "1.0.0rc1"])
def test_an_untested_binding_gives_the_tested_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "__version__", version)
    with pytest.raises(AbiError) as refused:
        unproven(i_know=False)
    assert f"llama-cpp-python {version} is not tested, {TESTED_VERSIONS} is" in str(refused.value)
    assert INSTALL_TESTED in str(refused.value)
    (remark,) = unproven(i_know=True)
    assert version in remark


@pytest.mark.parametrize("version", ["0.3.36", "0.3.36.post1", "0.3.36+cu126"])
def test_a_build_of_the_tested_version_is_tested(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "__version__", version)
    assert unproven(i_know=False) == []


def command(word: str, path: Path, *more: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moestream", word, str(path), *more],
        capture_output=True, text=True, timeout=120, env={**os.environ, **variables},
    )  # fmt: skip


def test_the_commands_refuse_in_one_line(another_version: Path, tiny: Callable[..., Path]) -> None:
    options = ["--ram", "1GB", "--json"]
    done = command("plan", tiny("olmoe"), *options, **{OVERRIDE: str(another_version)})
    assert done.returncode == 3, done
    (line,) = done.stderr.splitlines()
    assert "which is not tested" in line
    known = command("plan", tiny("olmoe"), *options, "--i-know", **{OVERRIDE: str(another_version)})
    assert known.returncode == 0, known


@pytest.mark.parametrize("broken", ["absent", "empty", "no library", "lacks functions"])
def test_a_place_without_llama_cpp_is_one_line(
    broken: str, elsewhere: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    place = tmp_path / "lib"
    if broken != "absent":
        place.mkdir()
    if broken in ("no library", "lacks functions"):
        shutil.copytree(elsewhere, place, dirs_exist_ok=True)
        (place / "libllama.so").write_bytes(b"not an ELF file")
    if broken == "lacks functions":
        shutil.copy(place / "libggml-base.so.0", place / "libllama.so")
    done = command("run", tiny("olmoe"), "--ram", "1GB", "-p", "a", "-n", "1", **{OVERRIDE: str(place)})
    assert done.returncode == 3, done
    (line,) = done.stderr.splitlines()
    assert str(place) in line
    assert OVERRIDE in line


def test_without_the_binding_it_is_named(tiny: Callable[..., Path]) -> None:
    script = (
        "import sys; sys.modules['llama_cpp'] = None; from moestream.cli.main import main; main(sys.argv[1:])"
    )
    words = ["run", str(tiny("olmoe")), "--ram", "1GB", "-p", "a"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done
    (line,) = done.stderr.splitlines()
    assert INSTALL_TESTED in line


def test_a_preloaded_library_is_refused(elsewhere: Path, tiny: Callable[..., Path]) -> None:
    """Two of them with each other's functions crash, at the latest when the process ends."""
    words = ["--ram", "1GB", "-p", "a", "-n", "1"]
    done = command("run", tiny("olmoe"), *words, LD_PRELOAD=str(elsewhere / "libllama.so"))
    assert done.returncode == 3, done
    (line,) = done.stderr.splitlines()
    assert "take it out of LD_PRELOAD" in line
