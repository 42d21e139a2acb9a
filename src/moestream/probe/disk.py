"""The disk's side of a probe: which cases there are, how each is timed and accounted for, and the tables of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moestream.box import process_io
from moestream.core import _core
from moestream.errors import MoestreamError, ReadError
from moestream.probe.device import Device
from moestream.probe.sample import BLOCK, WARM_BYTES, Range, Sample
from moestream.probe.schedule import Case, Measured, Shot, figure, knee, rate, run_rounds

DEPTHS = (1, 2, 4, 8, 16, 32, 64)
THREADS = (1, 2, 4, 8)
#: Where slabs are of several sizes: what each size is read with by itself, io_uring's depths and threads.
SIZE_DEPTHS, SIZE_THREADS = (1, 8, 32), (1, 4)
#: No more sizes than this, those with most bytes: a model of many quantizations has a dozen.
_MOST_SIZES = 4
SPLITS = (1, 2, 4)
PLACES = {"start": 0.0, "middle": 0.5, "end": 1.0}
#: Destination's alignment in bytes, and whether in huge pages.
ALIGNMENTS = {
    "align4k": (4096, False),
    "align16k": (16384, False),
    "align2m": (2 << 20, False),
    "huge": (2 << 20, True),
}
#: What is done to a cold mapping before it is touched: (advice on the mapping, asked a route at a time).
ADVICE = {
    "normal": ("normal", "fault"),
    "random": ("random", "fault"),
    "sequential": ("sequential", "fault"),
    "willneed": ("normal", "willneed"),
    "readahead": ("normal", "readahead"),
    "fadvise": ("normal", "fadvise"),
}
#: Groups of cases that touch a mapping.
_MAPPED = ("mapped-warm", "mapped-cold", "advice")
#: A depth that would have more than this in flight says nothing a smaller one does not.
_MOST_IN_FLIGHT = 512 << 20
_BUFFER = 64 << 20


@dataclass(frozen=True)
class Scope:
    """How much is measured. ``case_bytes`` and ``case_s``: at most, for one shot; ``seconds``: of all."""

    depths: tuple[int, ...]
    threads: tuple[int, ...]
    splits: tuple[int, ...]
    alignments: tuple[str, ...]
    advice: tuple[str, ...]
    rounds: int
    case_bytes: int
    case_s: float
    seconds: float


FULL = Scope(DEPTHS, THREADS, SPLITS, tuple(ALIGNMENTS), tuple(ADVICE), 5, 192 << 20, 0.25, 75.0)
QUICK = Scope((1, 4, 8, 16, 32), (1, 4), (1, 2), (), ("normal", "random", "willneed"), 3, 48 << 20, 0.08, 7.0)


class Disk:
    """Times a sample's ranges. ``device`` and ``physical`` are whose accounts of reads go with each shot."""

    def __init__(
        self, sample: Sample, scope: Scope, device: Device | None, *, uring: bool, huge_pages: bool
    ) -> None:
        self.sample, self.scope, self.device = sample, scope, device
        self.uring, self.huge_pages = uring, huge_pages
        self._warm_bytes = min(WARM_BYTES, scope.case_bytes)
        self._warm = sample.warm_set(self._warm_bytes)
        self._ranges: list[Range] = []

    def cases(self) -> list[Case]:
        """Every case of the scope, one of each key."""
        groups = (self._sequential, self._random, self._sizes, self._warm_reads, self._mapped, self._aligned)
        return [case for group in groups for case in group()]

    def measure(
        self, progress: Callable[[int, int], None] | None = None, groups: Sequence[str] = ()
    ) -> Measured:
        """``groups``: only the cases of these (what a key begins with); of none, all."""
        return run_rounds(
            [case for case in self.cases() if not groups or case.key.partition("/")[0] in groups],
            self.scope.rounds,
            self._prepare,
            seconds=self.scope.seconds,
            clock=time.monotonic,
            progress=progress,
        )

    # -- the state before a shot ---------------------------------------------------------------------------------

    def _prepare(self, case: Case) -> str:
        group, _, setting = case.key.partition("/")
        if group in _MAPPED and "mapping" in self.sample.refusals:
            return self.sample.refusals["mapping"]
        if case.warm:
            in_order = group == "sequential-warm"
            self._ranges = self.sample.sequential(0.0, self._warm_bytes) if in_order else self._warm
            return self.sample.make_warm(self._ranges)
        if group == "sequential":
            self._ranges = self.sample.sequential(PLACES[setting], self.scope.case_bytes)
        else:
            size = int(setting.partition("/")[0]) if group == "sizes" else None
            self._ranges = self.sample.take(self.scope.case_bytes, at_least=16, size=size)
        return self.sample.make_cold(self._ranges)

    # -- the cases -----------------------------------------------------------------------------------------------

    def _sequential(self) -> Iterator[Case]:
        reader = "uring:4" if self.uring else "threads:4"
        for place in PLACES:
            yield Case(f"sequential/{place}", False, partial(self._read, reader, 4))
        yield Case("sequential-warm/start", True, partial(self._read, "threads:1", 1, direct=False))

    def _random(self) -> Iterator[Case]:
        for depth in self.scope.depths if self.uring else ():
            if depth * self.sample.range_bytes <= _MOST_IN_FLIGHT:
                yield Case(f"random/uring:{depth}", False, partial(self._read, f"uring:{depth}", depth))
        for count in self.scope.threads:
            for split in self.scope.splits:
                text = f"threads:{count}" if split == 1 else f"threads:{count}x{split}"
                yield Case(
                    f"random/{text}", False, partial(self._read, f"threads:{count}", count, split=split)
                )
        for count in (1, 4):
            run = partial(self._read, f"threads:{count}", count, direct=False)
            yield Case(f"buffered/threads:{count}", False, run)

    def _sizes(self) -> Iterator[Case]:
        name, counts = ("uring", SIZE_DEPTHS) if self.uring else ("threads", SIZE_THREADS)
        within = self.scope.depths if self.uring else self.scope.threads
        found = self.sample.by_size
        for size in sorted(sorted(found, key=lambda size: size * len(found[size]))[-_MOST_SIZES:]):
            for count in (count for count in counts if count in within):
                reader = f"{name}:{count}"
                yield Case(f"sizes/{size}/{reader}", False, partial(self._read, reader, count))

    def _warm_reads(self) -> Iterator[Case]:
        for count in self.scope.threads:
            for split in self.scope.splits:
                text = f"threads:{count}" if split == 1 else f"threads:{count}x{split}"
                run = partial(self._read, f"threads:{count}", count, split=split, direct=False)
                yield Case(f"warm/{text}", True, run)

    def _mapped(self) -> Iterator[Case]:
        for count in (1, 4):
            for state in ("cold", "warm"):
                run = partial(self._map, f"memcpy:{count}", "normal", touch=False)
                yield Case(f"mapped-{state}/memcpy:{count}", state == "warm", run)
        for name in self.scope.advice:
            advice, warmer = ADVICE[name]
            yield Case(f"advice/{name}", False, partial(self._map, warmer, advice, touch=True))

    def _aligned(self) -> Iterator[Case]:
        reader, depth = ("uring:8", 8) if self.uring else ("threads:4", 4)
        for name in self.scope.alignments:
            alignment, huge = ALIGNMENTS[name]
            if huge and not self.huge_pages:
                continue
            cold = partial(self._read, reader, depth, alignment=alignment, huge=huge)
            warm = partial(self._read, "threads:1", 1, alignment=alignment, huge=huge, direct=False)
            yield Case(f"alignment-cold/{name}", False, cold)
            yield Case(f"alignment-warm/{name}", True, warm)

    # -- one shot ------------------------------------------------------------------------------------------------

    def _read(
        self,
        reader: str,
        in_flight: int,
        split: int = 1,
        direct: bool | None = None,
        alignment: int = 4096,
        huge: bool = False,
    ) -> Shot:
        largest = max(length for _, _, length in self._ranges)
        return self._accounted(
            lambda: _core.probe_reads(
                self.sample.names,
                self._ranges,
                reader=reader,
                in_flight=in_flight,
                split_bytes=-(-largest // split) if split > 1 else 0,
                direct=self.sample.direct if direct is None else direct,
                alignment=alignment,
                huge=huge,
                buffer_bytes=max(_BUFFER, 2 * BLOCK),
                seconds=self.scope.case_s,
            )
        )

    def _map(self, warmer: str, advice: str, touch: bool) -> Shot:
        return self._accounted(
            lambda: _core.probe_mapping(
                self.sample.names,
                self._ranges,
                warmer=warmer,
                advice=advice,
                route=self.sample.route_slabs,
                touch=touch,
                seconds=self.scope.case_s,
            )
        )

    def _accounted(self, run: Callable[[], dict[str, Any]]) -> Shot:
        own = process_io().get("read_bytes")
        before = self.device.reads() if self.device is not None else None
        try:
            timing = run()
        except _core.CoreError as error:
            kind, text = error.args
            raise (ReadError if kind == "io" else MoestreamError)(f"probe: {text}") from None
        after = self.device.reads() if self.device is not None and before is not None else None
        read = process_io().get("read_bytes")
        return Shot(
            timing["bytes"],
            timing["reads"],
            timing["seconds"],
            timing["cpu_s"],
            read - own if read is not None and own is not None else None,
            after.reads - before.reads if after is not None and before is not None else None,
            after.bytes - before.bytes if after is not None and before is not None else None,
        )


def tables(measured: Measured, sample: Sample) -> dict[str, Any]:
    """What was measured, by group and setting, and what is read off it: the knee, the grids, the expert-read table."""
    figures = {key: made for key, shots in measured.shots.items() if (made := figure(shots))}
    groups: dict[str, dict[str, Any]] = {}
    for key, made in figures.items():
        group, _, setting = key.partition("/")
        groups.setdefault(group.replace("-", "_"), {})[setting] = made
    sizes: dict[str, dict[str, Any]] = {}
    for key, made in groups.pop("sizes", {}).items():
        size, _, reader = key.partition("/")
        sizes.setdefault(size, {})[reader] = made
    knees = {name: _knee(figures, name) for name in ("uring", "threads")}
    rates = [
        value for key in figures if key.startswith("random/") and (value := rate(figures, key)) is not None
    ]
    return {
        "direct": sample.direct,
        "direct_refusal": sample.refusals.get("direct"),
        "cold_checked": sample.checkable,
        "what": sample.what,
        "range_bytes": sample.range_bytes,
        "random_bytes_per_s": max(rates, default=None),
        "knee": knees,
        "reader": _enough(knees),
        "sizes": sizes,
        **groups,
        "expert_read": _expert_read(figures, sample),
        "grid": {state: _grid(figures, group) for state, group in (("cold", "random"), ("warm", "warm"))},
        "not_measured": dict(measured.reasons),
    }


def _knee(figures: dict[str, Any], reader: str) -> dict[str, Any] | None:
    rates = {
        int(setting): value
        for key in figures
        if key.startswith(f"random/{reader}:") and (setting := key.rpartition(":")[2]).isdigit()
        if (value := rate(figures, key)) is not None
    }
    at = knee(rates)
    return (
        None if at is None else {"at": at, "bytes_per_s": rates[at], "best_bytes_per_s": max(rates.values())}
    )


def _enough(knees: dict[str, dict[str, Any] | None]) -> str | None:
    """The reader at its knee that reads most, as a mechanism names it; None where none was measured."""
    found = {f"{name}:{knee['at']}": knee["bytes_per_s"] for name, knee in knees.items() if knee is not None}
    return max(found, key=lambda reader: found[reader], default=None)


def _grid(figures: dict[str, Any], group: str) -> dict[str, dict[str, float]]:
    """Median bytes a second, by threads and then by pieces of a slab."""
    grid: dict[str, dict[str, float]] = {}
    for count in THREADS:
        for split in SPLITS:
            text = f"{group}/threads:{count}" + (f"x{split}" if split > 1 else "")
            value = rate(figures, text)
            if value is not None:
                grid.setdefault(str(count), {})[str(split)] = value
    return grid


def _expert_read(figures: dict[str, Any], sample: Sample) -> list[dict[str, Any]]:
    """Reading one layer's routed experts: how, from where, the rate, and the time of one route (None without one)."""
    rows = {
        ("pread, 1 thread", "warm"): "warm/threads:1",
        ("pread, 4 threads", "warm"): "warm/threads:4",
        ("mapping and memcpy, 1 thread", "warm"): "mapped-warm/memcpy:1",
        ("mapping and memcpy, 4 threads", "warm"): "mapped-warm/memcpy:4",
        ("pread, 1 thread", "cold, uncached"): "random/threads:1",
        ("pread, 4 threads", "cold, uncached"): "random/threads:4",
        ("pread, 1 thread", "cold"): "buffered/threads:1",
        ("pread, 4 threads", "cold"): "buffered/threads:4",
        ("mapping and memcpy, 1 thread", "cold"): "mapped-cold/memcpy:1",
        ("mapping and memcpy, 4 threads", "cold"): "mapped-cold/memcpy:4",
    }
    table = []
    for (how, state), key in rows.items():
        value = rate(figures, key)
        if value is not None:
            a_route = sample.route_bytes / value if sample.route_bytes is not None else None
            table.append({"how": how, "state": state, "bytes_per_s": value, "s_per_route": a_route})
    return table
