"""What this package asks of ``llama_cpp`` beyond its public face, in one place.

The binding's ``Llama`` takes its parameters from two default functions and leaves alone the fields it has no argument
for; ``wrapped_defaults`` sets those while the parent's constructor runs. Nothing here knows what is streamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moestream.errors import AbiError, UsageError
from moestream.version import INSTALL_TESTED, TESTED_VERSIONS

#: Iterations an OpenMP thread spins before it sleeps: long enough for the next node of a graph, far too short to burn
#: a core while the disk is awaited. See FINDINGS.md for the figures behind the number.
SPIN_COUNT = "1000"
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

#: What the tested llama.cpp calls itself, and its ggml: a build of one's own is to be of the same source.
_TESTED_LIBRARY = ("0.5.0-dev", "0.25.3")
_OVERRIDE = "LLAMA_CPP_LIB_PATH"


def _remedy() -> str:
    return f"unset {_OVERRIDE}, or {INSTALL_TESTED}" if _OVERRIDE in os.environ else INSTALL_TESTED


def _import_llama_cpp() -> Any:
    """``llama_cpp``, imported so that libgomp reads our spin count unless the user has set a wait policy.

    libgomp reads the environment once, when it is loaded; the variable is taken back afterwards so that child
    processes do not inherit it. Raises AbiError with the binding's reason where it cannot be had.
    """
    # What is global answers the calls of every library to functions of that name, its own or not.
    if hasattr(ctypes.CDLL(None), "llama_model_load_from_file"):
        raise AbiError(
            "a libllama is in this process before llama-cpp-python's own, and each would call into the other: "
            "take it out of LD_PRELOAD"
        )
    if _OVERRIDE in os.environ:  # the same place, wherever this process and its children go later
        os.environ[_OVERRIDE] = str(Path(os.environ[_OVERRIDE]).absolute())
    ours = not any(name in os.environ for name in _SPIN_VARIABLES)
    if ours:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    try:
        import llama_cpp
    # A library that is absent, not one at all, or lacks a function that the binding names.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        place = f" from {_OVERRIDE}={os.environ[_OVERRIDE]}" if _OVERRIDE in os.environ else ""
        raise AbiError(f"llama-cpp-python cannot be loaded{place}: {error}; {_remedy()}") from None
    finally:
        if ours:
            del os.environ["GOMP_SPINCOUNT"]
    return llama_cpp


llama_cpp = _import_llama_cpp()
low: Any = llama_cpp.llama_cpp

_defaults_lock = threading.RLock()
#: OpenMP's omp_pause_soft: let go of threads, keep settings.
_PAUSE_SOFT = 1


def _end_pool() -> None:
    """Before a fork, end the OpenMP threads of whoever forks. A child has none of them, and would wait for them for
    ever as soon as llama.cpp computes there; the parent's come back with its next graph."""
    pause = getattr(low._lib, "omp_pause_resource_all", None)
    if pause is not None:  # a llama.cpp without OpenMP keeps no threads
        pause(_PAUSE_SOFT)


def _new_lock() -> None:
    """In a forked child: a thread that was loading in the parent held the lock, and is not here to let it go."""
    global _defaults_lock
    _defaults_lock = threading.RLock()


os.register_at_fork(before=_end_pool, after_in_child=_new_lock)


def libllama_path() -> str:
    """The file the binding loaded libllama from (its own, or the one an override named)."""
    return str(low._lib._name)


def binding_version() -> str:
    return str(llama_cpp.__version__)


