"""A report's page as a browser shows it: ``python -m moestream.reports.screenshot DIR... --out PNGDIR``.

At the width of a desk and of a phone, light and dark. Needs a Chromium; nothing else here does.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moestream.errors import MoestreamError, RefusedError, UsageError

WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: A picture higher than this a browser may leave blank: the page is taken in parts.
_PART = 8000
#: A browser's own window is neither as narrow as a phone nor all page: what is too much is cut off.
_LEAST_WIDTH, _BESIDE = 800, 300
_TIMEOUT_S = 180.0
#: The page in a frame of a given width, which is a window to it, moved up by what earlier parts have shown.
_FRAME = """<!DOCTYPE html><meta charset="utf-8">
<style>html, body {{ margin: 0; overflow: hidden }}</style>
<body data-high=""><iframe id="page" src="{name}" scrolling="no"
style="width:{width}px;height:{height}px;border:0;display:block;margin-top:-{top}px"></iframe>
<script>
onload = () => {{
  document.body.dataset.high = document.getElementById("page").contentDocument.documentElement.scrollHeight;
}};
</script>"""
_HIGH = re.compile(r'data-high="(\d+)"')

#: Runs a browser with these words to its end: what it printed. Raises RefusedError.
Browser = Callable[[Sequence[str]], str]


def find_browser() -> str:
    """The program of a Chromium. Raises RefusedError where there is none."""
    found = next((path for path in map(shutil.which, _NAMES) if path is not None), None)
    if found is None:
        raise RefusedError(f"screenshots need a browser ({', '.join(_NAMES)}): apt-get install chromium")
    return found


def in_scheme(page: str, scheme: str) -> str:
    """The page as a reader sees it whose system is ``light`` or ``dark``, whatever this one's is."""
    applies = "all" if scheme == "dark" else "not all"
    page = page.replace("(prefers-color-scheme: dark)", applies)
    return page.replace("color-scheme: light dark", f"color-scheme: {scheme}")


def take(page: Path, out: Path, browser: Browser) -> Iterator[Path]:
    """Pictures of a page in ``out``, ``WIDTH-SCHEME.png`` (of a long page ``WIDTH-SCHEME-PART.png``), as they come."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="moestream-") as place:
        shown = {scheme: Path(place) / f"{scheme}.html" for scheme in SCHEMES}
        for scheme, path in shown.items():
            path.write_text(in_scheme(text, scheme), encoding="utf-8")
        for width in WIDTHS:
            high = _height(shown[SCHEMES[0]], width, browser)  # a scheme is colours only
            for scheme, path in shown.items():
                yield from _take(path, width, high, out / f"{width}-{scheme}", browser)


def _take(page: Path, width: int, high: int, stem: Path, browser: Browser) -> Iterator[Path]:
    parts = range(0, high, _PART)
    for number, top in enumerate(parts, 1):
        out = stem.with_name(f"{stem.name}-{number}.png" if len(parts) > 1 else f"{stem.name}.png")
        part = min(_PART, high - top)
        frame = _frame(page, width, high, top)
        window = f"--window-size={max(width, _LEAST_WIDTH)},{part + _BESIDE}"
        raw = page.with_name("raw.png")
        raw.unlink(missing_ok=True)
        browser([*_words(page), window, "--hide-scrollbars", f"--screenshot={raw}", frame.as_uri()])
        _cut(raw, out, width, part)
        yield out


def _height(page: Path, width: int, browser: Browser) -> int:
    """How high the page is at a width. Raises RefusedError when the browser does not show it."""
    # A page is never less high than its window: here it has next to none.
    frame = _frame(page, width, 1, 0)
    found = _HIGH.search(browser([*_words(page), "--dump-dom", frame.as_uri()]))
    if found is None or int(found[1]) == 0:
        raise RefusedError("the browser did not show the page: open the report's HTML file in it")
    return int(found[1])


def _frame(page: Path, width: int, height: int, top: int) -> Path:
    frame = page.with_name("frame.html")
    frame.write_text(_FRAME.format(name=page.name, width=width, height=height, top=top), encoding="utf-8")
    return frame


def _words(page: Path) -> list[str]:
    return [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--virtual-time-budget=10000",
        f"--user-data-dir={page.parent / 'profile'}",
    ]


def _cut(raw: Path, out: Path, width: int, height: int) -> None:
    """The part of a window's picture that is the page. Raises RefusedError where there is no picture."""
    from PIL import Image

    try:
        with Image.open(raw) as image:
            image.crop((0, 0, width, height)).save(out)
    except OSError as error:
        raise RefusedError(f"the browser made no picture of the page: {error}") from None


def _run(program: str) -> Browser:
    def browser(words: Sequence[str]) -> str:
        try:
            done = subprocess.run(
                [program, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise RefusedError(f"{program} did not end within {_TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
            raise RefusedError(f"{program} ended with code {done.returncode}: {last}")
        return done.stdout

    return browser


def _page_of(directories: Sequence[Path], place: Path) -> Path:
    """The report of directories as a page in ``place``. Raises SystemExit where the report itself refuses."""
    page = place / "report.html"
    command = [sys.executable, "-m", "moestream", "report", *map(str, directories), "--html", str(page)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr, end="", file=sys.stderr)
        raise SystemExit(done.returncode)
    return page


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What a report looks like, at a desk and on a phone.")
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path, help="as for moestream report")
    parser.add_argument("--out", metavar="PNGDIR", type=Path, required=True, help="made if it is not there")
    options = parser.parse_args(words)
    try:
        browser = _run(find_browser())
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {options.out}: {error.strerror}: name a directory") from None
        with tempfile.TemporaryDirectory(prefix="moestream-") as place:
            for path in take(_page_of(options.directories, Path(place)), options.out, browser):
                print(path)
    except MoestreamError as error:
        print(f"moestream: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
