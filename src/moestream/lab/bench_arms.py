"""What a benchmark runs: prompts of three kinds or the user's own, and the arms each of them is given to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moestream.errors import RefusedError
from moestream.files import read_bytes
from moestream.mechanism import Mechanism
from moestream.values import parse_json

STOCK = "stock"

PROMPTS = {
    "prose": (
        "The harbour was quiet when Marta came down the hill with her lantern. The boats had been pulled up on the "
        "sand for the winter, and only the old ferry still lay at the end of the pier. She had been told that"
    ),
    "code": (
        "# A small inventory: items have a name, a price and a count.\n\n"
        "class Item:\n"
        "    def __init__(self, name, price, count):\n"
        "        self.name = name\n"
        "        self.price = price\n"
        "        self.count = count\n\n\n"
        "class Inventory:\n"
        "    def __init__(self):\n"
        "        self.items = {}\n\n"
        "    def add(self, item):\n"
    ),
    "chat": (
        "<|im_start|>user\nI would like to grow tomatoes on a balcony that gets sun only in the afternoon. Which pots "
        "and soil should I buy, and how often should I water them?<|im_end|>\n<|im_start|>assistant\n"
    ),
}


#: One prompt says what is special about its text.
FEWEST_PROMPTS = 3
#: So many tokens are made however slow an arm is: their steps without the warm-up are 8 (``statistics.warm_up``).
FEWEST_TOKENS = 11
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_BETWEEN = re.compile(r"^---[ \t]*$", re.MULTILINE)


def read_prompts(path: Path) -> dict[str, str]:
    """The prompts of a file by name: a JSON object of names and texts, or plain texts with a line of ``---`` between
    them, which are numbered. Raises RefusedError for anything else, and for fewer than three."""
    remedy = "name a text file of prompts with --prompts"
    try:
        text = read_bytes(path, remedy).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedError(f"--prompts {path}: it is no UTF-8 text: {remedy}") from None
    if path.suffix == ".json":
        try:
            found = parse_json(text)
        except ValueError as error:
            raise RefusedError(f"--prompts {path}: {error}: {remedy}") from None
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise RefusedError(f"--prompts {path}: write one object of names and texts")
    else:
        pieces = [piece.strip("\n") for piece in _BETWEEN.split(text)]
        found = {str(number): piece for number, piece in enumerate(pieces, 1) if piece.strip()}
    for name, prompt in found.items():
        if not _NAME.fullmatch(name):
            raise RefusedError(
                f"--prompts {path}: {name[:50]!r} names a file later: use letters, digits, . _ - only"
            )
        if not prompt.strip() or "\0" in prompt or any("\ud800" <= one <= "\udfff" for one in prompt):
            raise RefusedError(
                f"--prompts {path}: prompt {name} is empty, or holds a zero byte or half a character"
            )
    if len(found) < FEWEST_PROMPTS:
        raise RefusedError(
            f"--prompts {path}: {len(found)} prompts, at least {FEWEST_PROMPTS} are needed (a line of --- between two)"
        )
    return found


@dataclass(frozen=True)
class Arm:
    """One row of the table. ``cap_bytes``: the cgroup's limit and what the engine is told, None for no cap.
    ``mechanism``: its text, ``stock`` for plain llama.cpp, None for the default. ``ram_bytes``: what the engine
    is told without a cgroup. ``warm``: the file is in the page cache before. ``tokens``: its own number.
    ``prompts``: the names of those it is given, None for all. ``lever``: what it adds to the arm before it.
    ``expert_bytes``: at most this much of the cap goes to experts."""

    key: str
    cap_bytes: int | None
    mechanism: str | None
    ram_bytes: int | None = None
    warm: bool = False
    tokens: int | None = None
    prompts: tuple[str, ...] | None = None
    lever: str = ""
    expert_bytes: int | None = None

    @property
    def kind(self) -> str:
        return "stock" if self.is_stock else "engine"

    @property
    def is_stock(self) -> bool:
        return self.mechanism == STOCK

    @property
    def faults(self) -> bool:
        """Its experts come by page faults: under a cap, seconds a token."""
        mechanism = self.mechanism or ""
        return self.is_stock or (mechanism.startswith("mapped") and "+fault+" in mechanism)

    @property
    def needs_cage(self) -> bool:
        """The kernel decides what these keep, so that only its own limit is a cap to them."""
        if self.cap_bytes is None or self.mechanism is None:
            return False
        return self.is_stock or Mechanism.parse(self.mechanism).left_to_the_kernel

    @property
    def label(self) -> str:
        return self.mechanism or "default"


def arms(small: int, large: int, everything: int, smallest: int, stock_tokens: int) -> list[Arm]:
    """The arms of one prompt, in order. ``small`` and ``large`` are the two caps, ``everything`` a cap that
    holds the whole model, ``smallest`` the least that the plan accepts."""
    return [
        Arm("stock-small", small, STOCK, tokens=stock_tokens),
        Arm("willneed-small", small, "mapped+willneed+none+none+mlock"),
        Arm("arena-small", small, None),
        Arm("gate-small", small, "arena+gate:1"),
        Arm("arena-large", large, None),
        Arm("stock-free", None, STOCK, warm=True),
        Arm("resident-free", None, None),
        Arm("arena-free", None, "arena", ram_bytes=everything),
        Arm("arena-smallest", smallest, None, tokens=stock_tokens, prompts=("prose",)),
    ]
