"""The document that ``run --json`` writes: what ran, on what, within which budget, and what it did.

All sizes in bytes, all times in seconds unless a key says ``_ms``. A value is None where nothing can be
said: rates without a step, the context's share of a dense model, which llama.cpp divides by itself, and the identity
of a model whose file was replaced meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestream.box import Box, peak_rss_bytes
from moestream.box.accounts import Swapped, swapped
from moestream.errors import ModelError, RefusedError, UsageError
from moestream.files import check_directory, followed
from moestream.stats import Step, phase_summary
from moestream.version import __version__

if TYPE_CHECKING:
    from moestream.engine import Llama
    from moestream.model import Model


@dataclass
class Generated:
    """What a run generated. ``tokens``: ids without the prompt's; ``ended``: why it ended (``tokens``, ``end
    of text``, ``context full``, ``stopped``, in the lab ``time``); ``cpu_s``: CPU seconds of the whole process in
    load, prefill and decode; ``swapped_before``: the machine's account when this began."""

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: bytes = b""
    ended: str = "tokens"
    cpu_s: dict[str, float] = field(default_factory=lambda: {"load": 0.0, "prefill": 0.0, "decode": 0.0})
    swapped_before: Swapped = field(default_factory=swapped)


def split_steps(steps: Sequence[Step], prompt_tokens: int) -> tuple[list[Step], list[Step]]:
    """The steps that read the prompt, and those after them. A small budget runs a prompt one token a step,
    so a step's size does not tell."""
    left = prompt_tokens
    for number, step in enumerate(steps):
        if left <= 0:
            return list(steps[:number]), list(steps[number:])
        left -= step.tokens
    return list(steps), []


def run_document(
    llama: Llama, generated: Generated, asked: str | None, cap_bytes: int | None, *, kept: bool = True
) -> dict[str, Any]:
    """The document of a run that has ended. ``asked``: the mechanism as it was asked for. ``kept``: somebody will read
    it, so the model's identity is worth reading samples of its weights."""
    steps = llama.last_steps
    # A step that was stopped is recorded, but its tokens were not computed.
    while steps and sum(step.tokens for step in steps) > llama.n_tokens:
        steps.pop()
    prefill, decode = split_steps(steps, generated.prompt_tokens)
    return {
        "version": __version__,
        "model": _model(llama.model_info, kept),
        "box": Box().describe(llama.model_info.paths[0]),
        "mechanism": {
            "asked": asked,
            "effective": str(llama.mechanism) if llama.mechanism is not None else None,
            "fallbacks": list(llama.fallbacks),
            "engaged": llama.engagement(),
        },
        "budget": _budget(llama, cap_bytes),
        "governor": [asdict(change) for change in llama.governor.changes]
        if llama.governor is not None
        else None,
        "load": llama.stats()["load"],
        "prefill": phase_summary(prefill),
        "decode": phase_summary(decode),
        "cpu_s": dict(generated.cpu_s),
        "swapped": asdict(swapped().since(generated.swapped_before)),
        "peak_rss_bytes": peak_rss_bytes(),
        "ended": generated.ended,
        "tokens": list(generated.tokens),
        "text": generated.text.decode("utf-8", "replace"),
    }


def _model(model: Model, kept: bool) -> dict[str, Any]:
    return {
        "paths": [str(path) for path in model.paths],
        "identity": _identity(model) if kept else None,
        "bytes": model.bytes,
        "arch": model.arch,
        "layers": model.n_layers,
        "experts": model.n_experts,
        "experts_used": model.n_experts_used,
        "dense_bytes": model.dense_bytes,
        "expert_bytes": model.expert_bytes,
        "demand_bytes_per_token": model.demand_bytes_per_token,
    }


def _identity(model: Model) -> str | None:
    try:
        return model.identity
    except ModelError:  # a download has replaced the file while the run went on, which did it no harm
        return None


def _budget(llama: Llama, cap_bytes: int | None) -> dict[str, Any]:
    plan = llama.plan
    if plan is None:
        return {
            "cap_bytes": cap_bytes,
            "dense_bytes": llama.model_info.bytes,
            "boundary_bytes": 0,
            "kv_bytes": None,
            "compute_bytes": None,
            "other_bytes": None,
            "margin_bytes": 0,
            "expert_bytes": 0,
        }
    names = ("cap", "dense", "boundary", "kv", "compute", "other", "margin", "expert")
    return {f"{name}_bytes": getattr(plan, f"{name}_bytes") for name in names}


def check_writable(path: Path, shards: Sequence[Path] = (), option: str = "--json") -> None:
    """Raises UsageError when ``path`` cannot become a file, or is one of the model's: better before a run than after
    it, and never over the model."""
    if str(path) == "-":
        raise UsageError(f"{option} -: stdout is for the text, name a file")
    check_directory(path, option)
    real = followed(path, option)
    if real.is_dir():
        raise UsageError(f"{option} {path}: that is a directory, name a file in it")
    # A split model's other shards are not known yet, but nobody wants a model replaced.
    if real.exists() and (real.suffix == ".gguf" or any(real.samefile(shard) for shard in shards)):
        raise UsageError(f"{option} {path}: that is a model, name another file")
    if not os.access(real.parent, os.W_OK):
        raise UsageError(f"{option} {path}: the directory {real.parent} cannot be written to")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the whole document or nothing. Raises RefusedError when there is no room for it."""
    path = followed(path, "--json")
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with fresh.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.write("\n")
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise RefusedError(f"--json {path}: cannot be written: {error.strerror}") from None
