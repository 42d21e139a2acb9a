"""Pictures of a page: which, how large, and of what; with a browser made of a few lines. A real one is tried beside the
page's own tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image

from moestream.errors import RefusedError
from moestream.reports.screenshot import find_browser, in_scheme, main, take

PAGE = "<style>:root { color-scheme: light dark; }\n@media (prefers-color-scheme: dark) { a { b: c } }</style>words"


class Browser:
    """Shows a page of a given height, each window in the colour of how far down it is; keeps what it was shown."""

    def __init__(self, high: int) -> None:
        self.high = high
        self.pages: list[str] = []
        self.tops: list[int] = []

    def __call__(self, words: Sequence[str]) -> str:
        frame = Path(unquote(urlsplit(words[-1]).path))
        text = frame.read_text()
        name, top = re.search(r'src="([^"]+)"', text), re.search(r"margin-top:-(\d+)px", text)
        assert name is not None
        assert top is not None
        if "--dump-dom" in words:
            return f'<body data-high="{self.high}">'
        self.pages.append((frame.parent / name[1]).read_text())
        self.tops.append(int(top[1]))
        options = dict(word.partition("=")[::2] for word in words)
        width, height = map(int, options["--window-size"].split(","))
        Image.new("RGB", (width, height), (int(top[1]) // 100, 0, 0)).save(options["--screenshot"])
        return ""


def look_at(path: Path) -> tuple[tuple[int, int], int]:
    """A picture's size, and how red its first pixel is."""
    with Image.open(path) as image:
        return image.size, image.tobytes()[0]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(PAGE)
    return path


def test_two_widths_light_and_dark_are_taken_whole(page: Path, tmp_path: Path) -> None:
    browser = Browser(3000)
    made = list(take(page, tmp_path, browser))
    assert [path.name for path in made] == [
        "1280-light.png",
        "1280-dark.png",
        "400-light.png",
        "400-dark.png",
    ]
    assert [look_at(path)[0] for path in made] == [(1280, 3000), (1280, 3000), (400, 3000), (400, 3000)]
    assert browser.pages == [in_scheme(PAGE, scheme) for scheme in ("light", "dark")] * 2
    assert page.read_text() == PAGE


def test_a_long_page_is_taken_in_parts_that_follow_each_other(page: Path, tmp_path: Path) -> None:
    browser = Browser(16_500)
    made = [path for path in take(page, tmp_path, browser) if path.name.startswith("400-dark")]
    assert [path.name for path in made] == ["400-dark-1.png", "400-dark-2.png", "400-dark-3.png"]
    assert [look_at(path)[0][1] for path in made] == [8000, 8000, 500]
    assert browser.tops == [0, 8000, 16_000] * 4
    assert [look_at(path)[1] for path in made] == [0, 80, 160]


def test_a_scheme_is_the_pages_own_whatever_the_system_says() -> None:
    assert "color-scheme: dark;" in in_scheme(PAGE, "dark")
    assert "@media all {" in in_scheme(PAGE, "dark")
    assert "@media not all {" in in_scheme(PAGE, "light")
    style = Path(in_scheme.__code__.co_filename).with_name("page.css").read_text()
    assert "prefers-color-scheme" not in in_scheme(style, "dark")
    assert "light dark" not in in_scheme(style, "light")


def test_a_browser_that_shows_nothing_is_told(page: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="did not show the page"):
        list(take(page, tmp_path, lambda words: "<html></html>"))
    with pytest.raises(RefusedError, match="made no picture"):
        list(take(page, tmp_path, lambda words: '<body data-high="10">'))
    assert list(tmp_path.glob("*.png")) == []


def test_without_a_browser_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RefusedError, match="apt-get install chromium"):
        find_browser()
    assert main([str(tmp_path), "--out", str(tmp_path / "png")]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert not (tmp_path / "png").exists()
