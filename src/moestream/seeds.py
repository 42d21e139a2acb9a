"""What a mechanism brings from a file: ``pinned:FILE``, ``ridge:FILE``, ``oracle:FILE``, as ``_core.Engine`` takes it.

FILE is a trace or, for ``ridge`` and ``pinned``, a fit file (made by ``moestream fit``; docs/formats/fit.md). Each is
refused when it belongs to another model. Experts are numbered globally, through the banks in order.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moestream.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from moestream.trace.trace import Trace

Float32 = NDArray[np.float32]

FIT_FORMAT = "moestream-fit"
FIT_VERSION = 1
#: A numpy archive is a zip file.
_ZIP_MAGIC = b"PK"
#: What reading a damaged one raises, according to where the damage is.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    ValueError,
    TypeError,
    RuntimeError,
    MemoryError,
    OSError,
)
_WHERE_TRACES_COME_FROM = "record one with `moestream run --trace FILE`"


@dataclass(frozen=True)
class Linear:
    """A map that scores a bank's experts: ``weights`` [experts, inputs] and ``bias`` [experts].

    Inputs are ones and zeros: first the experts of bank ``before``, chosen for this token, then those of this bank,
    chosen for the token before.
    """

    before: int
    weights: Float32
    bias: Float32


@dataclass(frozen=True)
class Fit:
    """A fit file. ``maps`` has one entry a bank (None: no prediction); ``counts``: how often the traces chose each
    expert, [experts]; ``about``: what else the header says (features, lambda, recall, traces)."""

    identity: str
    name: str
    experts: tuple[int, ...]
    wishes: int
    maps: tuple[Linear | None, ...]
    counts: NDArray[np.int64]
    about: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What is written: ``header`` (JSON), ``counts``, and ``weights_B`` and ``bias_B`` of each bank B."""
        header = {
            "format": FIT_FORMAT,
            "version": FIT_VERSION,
            "model": {"identity": self.identity, "name": self.name, "experts": list(self.experts)},
            "wishes": self.wishes,
            "before": [None if linear is None else linear.before for linear in self.maps],
            **self.about,
        }
        arrays: dict[str, NDArray[Any]] = {"header": np.array(json.dumps(header)), "counts": self.counts}
        for bank, linear in enumerate(self.maps):
            if linear is not None:
                arrays[f"weights_{bank}"] = linear.weights
                arrays[f"bias_{bank}"] = linear.bias
        return arrays


def is_fit(path: str | Path) -> bool:
    """Does the file look like a fit file (from its header alone)? OSError when it cannot be opened."""
    with Path(path).open("rb") as file:
        if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
            return False
        file.seek(0)
        try:
            with np.load(file) as archive:
                return bool(json.loads(str(archive["header"]))["format"] == FIT_FORMAT)
        except _DAMAGE:
            return False


