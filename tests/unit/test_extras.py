"""What to type where a package is missing: the right thing, however moestream was installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moestream import extras


class _Installed:
    """An installed package, by what pip has noted of its source."""

    def __init__(self, noted: object) -> None:
        self._noted = noted

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._noted is None else json.dumps(self._noted)


def command(noted: object, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(extras, "distribution", lambda name: _Installed(noted))
    return extras.install_command("lab")


def test_the_command_names_what_was_installed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    wheel = tmp_path / "moestream.whl"
    wheel.touch()
    assert command({"url": clone.as_uri(), "dir_info": {}}, monkeypatch) == f"pip install '{clone}[lab]'"
    editable = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    assert command(editable, monkeypatch) == f"pip install -e '{clone}[lab]'"
    assert command({"url": wheel.as_uri(), "archive_info": {}}, monkeypatch) == f"pip install '{wheel}[lab]'"


@pytest.mark.parametrize(
    "noted", [None, {}, {"url": "file:///no/such/clone", "dir_info": {}}, {"url": "https://host/x.whl"}]
)
def test_from_an_index_or_a_clone_that_is_gone(noted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(noted, monkeypatch) == "pip install 'moestream[lab]'"


@pytest.mark.parametrize(
    ("package", "needs"),
    [
        ("pyarrow", "from moestream.trace.schema import load_arrow; load_arrow()"),
        ("scipy", "from moestream.lab.statistics import need_scipy; need_scipy()"),
        (
            "matplotlib",
            "from pathlib import Path; from moestream.analyze.plot import check_plot as c; c(Path('x.png'))",
        ),
        ("matplotlib", "from moestream.reports.canvas import _drawing\nwith _drawing('x'): pass"),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_whoever_needs_a_package_says_so_once(package: str, needs: str, broken: bool, tmp_path: Path) -> None:
    folder = tmp_path / package
    folder.mkdir()
    raised = (
        "ImportError('lib.so: no such symbol')"
        if broken
        else f"ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    )
    (folder / "__init__.py").write_text(f"raise {raised}")
    script = f"import sys; sys.path.insert(0, sys.argv[1])\n{needs}"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("moestream.errors.RefusedError: ")
    if broken:
        remedy = f"pip install --force-reinstall {package}"
        assert said.endswith(f" need {package}, which cannot be loaded (lib.so: no such symbol): {remedy}")
    else:
        assert said.endswith(f" need {package}, which is not installed: {extras.install_command('lab')}")
