"""``moestream mechanisms``: nothing listed that the core does not have, and a box that lacks something says what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moestream import _core
from moestream.box import abilities
from moestream.cli import mechanisms
from moestream.members import BACKGROUND, FAMILIES, POLICIES, PREDICTORS, QUEUE, STORES, WARMERS
from typed import typed


def test_the_words_are_the_cores() -> None:
    """Replay's ``null`` reader is the one member that no mechanism names."""
    assert set(_core.store_members()) == set(STORES)
    assert set(_core.reader_members()) - {"null"} == set(QUEUE)
    assert set(_core.warmer_members()) == set(WARMERS)
    assert set(_core.policy_members()) == set(POLICIES)
    assert set(_core.predictor_members()) == set(PREDICTORS)


def test_every_need_can_be_tried(tmp_path: Path) -> None:
    tests = abilities.tests(tmp_path)
    needs = {need for members in FAMILIES.values() for member in members.values() for need in member.needs}
    assert needs <= set(tests)
    for name in needs:
        reason = tests[name]()
        assert "\n" not in reason
        assert isinstance(reason, str)


def test_a_lacking_box_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(abilities, "io_uring", lambda: "io_uring is refused: allow it")
    listed = mechanisms.describe(tmp_path)
    rows = {row["name"]: row for family in FAMILIES for row in listed[family]}
    assert rows["uring:NxS"]["here"] is False
    assert rows["uring:NxS"]["why_not"] == ["io_uring is refused: allow it"]
    assert rows["threads:NxS"]["here"] is True
    assert rows["background:N"]["does"].endswith(f"default {BACKGROUND['background'].argument.default}")


def test_a_pipe_gets_one_line_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    done = typed("mechanisms", "--dir", tmp_path)
    listed = mechanisms.describe(tmp_path)
    rows = [row for family in FAMILIES for row in listed[family]]
    assert len(rows) > 40
    for row in rows:
        (line,) = [
            line
            for line in done.stdout.splitlines()
            if line.split()[:1] == [row["name"]] and row["does"] in line
        ]
        assert row["seen"] in line


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_names_every_member(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = typed("mechanisms", "--dir", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= width
    first = {line.split()[0].partition(":")[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert {name for members in FAMILIES.values() for name in members} <= first


def test_json_is_one_object(tmp_path: Path) -> None:
    listed = json.loads(typed("mechanisms", "--json", "--dir", tmp_path).stdout)
    assert set(listed) == {*FAMILIES, "replay only"}
