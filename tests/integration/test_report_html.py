"""The page in a browser: nothing on its console, nothing wider than the window, at a desk and on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moestream.cli.main import main
from moestream.reports.screenshot import main as screenshot
from replay_traces import demo_trace
from report_records import DEFAULT, MODEL, OTHER_BOX, a_bench, failed, outcome, run, save, save_lab
from trace_files import save_trace

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, _NAMES) if path is not None), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

#: The page in a frame of a given width, which is a window to it: a browser's own cannot be as narrow as a phone.
_FRAME = """<!DOCTYPE html><meta charset="utf-8"><body>
<iframe id="page" src="{name}" style="width:{width}px;height:40000px;border:0"></iframe><pre id="found"></pre>
<script>
onload = () => {{
  const page = document.getElementById("page").contentDocument, root = page.documentElement;
  const shown = [...page.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0);
  const out = [...page.body.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > {width} + 0.5);
  document.getElementById("found").textContent = JSON.stringify({{
    inner: root.clientWidth, scroll: root.scrollWidth, pictures: shown.length,
    beyond: out.map((e) => e.tagName + " " + e.textContent.slice(0, 40)),
    text: page.body.innerText.length, requests: page.defaultView.performance.getEntriesByType("resource").length,
  }});
}};
</script>"""


def look_at(page: Path, width: int) -> tuple[dict[str, object], list[str]]:
    """What the page is like in a window so wide, and the lines of its console."""
    frame = page.with_name(f"frame-{width}.html")
    frame.write_text(_FRAME.format(name=page.name, width=width))
    assert CHROMIUM is not None
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    words += [
        f"--user-data-dir={page.parent / 'profile'}",
        "--enable-logging=stderr",
        "--window-size=1500,1000",
    ]
    words += ["--virtual-time-budget=10000", "--dump-dom", frame.resolve().as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    found = re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout, re.DOTALL)
    assert found is not None, f"the page was not loaded: {done.stdout[:500]} {done.stderr[-2000:]}"
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(text), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two boxes with everything a page can have: traces, a ladder, excluded runs, long names."""
    directory = tmp_path_factory.mktemp("report")
    records = a_bench()
    long = "mapped/random+pread+willneed:4x2+background:2+dontneed:4+none+mlock"
    records += [run(long, [90.0, 80.0, 3000.0] * 5, prompt=prompt) for prompt in ("prose", "code")]
    records += [failed(error="x" * 300), run("arena+sync", valid=False, invalid=["swapped"])]
    mine = save(directory / "a-directory-with-quite-a-long-name-of-its-own", [])
    trace = demo_trace(480, "lfu-decay:16")
    trace.meta["model"]["identity"] = MODEL["identity"]
    save_trace(trace, mine / "prose.parquet")
    next(record for record in records if record["asked"] == "default")["trace"] = "prose.parquet"
    save(mine, records)
    # As many arms as `bench --mechanisms all` has.
    many = [run(f"arena+uring:{depth}+lru", 10.0 + depth, box=OTHER_BOX) for depth in range(1, 38)]
    other = save(directory / "other", [run("default", 10.0, box=OTHER_BOX), *many])
    grid = {f"read/threads:{n}x{n}-of-a-name-that-is-long": outcome()["table"]["small"] for n in range(20)}
    lab = save_lab(
        directory / "lab", [outcome(), outcome("a-grid-with-a-long-name", "cannot tell", table=grid)]
    )
    out = directory / "report.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(mine), str(other), str(lab), "--html", str(out)])
    assert ended.value.code == 0
    return out


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window_and_the_console_is_silent(page: Path, width: int) -> None:
    found, console = look_at(page, width)
    assert console == []
    assert found["inner"] == width
    assert found["scroll"] == width
    assert found["beyond"] == []
    assert found["requests"] == 0
    # Speed, steps, split, two caps token by token, curves and heat map; speed, split and tokens of the other box; two
    # experiments.
    assert found["pictures"] == 12


def test_screenshots_show_the_page_light_and_dark(page: Path, tmp_path: Path) -> None:
    from PIL import Image

    where = [str(page.parent / name) for name in ("a-directory-with-quite-a-long-name-of-its-own", "lab")]
    assert screenshot([*where, "--out", str(tmp_path)]) == 0
    for width in (1280, 400):
        paper = {}
        for scheme in ("light", "dark"):
            for path in sorted(tmp_path.glob(f"{width}-{scheme}*.png"), reverse=True):
                with Image.open(path) as image:
                    assert image.width == width
                    greys = image.convert("L").tobytes()
                # A page has words and pictures down to its end: no part is of one grey.
                assert len(set(greys)) > 20, path.name
                paper[scheme] = greys[0]
        assert paper["light"] > 200
        assert paper["dark"] < 80


def test_the_check_sees_what_it_is_to_see(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><body><div style='width:700px'>wide</div><script>console.error('trouble')</script>"
    )
    found, console = look_at(bad, 400)
    assert found["scroll"] != 400
    assert found["beyond"] == ["DIV wide"]
    assert any("trouble" in line for line in console)


def test_the_page_holds_what_was_measured(page: Path) -> None:
    text = page.read_text()
    for words in (
        "Bytes over budget",
        "Which experts do the work",
        "belady",
        "never averaged",
        "swapped",
        DEFAULT,
    ):
        assert words in text
    assert "var(--s0)" in text
    assert "prefers-color-scheme: dark" in text
