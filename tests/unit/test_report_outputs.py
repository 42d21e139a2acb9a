"""Where a report may be written: never over what was measured, a device or a link, and never two into one file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moestream.cli.main import main
from moestream.errors import RefusedError, UsageError
from moestream.files import followed
from moestream.lab.bench_journal import open_journal
from moestream.lab.files import clean, directory
from moestream.make.output import new_file
from report_records import a_bench, save


def refused(capfd: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    said = capfd.readouterr().err
    assert ended.value.code == 2, said
    assert said.count("\n") == 1
    return said


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    return save(tmp_path / "mine", a_bench())


@pytest.mark.parametrize("option", ["--html", "--markdown", "--json"])
def test_a_link_is_followed_and_a_device_behind_one_refused(
    option: str, bench: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    assert "not a regular file" in refused(capfd, bench, option, link)
    assert link.is_symlink()
    (tmp_path / "round").symlink_to(tmp_path / "round")
    assert "circle" in refused(capfd, bench, option, tmp_path / "round")


def test_a_new_file_replaces_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "old", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with new_file(link, 10) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(tmp_path.rglob("*")) == [link, target.parent, target]


def test_the_file_that_stdout_goes_to_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "said"
    before = os.dup(1)
    try:
        with path.open("w") as file:
            sys.stdout.flush()
            os.dup2(file.fileno(), 1)
        with pytest.raises(UsageError, match="output of this command"):
            followed(path, "--html")
        with pytest.raises(UsageError, match="output of this command"):
            followed(Path("/dev/stdout"), "--html")
    finally:
        os.dup2(before, 1)
        os.close(before)


@pytest.mark.parametrize("option", ["--html", "--markdown", "--json"])
@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize(
    "name", ["runs.jsonl", "setup.json", "probe.json", "a/verdict.json", "t.parquet", "m.gguf"]
)
def test_measurements_are_not_replaced_by_any_name(
    option: str, kind: str, name: str, bench: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    measured, other = bench / name, tmp_path / "other"
    measured.parent.mkdir(exist_ok=True)
    if not measured.exists():
        measured.write_text("{}")
    before = measured.read_bytes()
    getattr(other, kind)(measured)
    refused(capfd, bench, option, other)
    assert other.read_bytes() == measured.read_bytes() == before


def test_the_probe_that_is_read_is_not_replaced(
    bench: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    probe = tmp_path / "mine.json"
    probe.write_text("{}")
    assert "which is read" in refused(capfd, bench, "--probe", probe, "--json", probe)
    assert probe.read_text() == "{}"


def test_two_outputs_are_two_files(bench: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "page")
    said = refused(capfd, bench, "--html", tmp_path / "page", "--markdown", tmp_path / "link")
    assert "--html names that file too" in said
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize("name", ["long", "long/in", "round", "file"])
def test_a_directory_that_is_none_is_named_in_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    (tmp_path / "file").write_text("")
    path = tmp_path / name.replace("long", "l" * 300)
    for words in (["report", str(path)], ["lab", "run", str(path) + ".toml"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capfd.readouterr().err
        assert ended.value.code in (2, 3), said
        assert str(path) in said
        assert said.count("\n") == 1
    with pytest.raises(UsageError, match="--out "):
        open_journal(path, {}, resume=False, force=False)


def test_a_directory_that_may_not_be_read_is_named(
    bench: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("moestream.files.os.scandir", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(bench)])
    assert ended.value.code == 3
    assert f"{bench} cannot be read (Permission denied)" in capfd.readouterr().err


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = directory() / "a.gguf"
    made.mkdir(parents=True)
    with pytest.raises(RefusedError, match="cannot be removed"):
        clean()
    assert made.is_dir()
