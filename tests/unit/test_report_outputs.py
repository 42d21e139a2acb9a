"""Where a report may be written: never over what was measured, a device or a link, and never two into one file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moestream.cli.main import main
from moestream.errors import UsageError
from moestream.files import followed
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
