"""What a mechanism brings from a file: ``pinned:FILE``, ``ridge:FILE``, ``oracle:FILE``, as ``_core.Engine`` takes it.

FILE is a trace or, for ``ridge`` and ``pinned``, a fit file (made by ``moestream fit``; docs/formats/fit.md). Each is
refused when it belongs to another model. Experts are numbered globally, through the banks in order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moestream.errors import RefusedError
from moestream.files import exists, open_file
from moestream.trace import no_routes
from moestream.trace.meta import MOST_EXPERTS, MOST_IN_BANK
from moestream.values import Object, parse_json, whole_number

if TYPE_CHECKING:
    from moestream.trace.trace import Trace

Float32 = NDArray[np.float32]

FIT_FORMAT = "moestream-fit"
FIT_VERSION = 1
#: A numpy archive is a zip file.
_ZIP_MAGIC = b"PK"
_MOST_WISHES = (1 << 31) - 1
_WHERE_FITS_COME_FROM = "make one with `moestream fit TRACE --out FILE`"
_WHERE_TRACES_COME_FROM = "record one with `moestream run --trace FILE`"
_EITHER = "name a trace (`moestream run --trace FILE`) or a fit (`moestream fit`)"


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
    """Does the file look like a fit file (from its header alone)? Raises what ``open_file`` does."""
    try:
        return _read_archive(Path(path), "header", remedy=_EITHER)[0].members.get("format") == FIT_FORMAT
    except _NoFit:
        return False


def read_fit(path: str | Path) -> Fit:
    """The file as a value. RefusedError for what is no fit file, a damaged one and a newer one."""
    try:
        header, arrays = _read_archive(Path(path))
        if header.members.get("format") != FIT_FORMAT:
            raise _NoFit
        version = header.integer("version", least=1)
        if version > FIT_VERSION:
            raise RefusedError(
                f"{path} has fit format {version}, this version reads up to {FIT_VERSION}: "
                "update moestream or fit the traces again"
            )
        return _parse_fit(header, arrays)
    except _NoFit as error:
        if error.args:
            raise _damaged(path, error.args[0]) from None
        raise RefusedError(f"{path} is not a fit file: {_WHERE_FITS_COME_FROM}") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None


class _NoFit(Exception):
    """The file is no archive of ours; with an argument: it is a damaged one, and how."""


def _read_archive(
    path: Path, *only: str, remedy: str = _WHERE_FITS_COME_FROM
) -> tuple[Object, dict[str, Any]]:
    """The header and the other arrays (of ``only`` these names, where any are given)."""
    # Opened here: numpy leaves a file that it opened itself open when it turns out to be none of its own.
    with open_file(path, remedy) as file:
        if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
            raise _NoFit
        file.seek(0)
        try:
            with np.load(file) as archive:
                arrays = {name: archive[name] for name in only or archive.files}
            return Object(parse_json(str(arrays.pop("header")))), arrays
        # Whatever numpy, zipfile and its decompressors come across: it depends on where the damage is.
        except Exception as error:
            raise _NoFit(" ".join(str(error).split()) or type(error).__name__) from None


def _parse_fit(header: Object, arrays: dict[str, Any]) -> Fit:
    """Raises ValueError for what is no fit. What passes breaks nothing that reads it, the core included."""
    model = header.inner("model")
    experts = model.integers("experts", 1, MOST_IN_BANK)
    if sum(experts) > MOST_EXPERTS:
        raise ValueError(f"model.experts are more than {MOST_EXPERTS}")
    before = header.items("before")
    if len(before) != len(experts):
        raise ValueError(f"before has {len(before)} entries for {len(experts)} banks")
    counts = _array(arrays, "counts", np.int64, (sum(experts),))
    if (counts < 0).any():
        raise ValueError("a count is below 0")
    known = ("format", "version", "model", "wishes", "before")
    return Fit(
        identity=model.text("identity"),
        name=model.text("name"),
        experts=tuple(experts),
        wishes=header.integer("wishes", 1, _MOST_WISHES),
        maps=tuple(
            None if value is None else _parse_map(arrays, bank, value, experts)
            for bank, value in enumerate(before)
        ),
        counts=counts,
        about={name: value for name, value in header.members.items() if name not in known},
    )


def _parse_map(arrays: dict[str, Any], bank: int, before: Any, experts: list[int]) -> Linear:
    source = whole_number(before, f"before[{bank}]", 0, len(experts) - 1)
    shape = (experts[bank], experts[source] + experts[bank])
    return Linear(
        source,
        _array(arrays, f"weights_{bank}", np.float32, shape),
        _array(arrays, f"bias_{bank}", np.float32, shape[:1]),
    )


def _array(arrays: dict[str, Any], name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    array = arrays.get(name)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"it has no array {name}")
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"its {name} is {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} {list(shape)}"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"its {name} holds what is no number")
    return array


def _damaged(path: str | Path, why: str) -> RefusedError:
    return RefusedError(f"{path} is damaged or cut short ({why}): fit the traces again")


def check_identity(path: str | Path, theirs: str, model_identity: str, name: str, remedy: str) -> None:
    """RefusedError, with both identities, when a file belongs to another model."""
    if theirs != model_identity:
        of = f" ({name})" if name else ""
        raise RefusedError(f"{path} belongs to model {theirs}{of}, this is model {model_identity}: {remedy}")


def load_fit(path: str | Path, model_identity: str) -> Fit:
    """A fit file of this model. RefusedError when it is none or belongs to another."""
    fit = read_fit(path)
    check_identity(path, fit.identity, model_identity, fit.name, _WHERE_FITS_COME_FROM)
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
    # Of a run that was cut short there may be only the partial trace.
    if exists(Path(path)) and is_fit(path):
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
    name = str(trace.meta["model"].get("name", ""))
    check_identity(path, trace.identity, model_identity, name, _WHERE_TRACES_COME_FROM)
    if not len(trace.routes):
        raise no_routes(trace, str(path))
    return trace
