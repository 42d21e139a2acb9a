"""
moestream's core: stores, readers, policies and the hook that llama.cpp calls.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import numpy
from numpy.typing import NDArray


SOURCES: str = ...

class CoreError(Exception):
    pass

class ExpertCache:
    """Which experts are in memory and who leaves: decisions, no bytes."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], int]], bank_of: Sequence[int], policy: str, priority: Sequence[float] = []) -> None:
        """
        parts: (experts ascending, capacity in experts) each; bank_of: per expert; policy: 'lfu-decay:16'; priority: a seed for policies that take one, per expert.
        """

    def route(self, experts: Sequence[tuple[int, int]], token: int, tokens: int) -> list[tuple[int, int | None]] | None:
        """
        One route of (expert, count) of one bank: the (expert, victim or None) to load; None: too wide.
        """

    def speculate(self, expert: int) -> tuple[int, int | None] | None:
        """
        Load an absent expert early: (expert, victim or None), or None when that may not be.
        """

    def release_speculative(self, bank: int) -> None:
        """
        The bank has been routed: its unused early loads are no longer protected.
        """

    def cancel(self, expert: int) -> None:
        """Take back an early load that was never started."""

    def drop(self, expert: int) -> None:
        """A resident expert leaves after its use; its frame becomes free."""

    def set_capacity(self, part: int, capacity: int) -> tuple[int, list[int]]:
        """Fewer experts, or again more: the capacity reached, and who left."""

    def unpin_route(self) -> None:
        """The last route's experts may leave."""

    def residency(self, expert: int) -> str:
        """'absent', 'resident' or 'speculative'."""

    def keep(self, expert: int) -> bool:
        """Whether the policy lets the expert stay once its matmuls are over."""

    def counters(self) -> dict[str, Any]:
        """Hits, misses, evictions and speculative loads since construction."""

def policy_members() -> dict[str, str]:
    """The policies by name, each with its one-line help."""

class Engine:
    """One model's store and hook; see moestream/engine.h."""

    def __init__(self, *, shards: Sequence[tuple[str, int]], tensors: Sequence[tuple[str, int, int, int, int, int]], layers: Sequence[int], optional_banks: Sequence[bool], libllama: str, store: str, reader: str, policy: str, predictor: str, dense: str, direct: bool, keep_cached: bool = False, advice: str = 'normal', pages: str = 'recycle', max_mappings: int, closed: bool = False, alignment: int = 4096, huge: bool = False, copy_dir: str = '', seeds: object | None = None, interpose: bool, fallback: Callable[[str], None], progress: Callable[[int, int], None]) -> None: ...

    def begin_load(self) -> None: ...

    def end_load(self, loaded: bool) -> None: ...

    def set_budget(self, *, capacities: Sequence[int], growth_limit: int) -> None: ...

    def resize(self, capacities: Sequence[int]) -> list[int]: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def cancel(self, on: bool) -> None: ...

    def clear_failure(self) -> None: ...

    def close(self) -> None:
        """Let go of the store; llama.cpp's model must be gone. Idempotent."""

    def start_trace(self) -> None:
        """Record what a trace needs from now on."""

    def take_trace(self, finish: bool = False) -> dict[str, Any]:
        """
        What was recorded since the last call, as flat arrays; see moestream.trace.Events.
        """

    @property
    def engagement(self) -> dict[str, int]:
        """How often each thing the mechanism promises was done, by name."""

    @property
    def failure(self) -> object:
        """
        None, or (errno, text, place): (shard, offset) of bytes that are no expert's, else None.
        """

    @property
    def counters(self) -> dict[str, Any]: ...

    @property
    def streams(self) -> bool: ...

    @property
    def address(self) -> int: ...

    node_callback: Final[int] = ...
    """(arg: object, /) -> int"""

    abort_callback: Final[int] = ...
    """(arg: object, /) -> int"""

def geometry(shards: Sequence[tuple[str, int]], tensors: Sequence[tuple[str, int, int, int, int, int]], layers: Sequence[int]) -> dict[str, Any]: ...

def abilities() -> dict[str, str]:
    """
    What members need of this kernel, tried: by name '' or one line that says why not.
    """

def startable_threads(count: int) -> int:
    """
    How many of so many threads this process can start now, beside those it has: each is started, and ends.
    """

def prove_abi(libllama: str) -> None: ...

def store_members() -> dict[str, Any]: ...

def reader_members() -> dict[str, Any]: ...

def warmer_members() -> dict[str, Any]: ...

def predictor_members() -> dict[str, Any]: ...

class GuardedAsserts:
    """
    While inside, an assertion of ggml's that fails on this thread is a failed load.
    """

    def __init__(self, libllama: str) -> None: ...

    def __enter__(self) -> GuardedAsserts: ...

    def __exit__(self, kind: object | None, error: object | None, trace: object | None) -> None: ...

def failed_assertion() -> str:
    """
    What failed on this thread since its guard began, with its place in the source; '' for nothing.
    """

def replay(*, bank: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], token: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], experts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], wish_start: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], wishes: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], parts: Sequence[tuple[Sequence[int], int]], part_bytes: Sequence[int], bank_of: Sequence[int], policy: str, priority: Sequence[float], counted_from: int) -> dict[str, Any]:
    """
    Recorded routes through the engine's own cache, or past it by 'belady': the counters from route
    `counted_from` on, and for each route its hits, misses, early loads, their bytes and whether it was
    refused. wish_start may be empty: nothing is loaded early.
    """

def probe_reads(files: Sequence[str], ranges: Sequence[tuple[int, int, int]], *, reader: str, in_flight: int, split_bytes: int = 0, direct: bool = True, alignment: int = 4096, huge: bool = False, buffer_bytes: int, seconds: float) -> dict[str, Any]:
    """
    Timed reads of (file, offset, bytes) ranges by a reader: bytes, reads, seconds and the process's CPU seconds.
    """

def probe_mapping(files: Sequence[str], ranges: Sequence[tuple[int, int, int]], *, warmer: str, advice: str = 'normal', route: int = 8, touch: bool = True, seconds: float) -> dict[str, Any]:
    """
    The same of ranges of mapped files, asked for by a warmer and then touched.
    """

def probe_copies(threads: int, bytes: int, seconds: float) -> dict[str, Any]:
    """The same of copies within memory."""

def direct_reads(path: bytes) -> tuple[int, str]:
    """
    What O_DIRECT reads of a file must be multiples of, and ''; or 0 and why there are none.
    """

def cached_bytes(descriptor: int) -> int:
    """Bytes of an open file in the page cache, by cachestat. Raises OSError."""

def resident_bytes(descriptor: int, ranges: Sequence[tuple[int, int]]) -> int:
    """
    The same of the pages of (offset, bytes) ranges, by mincore. Raises OSError.
    """
