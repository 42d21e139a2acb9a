"""The members of every family a mechanism is made of: what each does, where it was seen, what it needs of the system.

Plain data. ``moestream.mechanism`` parses the words, ``moestream mechanisms`` prints them, ``moestream.box`` knows
whether this box has what they need, and the core has one file for each.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Who used a member before: the sources this project began from, and its neighbours.
STOCK = "stock llama.cpp"
OLMOE = "OLMoE off-loading study"
MACOS = "macOS streaming notes"
ENGINES = "BigMoeOnEdge"
CACHES = "cache literature"
HERE = "this project"


@dataclass(frozen=True)
class Argument:
    """What may follow a member's colon.

    A whole number ``lowest``..``highest`` (``what`` says what it counts); with ``pieces`` also ``NxS``: each slab is
    read in S pieces; with ``layers`` above 1 also ``NxL``: of each of the next L layers, at most so many. With
    ``choices``, one of these words (``needs``: what one of them needs beyond its member). With ``file``, a path.
    """

    what: str
    default: int = 0
    lowest: int = 1
    highest: int = 0
    pieces: bool = False
    layers: int = 1
    choices: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    file: bool = False

    @property
    def shown(self) -> str:
        """As a help text writes it after the name."""
        if self.file:
            return ":FILE"
        if self.choices:
            return ":" + "|".join(self.choices)
        return ":NxS" if self.pieces else ":NxL" if self.layers > 1 else ":N"

    @property
    def most_times(self) -> int:
        """The most that may follow an ``x``; 1: nothing may."""
        return MOST_PIECES if self.pieces else self.layers


@dataclass(frozen=True)
class Member:
    """One member of a family. ``needs``: names of ``moestream.box.abilities``."""

    help: str
    seen: str
    argument: Argument | None = None
    needs: tuple[str, ...] = ()


MOST_PIECES = 8
_THREADS = Argument("threads", 1, 1, 64, pieces=True)

STORES = {
    "resident": Member("everything read into memory at load: the compute ceiling", HERE),
    "mapped": Member("the file mapped without MAP_POPULATE: the page cache is the cache", STOCK),
    "arena": Member(
        "a fixed set of pages, moved to wherever the next expert must appear", HERE, needs=("mremap",)
    ),
    "cow": Member(
        "reads copied into a private mapping of the file: every page written once stays",
        OLMOE,
        needs=("cap",),
    ),
    "shared": Member("reads written into a shared mapping of a copy of the file", OLMOE),
}
QUEUE = {
    "uring": Member(
        "io_uring by raw system calls",
        ENGINES,
        Argument("reads in flight", 8, 1, 1024, pieces=True),
        ("io_uring",),
    ),
    "threads": Member("a pool of pread threads", MACOS, Argument("threads", 4, 1, 64, pieces=True)),
    "sync": Member("pread by the thread that needs the bytes", OLMOE),
}
WARMERS = {
    "fault": Member("page faults bring the bytes", STOCK),
    "willneed": Member("MADV_WILLNEED for each routed slab", OLMOE),
    "readahead": Member("readahead(2) of each routed slab", MACOS),
    "fadvise": Member("POSIX_FADV_WILLNEED for each routed slab", MACOS),
    "pread": Member("pread of each routed slab into scratch, to warm the page cache", OLMOE, _THREADS),
    "pread+willneed": Member("MADV_WILLNEED, then pread into scratch", OLMOE, _THREADS),
    "hybrid": Member(
        "asks which pages are absent and reads only those",
        MACOS,
        Argument(
            "how to ask",
            choices=("mincore", "cachestat"),
            needs=(("mincore", "mincore"), ("cachestat", "cachestat")),
        ),
    ),
    "tiered": Member(
        "O_DIRECT over the slab the first time, through the page cache after: a bit a slab",
        MACOS,
        needs=("o_direct",),
    ),
    "memcpy": Member(
        "copies each routed slab out of the mapping, so that faults are taken there", MACOS, _THREADS
    ),
}
BACKGROUND = {
    "background": Member(
        "worker threads do the asking, the decode does not wait", OLMOE, Argument("worker threads", 1, 1, 16)
    ),
}
POLICIES = {
    "none": Member("nothing is kept on purpose: an arena reuses frames in the order they were filled", HERE),
    "lru": Member("the expert unused for the longest time leaves", OLMOE),
    "lru-layer": Member("lru inside an equal share for each layer", ENGINES),
    "fifo": Member("the expert that came first leaves", CACHES),
    "lfu": Member("the expert used least often leaves", CACHES),
    "lfu-decay": Member(
        "the expert of the lowest decayed use count leaves",
        HERE,
        Argument("half-life in tokens", 16, 1, 10**6),
    ),
    "lfu-adapt": Member("decayed use counts over several half-lives, and what followed like moments", HERE),
    "sieve": Member("a queue with visited bits and a moving hand", CACHES),
    "s3fifo": Member("three queues: small, main and ghost", CACHES),
    "pinned": Member(
        "the experts a trace used most stay, the rest are lru", MACOS, Argument("a trace", file=True)
    ),
    "dontneed": Member(
        "pages are dropped after use, but for the hottest experts of each layer",
        MACOS,
        Argument("hot experts a layer", 0, 0, 4096),
    ),
}
PREDICTORS = {
    "none": Member("nothing is read early", STOCK),
    "gate": Member(
        "the next layer's router on this layer's input",
        MACOS,
        Argument("experts a layer", 1, 1, 64, layers=3),
    ),
    "ridge": Member("a linear map fitted on traces (moestream fit)", HERE, Argument("a fit", file=True)),
    "previous": Member("the last token's experts", OLMOE, Argument("experts a layer", 1, 1, 64)),
    "oracle": Member(
        "the routes of a trace of the same prompt: the ceiling", HERE, Argument("a trace", file=True)
    ),
    "random": Member("any experts: the control", HERE, Argument("experts a layer", 1, 1, 64)),
}
DENSE = {
    "mapped": Member("in the file mapping", STOCK),
    "mlock": Member("locked in memory", OLMOE, needs=("mlock",)),
    "anon": Member("in anonymous memory, read once at load", HERE),
}
VARIANTS = {
    "direct": Member("O_DIRECT reads", OLMOE, needs=("o_direct",)),
    "buffered": Member("reads through the page cache, dropped after", MACOS),
    "cached": Member("reads through the page cache, which keeps what it can of them", MACOS),
    "recycle": Member("an evicted expert's pages are moved by mremap", HERE, needs=("mremap",)),
    "fresh": Member("an evicted expert's pages are dropped, new ones faulted in by the read", ENGINES),
    "populate": Member("as fresh, populated before the read", ENGINES, needs=("populate",)),
    "thp": Member("as fresh, in transparent huge pages", MACOS, needs=("huge",)),
    "normal": Member("the kernel's own read-ahead on the mapping", STOCK),
    "random": Member("MADV_RANDOM: no read-ahead on the mapping", STOCK),
    "sequential": Member("MADV_SEQUENTIAL: more read-ahead on the mapping", MACOS),
    "align4k": Member("destinations on page boundaries", HERE),
    "align16k": Member("destinations on 16 KiB boundaries", MACOS),
    "align2m": Member("destinations on 2 MiB boundaries", MACOS),
    "huge": Member("scratch in huge pages", MACOS, needs=("huge",)),
}
#: Of what is read into; the same words in every store that has the choice.
_ALIGNMENT = ("align4k", "align16k", "align2m")
#: By store: groups of variants that exclude each other, in canonical order, the default first ('' for none of it).
GROUPS = {
    "resident": (),
    "mapped": (("normal", "random", "sequential"), _ALIGNMENT, ("", "huge")),
    "arena": (("direct", "buffered", "cached"), ("recycle", "fresh", "populate", "thp"), _ALIGNMENT),
    "cow": (("direct", "buffered"), _ALIGNMENT, ("", "huge")),
    "shared": (("direct", "buffered"), _ALIGNMENT, ("", "huge")),
}
#: Known to the field, not to be run: why.
ELSEWHERE = {
    "belady": "belady must know the future: it exists in `moestream replay TRACE --policy belady` only"
}
FAMILIES = {
    "store": STORES,
    "variant": VARIANTS,
    "reader": QUEUE | WARMERS,
    "background": BACKGROUND,
    "policy": POLICIES,
    "predictor": PREDICTORS,
    "dense": DENSE,
}
