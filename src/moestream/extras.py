"""Packages that only some commands need, and the command that installs them here."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from moestream.errors import RefusedError


def lacking(error: ImportError, what: str, package: str, extra: str = "lab") -> RefusedError:
    """The refusal where ``what`` needs ``package``, a part of ``extra``, and importing it ended in ``error``: it is not
    there, or it is and cannot be loaded."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package:
        return RefusedError(f"{what} need {package}, which is not installed: {install_command(extra)}")
    return RefusedError(
        f"{what} need {package}, which cannot be loaded ({error}): pip install --force-reinstall {package}"
    )


def install_command(extra: str) -> str:
    """What to type for an extra. The package may be on no index: what it was installed from is named where pip has
    noted that and it is still there."""
    source = _source()
    if source is None:
        return f"pip install 'moestream[{extra}]'"
    path, editable = source
    return f"pip install {'-e ' if editable else ''}{shlex.quote(f'{path}[{extra}]')}"


def _source() -> tuple[Path, bool] | None:
    """The directory or file this was installed from, and whether it is used in place."""
    try:
        noted = json.loads(distribution("moestream").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None
    url = urlsplit(noted.get("url", ""))
    path = Path(unquote(url.path))
    if url.scheme != "file" or not path.exists():
        return None
    return path, bool(noted.get("dir_info", {}).get("editable"))
