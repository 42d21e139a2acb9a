"""``moestream report`` as it is typed: outputs, refusals, and nothing written where something is wrong."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moestream.cli.main import main
from report_records import OTHER_BOX, a_bench, failed, outcome, run, save, save_lab


def call(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


class Outline(HTMLParser):
    """Which tags there are, and whether each that opens also closes."""

    VOID = ("meta", "link", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


def test_text_has_the_answer_the_tables_and_the_commands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(save(tmp_path / "mine", a_bench())) == 0
    said = capfd.readouterr().out
    assert "1.00 GB: arena+uring:8+lfu-decay:16 (default), 5.5 (3.3 … 10.0) tok/s, 20.0" in said
    assert "faster than the other" in said
    assert "2 CPUs (x86_64), 8.00 GB, Linux 6.1, ext4 on /dev/vda" in said
    assert "git checkout 0123456789abcdef0123456789abcdef01234567" in said
    assert (
        "bench m.gguf --ram 1000000000 --mechanisms arena+uring:8+lfu-decay:16+none+anon -n 5 --repeats 1 "
        "--threads 2 --ctx 512 --out results/scratch/mine-1.00GB" in said
    )


def test_markdown_goes_to_stdout_instead_of_the_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(save(tmp_path / "mine", a_bench()), "--markdown", "-") == 0
    said = capfd.readouterr().out
    assert said.startswith("# mine\n")
    assert "| 1.00 GB | stock | 0.28 (0.17 … 0.50) |" in said
    speed = said[said.index("### Speed in figures") :].splitlines()[2:7]
    assert {line.count("|") for line in speed} == {11}


def test_a_page_is_whole_and_asks_for_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert call(save(tmp_path / "mine", a_bench()), "--html", out) == 0
    text = out.read_text()
    found = outline(text)
    assert "script" not in found.seen
    assert text.count("http://") == text.count("http://www.w3.org")
    assert "https://" not in text
    assert f"wrote {out}" in capfd.readouterr().err


def test_what_a_record_says_never_becomes_markup(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script>"
    records = [
        *a_bench(),
        failed(arm=evil, prompt=evil, error=evil),
        run(evil, box={**OTHER_BOX, "fs": evil}),
    ]
    out = tmp_path / "report.html"
    assert call(save(tmp_path / "mine", records), "--html", out, "--markdown", tmp_path / "r.md") == 0
    assert "script" not in outline(out.read_text()).seen
    assert evil not in out.read_text()
    assert "&lt;script&gt;" in out.read_text()
    outside_code = (tmp_path / "r.md").read_text().split("```")[::2]
    assert not any("<script" in text for text in outside_code)
    assert any("&lt;script" in text for text in outside_code)
    capfd.readouterr()


def test_two_boxes_stand_side_by_side_without_a_ratio(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = save(tmp_path / "one", a_bench())
    other = save(tmp_path / "other", [run("default", 10.0, box=OTHER_BOX)])
    assert call(one, other) == 0
    said = capfd.readouterr().out
    assert "different boxes: side by side, never averaged" in said
    assert "last / first" not in said
    assert call(one, save(tmp_path / "again", a_bench())) == 0
    assert "last / first" in capfd.readouterr().out


def test_a_directory_named_twice_is_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = save(tmp_path / "mine", a_bench())
    assert call(mine, tmp_path / "mine" / ".." / "mine") == 0
    assert "Side by side" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere"], 3, "no such directory"),
        (["empty"], 3, "holds no runs.jsonl: `moestream bench"),
        (["mine", "--html", "mine"], 2, "that is a directory"),
        (["mine", "--html", "mine/runs.jsonl"], 2, "the name of measurements"),
        (["mine", "--json", "mine/verdict.json"], 2, "the name of measurements"),
        (["mine", "--json", "-", "--markdown", "-"], 2, "stdout is for one of the two"),
        (["mine", "--html", "no/such/place.html"], 2, "there is no directory"),
        (["mine", "--html", "out.html", "--probe", "no.json"], 3, "there is no file no.json"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "mine", a_bench())
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert call(*words) == code
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_without_a_valid_run_still_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = save(tmp_path / "mine", [failed("stock"), failed()])
    assert call(mine, "--html", tmp_path / "report.html") == 0
    assert capfd.readouterr().out.count("failed with code 4: the disk went away") == 2
    outline((tmp_path / "report.html").read_text())


def test_json_holds_what_the_tables_show(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine, lab = save(tmp_path / "mine", a_bench()), save_lab(tmp_path / "lab", [outcome()])
    assert call(mine, lab, "--json", "-") == 0
    found = json.loads(capfd.readouterr().out)
    assert call(mine, lab, "--json", tmp_path / "all.json") == 0
    assert json.loads((tmp_path / "all.json").read_text()) == found
    (group,) = found["groups"]
    arms = {arm["name"]: arm for arm in group["arms"]}
    assert arms["default"]["against_stock"]["value"] == pytest.approx(20)
    assert arms["default"]["bytes_per_token"] == {"read": 25_000_000, "asked": 25_000_000, "wasted": None}
    assert arms["stock"]["bytes_per_token"] == {"read": 80_000_000, "asked": None, "wasted": None}
    assert group["ceilings"]["compute_s"] == pytest.approx(0.02)
    assert group["box"]["kernel"] == "6.1"
    assert "paths" not in group["model"]
    (one,) = found["labs"][0]["outcomes"]
    assert (one["verdict"], one["claims"][0]["seen"]["value"]) == ("agrees", 1.7)
    assert one["commands"] == [
        "make setup",
        ".venv/bin/moestream lab run app-lru --model m.gguf --ram 1000000000 --quick",
    ]


def test_experiments_are_shown_with_their_verdicts_and_figures(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lab = save_lab(tmp_path / "lab", [outcome(), outcome("skew", "disagrees", table={})])
    other = save_lab(tmp_path / "there", [outcome(verdict="cannot tell", box=OTHER_BOX)])
    assert call(lab, other, "--html", tmp_path / "r.html", "--markdown", tmp_path / "r.md") == 0
    said = capfd.readouterr().out
    row = next(line for line in said.splitlines() if line.strip().startswith("app-lru"))
    assert row.split("help?")[1].split("  ")[1:] != []
    assert "agrees" in row
    assert "cannot tell" in row
    assert "m.gguf on 2 CPUs (x86_64), 8.00 GB, Linux 6.1, ext4 on /dev/vda: 1 agrees, 1 disagrees" in said
    assert "here 1.7 (1.53 … 1.87, n 4); expected at least 1.5; the source: 2" in said
    assert "here none; expected at least 1.5" in said
    assert "left out: huge: no room" in said
    page = (tmp_path / "r.html").read_text()
    assert "script" not in outline(page).seen
    assert page.count('<span class="word disagrees">disagrees</span>') == 3
    # The bound of a ratio is drawn at so many times the arm it is held against.
    assert "a bound of what was expected" in page
    assert "### skew: disagrees" in (tmp_path / "r.md").read_text()


def test_a_verdict_that_is_none_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lab = save_lab(tmp_path / "lab", [outcome()])
    for text, said in (
        ("{", "it is not JSON"),
        ('{"schema": 9}', "schema 1"),
        ('{"schema": 1}', "lacks experiment"),
    ):
        (lab / "app-lru" / "verdict.json").write_text(text)
        assert call(lab) == 3
        assert said in capfd.readouterr().err


def test_a_bench_is_shown_in_the_order_and_repeated_with_the_words_it_was_asked_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The default, which is run at both ends of a block, comes first among the records.
    records = [run(), run("stock"), run("arena+sync"), run("arena+uring")]
    arms = [{"key": "stock", "lever": ""}, {"key": "arena+sync", "lever": "own memory"}]
    arms += [{"key": "arena+uring", "lever": "reads by io_uring"}, {"key": "default", "lever": "the default"}]
    mine = save(tmp_path / "mine", records)
    (mine / "setup.json").write_text(
        json.dumps({"arms": arms, "command": "moestream bench m.gguf --ram 1GB"})
    )
    assert call(mine, "--json", "-", "--html", tmp_path / "r.html") == 0
    found = json.loads(capfd.readouterr().out)["groups"][0]
    assert [arm["name"] for arm in found["arms"]] == [arm["key"] for arm in arms]
    assert found["commands"][-1] == ".venv/bin/moestream bench m.gguf --ram 1GB --out results/scratch/mine"
    page = (tmp_path / "r.html").read_text()
    assert page.index("own memory") < page.index("reads by io_uring") < page.index("the default")