def read_fit(path: str | Path) -> Fit:
    """The file as a value. RefusedError for what is no fit file, a damaged one and a newer one."""
    header, arrays = _open_fit(Path(path))
    try:
        model = header["model"]
        experts = tuple(int(count) for count in model["experts"])
        maps = tuple(
            None if before is None else Linear(int(before), arrays[f"weights_{b}"], arrays[f"bias_{b}"])
            for b, before in enumerate(header["before"])
        )
        known = ("format", "version", "model", "wishes", "before")
        about = {name: value for name, value in header.items() if name not in known}
        fit = Fit(
            str(model["identity"]),
            str(model["name"]),
            experts,
            int(header["wishes"]),
            maps,
            arrays["counts"],
            about,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    _check_shapes(fit, path)
    return fit


def _open_fit(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    # Numpy leaves a file that it opened itself open when it turns out to be none of its own.
    with file:
        if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
            raise RefusedError(f"{path} is not a fit file: make one with `moestream fit TRACE --out FILE`")
        file.seek(0)
        try:
            with np.load(file) as archive:
                arrays = {name: archive[name] for name in archive.files}
            header = json.loads(str(arrays.pop("header")))
            kind, version = header["format"], header["version"]
        except _DAMAGE as error:
            raise _damaged(path, str(error)) from None
    if kind != FIT_FORMAT or not isinstance(version, int):
        raise RefusedError(f"{path} is not a fit file: make one with `moestream fit TRACE --out FILE`")
    if version > FIT_VERSION:
        raise RefusedError(
            f"{path} has fit format {version}, this version reads up to {FIT_VERSION}: "
            "update moestream or fit the traces again"
        )
    return header, arrays


def _damaged(path: str | Path, why: str) -> RefusedError:
    return RefusedError(f"{path} is damaged or cut short ({why}): fit the traces again")


def _check_shapes(fit: Fit, path: str | Path) -> None:
    if len(fit.maps) != len(fit.experts) or fit.counts.shape != (sum(fit.experts),) or fit.wishes < 1:
        raise _damaged(path, "its arrays do not match its header")
    for count, linear in zip(fit.experts, fit.maps, strict=True):
        if linear is None:
            continue
        inside = 0 <= linear.before < len(fit.experts)
        inputs = fit.experts[linear.before] + count if inside else -1
        arrays = linear.weights, linear.bias
        if linear.weights.shape != (count, inputs) or linear.bias.shape != (count,):
            raise _damaged(path, "its arrays do not match its header")
        if any(array.dtype != np.float32 or not np.isfinite(array).all() for array in arrays):
            raise _damaged(path, "a weight is not a number")


def check_identity(path: str | Path, theirs: str, model_identity: str, name: str = "") -> None:
    """RefusedError, with both identities, when a file belongs to another model."""
    if theirs != model_identity:
        of = f" ({name})" if name else ""
        raise RefusedError(
            f"{path} belongs to model {theirs}{of}, this is model {model_identity}: {_WHERE_TRACES_COME_FROM}"
        )


def load_fit(path: str | Path, model_identity: str) -> Fit:
    """A fit file of this model. RefusedError when it is none or belongs to another."""
    fit = read_fit(path)
    check_identity(path, fit.identity, model_identity, fit.name)
    return fit


def load_ridge(path: str | Path, model_identity: str) -> dict[str, Any]:
    """The seeds of ``ridge:FILE``: ``ridge``, for each bank (inputs, weights, bias) or None, and ``ridge_wishes``."""
    fit = load_fit(path, model_identity)
    maps = [
        None if linear is None else (linear.weights.shape[1], linear.weights.ravel(), linear.bias)
        for linear in fit.maps
    ]
    return {"ridge": maps, "ridge_wishes": fit.wishes}


def load_priorities(path: str | Path, model_identity: str) -> NDArray[np.float64]:
    """How often each expert was chosen, [experts], from a trace or a fit file: what ``pinned:FILE`` keeps."""
    if Path(path).is_file() and is_fit(path):
        return load_fit(path, model_identity).counts.astype(np.float64)
    trace = _load_trace(path, model_identity)
    return route_counts(trace).astype(np.float64)


def load_oracle(path: str | Path, model_identity: str) -> dict[str, Any]:
    """The seeds of ``oracle:FILE``, the routes of a trace in order: route r took the distinct global experts
    ``oracle_experts[oracle_start[r]:oracle_start[r + 1]]``, ascending."""
    trace = _load_trace(path, model_identity)
    routes, total = trace.routes, int(trace.first_expert[-1])
    route = np.repeat(np.arange(len(routes)), np.diff(routes.id_start))
    taken = np.unique(route * total + trace.first_expert[routes.bank[route]] + routes.ids)
    start = np.concatenate([[0], np.cumsum(np.bincount(taken // total, minlength=len(routes)))])
    return {
        "oracle_experts": (taken % total).astype(np.uint32),
        "oracle_start": start.astype(np.uint64),
    }


def route_counts(trace: Trace) -> NDArray[np.int64]:
    """How many tokens chose each expert, [experts]. Banks that were read whole, their choice unseen, count nothing."""
    routes, first = trace.routes, trace.first_expert
    used = np.asarray(trace.meta["model"]["used"])
    seen = routes.k <= used[routes.bank]
    each = np.diff(routes.id_start)
    experts = routes.ids + np.repeat(first[routes.bank], each)
    return np.bincount(experts[np.repeat(seen, each)], minlength=int(first[-1])).astype(np.int64)


def _load_trace(path: str | Path, model_identity: str) -> Trace:
    # Needs pyarrow, which only traces do.
    from moestream.trace.read import read_trace

    trace = read_trace(Path(path))
    check_identity(path, trace.identity, model_identity, str(trace.meta["model"].get("name", "")))
    if not len(trace.routes):
        raise RefusedError(f"{path} holds no routes: {_WHERE_TRACES_COME_FROM}")
    return trace
