"""What a trace says of itself, written and read. Metadata that passes here breaks nothing that reads traces: nobody
checks it again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from moestream.errors import RefusedError
from moestream.geometry import PAGE
from moestream.trace.schema import META_KEY, SCHEMA_NAME, SCHEMA_VERSION, damaged
from moestream.values import Object, parse_json, whole_number, whole_numbers
from moestream.version import __version__

#: Of a bank, and of a model: eight times what llama.cpp takes; what analysis makes of as many still fits into memory.
MOST_IN_BANK = 1 << 12
MOST_EXPERTS = 1 << 20
MOST_FRAME_BYTES = 1 << 40
_MOST_LAYERS = (1 << 31) - 1


@cache
def _version_of(package: str) -> str:
    """Looked for once: each search of a directory that has changed meanwhile would stay in importlib's memory."""
    return importlib.metadata.version(package)


def complete_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``meta`` with what every file says of itself: schema, when, by which command and versions."""
    versions = {"moestream": __version__, "python": platform.python_version()}
    for package in ("llama-cpp-python", "pyarrow"):
        versions[package] = _version_of(package)
    return {
        **meta,
        "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
        "versions": {**versions, **meta.get("versions", {})},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Where the program lies says nothing of the run.
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def parse_meta(path: Path, metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """The metadata of a file that was opened. RefusedError for one that is no trace, for a newer schema, and for
    metadata that no trace has."""
    text = (metadata or {}).get(META_KEY)
    if text is None:
        raise RefusedError(f"{path} is not a trace: record one with `moestream run --trace FILE`")
    try:
        meta = Object(parse_json(text))
        schema = meta.inner("schema")
        version = schema.integer("version", least=1)
        if version > SCHEMA_VERSION:
            raise _newer(path, version, meta)
        if schema.text("name") != SCHEMA_NAME:
            raise ValueError(f"schema.name is not {SCHEMA_NAME}")
        _check_run(meta)
        _check_model(meta.inner("model"))
    except ValueError as error:
        raise damaged(path, f"in its metadata {error}") from None
    return meta.members


def _newer(path: Path, version: int, meta: Object) -> RefusedError:
    versions = meta.members.get("versions")
    writer = versions.get("moestream") if isinstance(versions, dict) else None
    return RefusedError(
        f"{path} has trace schema {version}, and moestream {__version__} reads up to {SCHEMA_VERSION}: "
        f"moestream {writer if isinstance(writer, str) else 'a newer version'} wrote it and reads it"
    )


def _check_run(meta: Object) -> None:
    mechanism = meta.text("mechanism")
    try:
        # It may name a file, which may be opened.
        if not mechanism or b"\0" in os.fsencode(mechanism):
            raise ValueError
    except ValueError:
        raise ValueError("mechanism is no mechanism's text") from None
    for name in ("fallbacks", "command"):
        if name in meta:
            meta.texts(name)
    if "created" in meta:
        meta.text("created")
    if "n_batch" in meta:
        meta.integer("n_batch")
    if "versions" in meta:
        versions = meta.inner("versions")
        for name in versions.members:
            versions.text(name)
    if "budget" in meta:
        budget = meta.inner("budget")
        for name in budget.members:
            budget.number(name)
    if "box" in meta:
        box = meta.inner("box")
        if box.members.get("ram_bytes") is not None:
            box.number("ram_bytes")


def _check_model(model: Object) -> None:
    if not model.text("identity"):
        raise ValueError("model.identity is empty")
    for name in ("arch", "name"):
        if name in model:
            model.text(name)
    for name in ("bytes", "dense_bytes", "expert_bytes", "demand_bytes_per_token"):
        if name in model:
            model.integer(name)
    layers = model.integers("layers", 0, _MOST_LAYERS)
    experts = model.integers("experts", 1, MOST_IN_BANK)
    used = model.integers("used", 1, MOST_IN_BANK)
    if not len(layers) == len(experts) == len(used) > 0:
        raise ValueError("model.layers, model.experts and model.used are not as many as its banks")
    if sum(experts) > MOST_EXPERTS:
        raise ValueError(f"model.experts are more than {MOST_EXPERTS}")
    for bank, (count, of) in enumerate(zip(used, experts, strict=True)):
        whole_number(count, f"model.used[{bank}]", 1, of)
    _check_tensors(model, len(experts))
    _check_parts(model, experts)


def _check_tensors(model: Object, banks: int) -> None:
    for name in ("roles", "slab_bytes"):
        if name not in model:
            continue
        of_banks = model.items(name)
        if len(of_banks) != banks or not all(isinstance(one, list) for one in of_banks):
            raise ValueError(f"model.{name} is not a list for each bank")
        for bank, values in enumerate(of_banks):
            if name == "slab_bytes":
                whole_numbers(values, f"model.{name}[{bank}]")
            elif not all(isinstance(value, str) for value in values):
                raise ValueError(f"model.{name}[{bank}] holds other things than texts")


def _check_parts(model: Object, experts: list[int]) -> None:
    parts = model.objects("parts")
    counts: list[int] = []
    seen: set[int] = set()
    for part in parts:
        banks = part.integers("banks", 0, len(experts) - 1)
        if not banks:
            raise ValueError(f"{part.where}banks is empty")
        if len(set(banks)) < len(banks) or seen & set(banks):
            raise ValueError(f"{part.where}banks names a bank twice")
        seen |= set(banks)
        counts.append(sum(experts[bank] for bank in banks))
        if part.integer("frame_bytes", PAGE, MOST_FRAME_BYTES) % PAGE:
            raise ValueError(f"{part.where}frame_bytes is no multiple of {PAGE}")
    capacities = model.items("capacities")
    if len(capacities) not in (0, len(parts)):
        raise ValueError(f"model.capacities has {len(capacities)} entries for {len(parts)} parts")
    for number, (capacity, most) in enumerate(zip(capacities, counts, strict=False)):
        whole_number(capacity, f"model.capacities[{number}]", 1, most)
