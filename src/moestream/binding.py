"""What this package asks of ``llama_cpp`` beyond its public face, in one place.

The binding's ``Llama`` takes its parameters from two default functions and leaves alone the fields it has no argument
for; ``wrapped_defaults`` sets those while the parent's constructor runs. Nothing here knows what is streamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from moestream.errors import UsageError

#: Iterations an OpenMP thread spins before it sleeps: long enough for the next node of a graph, far too short to burn
#: a core while the disk is awaited. See FINDINGS.md for the figures behind the number.
SPIN_COUNT = "1000"
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def _import_llama_cpp() -> Any:
    """``llama_cpp``, imported so that libgomp reads our spin count unless the user has set a wait policy.

    libgomp reads the environment once, when it is loaded; the variable is taken back afterwards so that child
    processes do not inherit it.
    """
    ours = not any(name in os.environ for name in _SPIN_VARIABLES)
    if ours:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    try:
        import llama_cpp
    finally:
        if ours:
            del os.environ["GOMP_SPINCOUNT"]
    return llama_cpp


llama_cpp = _import_llama_cpp()
low: Any = llama_cpp.llama_cpp

#: The versions of llama-cpp-python whose llama.cpp the identity tests have passed with.
TESTED_VERSIONS = "0.3.36"

_defaults_lock = threading.RLock()


def libllama_path() -> str:
    """The file the binding loaded libllama from (its own, or the one an override named)."""
    return str(low._lib._name)


def binding_version() -> str:
    return str(llama_cpp.__version__)


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


def node_callback(address: int) -> Any:
    """A C function's address as the type ``llama_context_params.cb_eval`` takes."""
    return ctypes.cast(address, low.ggml_backend_sched_eval_callback)


def set_abort_callback(context: Any, address: int, data: int) -> None:
    """Have llama.cpp ask the C function at ``address`` between nodes whether to stop."""
    callback = ctypes.cast(address, low.ggml_abort_callback)
    low.llama_set_abort_callback(context, callback, ctypes.c_void_p(data))


class Closed:
    """What stands for llama.cpp's objects once they are freed: any use of one is a UsageError."""

    SAID = "this model is closed: load it again"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(self.SAID)