def library_versions() -> tuple[str, str]:
    """What the loaded llama.cpp and its ggml call themselves; ``?`` where one does not say."""

    def ask(name: str) -> str:
        function = getattr(low._lib, name, None)
        if function is None:
            return "?"
        function.restype = ctypes.c_char_p
        return bytes(function()).decode("utf-8", "replace")

    return ask("llama_version"), ask("ggml_version")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _untested() -> str | None:
    """What of this llama.cpp is not what the identity tests have passed with, in one line; None when all of it is."""
    oldest, next_one = map(_numbers, TESTED_VERSIONS.split(","))
    if not oldest <= _numbers(binding_version()) < next_one:
        return f"llama-cpp-python {binding_version()} is not tested, {TESTED_VERSIONS} is: {INSTALL_TESTED}"
    found = library_versions()
    if found != _TESTED_LIBRARY:
        return (
            f"{libllama_path()} is llama.cpp {found[0]} with ggml {found[1]}, which is not tested; "
            f"{_TESTED_LIBRARY[0]} with ggml {_TESTED_LIBRARY[1]} is: {_remedy()}"
        )
    return None


def unproven(i_know: bool) -> list[str]:
    """What is untested of this llama.cpp, whose structures may lie elsewhere: nothing, or with ``i_know`` a remark.
    Raises AbiError without it."""
    remark = _untested()
    if remark is None:
        return []
    if not i_know:
        raise AbiError(f"{remark}, or say --i-know (i_know=True)")
    return [remark]


@contextlib.contextmanager
def wrapped_defaults(
    model: Callable[[Any], None] = lambda params: None, context: Callable[[Any], None] = lambda params: None
) -> Iterator[None]:
    """While inside, ``model`` and ``context`` may change every fresh default parameter structure of this thread."""
    thread = threading.get_ident()

    def wrap(original: Callable[[], Any], change: Callable[[Any], None]) -> Callable[[], Any]:
        def defaults() -> Any:
            params = original()
            if threading.get_ident() == thread:
                change(params)
            return params

        return defaults

    with _defaults_lock:
        originals = low.llama_model_default_params, low.llama_context_default_params
        low.llama_model_default_params = wrap(originals[0], model)
        low.llama_context_default_params = wrap(originals[1], context)
        try:
            yield
        finally:
            low.llama_model_default_params, low.llama_context_default_params = originals


def override_array(overrides: Mapping[str, bool | int | float | str]) -> Any:
    """``kv_overrides`` as llama.cpp takes them, a zeroed one behind the last; the binding makes its own only while it
    loads."""
    tags = {bool: "BOOL", int: "INT", float: "FLOAT", str: "STR"}
    fields = {bool: "val_bool", int: "val_i64", float: "val_f64", str: "val_str"}
    array = (low.llama_model_kv_override * (len(overrides) + 1))()
    for entry, (key, value) in zip(array, overrides.items(), strict=False):
        entry.key = key.encode()
        entry.tag = getattr(low, f"LLAMA_KV_OVERRIDE_TYPE_{tags[type(value)]}")
        setattr(entry.value, fields[type(value)], value.encode() if isinstance(value, str) else value)
    return array


def node_callback(address: int) -> Any:
    """A C function's address as the type ``llama_context_params.cb_eval`` takes."""
    return ctypes.cast(address, low.ggml_backend_sched_eval_callback)


def set_abort_callback(context: Any, address: int, data: int) -> None:
    """Have llama.cpp ask the C function at ``address`` between nodes whether to stop."""
    callback = ctypes.cast(address, low.ggml_abort_callback)
    low.llama_set_abort_callback(context, callback, ctypes.c_void_p(data))


#: Addresses of models that have the one context they may have.
_taken: set[int] = set()


@contextlib.contextmanager
def only_context(model: int) -> Iterator[None]:
    """While inside, the binding makes no other context of the model at this address: it would compute on experts that
    nobody read for it."""
    _taken.add(model)
    try:
        yield
    finally:
        _taken.discard(model)


def _refuse_taken(make: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    @functools.wraps(make)
    def make_context(model: int, params: Any) -> Any:
        if model in _taken:
            raise UsageError(
                "a streamed model has one context, the one that has its experts read: load it once more for another"
            )
        return make(model, params)

    return make_context


for _name in ("llama_init_from_model", "llama_new_context_with_model"):
    _made = _refuse_taken(getattr(low, _name))
    for _module in (low, llama_cpp):
        setattr(_module, _name, _made)
