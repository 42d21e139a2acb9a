"""Probes that were made, in the user's cache directory: what they were made of, and until when they hold."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from moestream.box import Box, cache_directory, device_name
from moestream.errors import MoestreamError
from moestream.files import read_json
from moestream.model import Model

SCHEMA = 1
#: Disks wear and change hands; a week is what plans are made from.
MAX_AGE_S = 7 * 24 * 3600.0
#: What plans are made from.
_RATES = ("disk_bytes_per_s", "compute_s_per_token")


def identity(path: Path, model: Model | None) -> dict[str, Any]:
    """What a probe holds for: ``model`` (an identity; None: any), ``device`` (major:minor), ``kernel``, ``machine``."""
    return {
        "model": model.identity if model is not None else None,
        "device": device_name(path),
        **this_box(),
    }


def this_box() -> dict[str, str]:
    """The part of an identity that is the box alone."""
    box = Box()
    machine = f"{platform.node()} {platform.machine()} {box.cpus()} {box.ram_bytes()}"
    return {"kernel": box.kernel(), "machine": hashlib.sha256(machine.encode()).hexdigest()[:12]}


def save_probe(document: dict[str, Any]) -> Path | None:
    """Keep a probe's document (its ``identity`` decides where), or leave the ``fuller_probe`` that is there, and return
    where; None when nothing can be written there, which costs a plan its figures and no more."""
    path = _place(document["identity"])
    if fuller_probe(document) is not None:
        return path
    fresh = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_text(json.dumps(document, indent=1) + "\n")
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
        return path
    return None


def fuller_probe(document: dict[str, Any]) -> dict[str, Any] | None:
    """The whole probe that still holds and that a quick one must not replace; None for one that lacks a rate the quick
    one has."""
    if not document.get("quick"):
        return None
    found = _holding(document["identity"], document["measured_at"])
    if found is None or found.get("quick"):
        return None
    lacks = any(document[rate] is not None and found[rate] is None for rate in _RATES)
    return None if lacks else found


def saved_probe(model: Model, now: float | None = None) -> dict[str, Any] | None:
    """The probe of this model on this box, or of the device it lies on, which knows no compute; None when there is none
    that is whole, at most a week old and of this kernel. ``now``: seconds since the epoch."""
    try:
        wanted = identity(model.paths[0], model)
    except OSError:
        return None
    now = time.time() if now is None else now
    for here in (wanted, {**wanted, "model": None}):
        found = _holding(here, now)
        if found is not None:
            return found
    return None


def saved_probe_of(model_identity: str, now: float | None = None) -> dict[str, Any] | None:
    """The probe of the model of that identity on this box, whichever device its file lay on: for those who know no
    file, such as a trace's readers. None as with ``saved_probe``."""
    return _holding({"model": model_identity, **this_box()}, time.time() if now is None else now)


def reader_of(probe: dict[str, Any]) -> str | None:
    """The reader that is enough for the probed disk (``uring:8``); None of a probe that does not say."""
    measured = probe.get("disk")
    found = measured.get("reader") if isinstance(measured, dict) else None
    return found if isinstance(found, str) else None


def _holding(which: dict[str, Any], now: float) -> dict[str, Any] | None:
    found = _read(_place(which))
    if found is None or not 0 <= now - found["measured_at"] <= MAX_AGE_S:
        return None
    return found if which.items() <= found["identity"].items() else None


def _place(which: dict[str, Any]) -> Path:
    name = which["model"] or "device-" + str(which["device"]).replace(":", "-")
    return cache_directory() / f"probe-{name}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """A document of this schema with rates that are numbers above zero or None; None for anything else."""
    try:
        found: Any = read_json(path, "probe again")
        whole = (
            found["schema"] == SCHEMA
            and isinstance(found["identity"], dict)
            and isinstance(found["measured_at"], (int, float))
            and all(_is_rate(found[name]) for name in _RATES)
        )
    except (MoestreamError, TypeError, KeyError):
        return None
    return found if whole else None


def _is_rate(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0)
