"""What the benchmark runs: prompts of three kinds, and the arms each of them is given to. Values only."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Arm:
    """One row of the table. ``cap_bytes``: the cgroup's limit and what the engine is told, None for no cap.
    ``mechanism``: its text, ``stock`` for plain llama.cpp, None for the default. ``ram_bytes``: what the engine
    is told without a cgroup. ``warm``: the file is in the page cache before. ``tokens``: its own number."""

    key: str
    cap_bytes: int | None
    mechanism: str | None
    ram_bytes: int | None = None
    warm: bool = False
    tokens: int | None = None
    prompts: tuple[str, ...] = tuple(PROMPTS)

    @property
    def is_stock(self) -> bool:
        return self.mechanism == STOCK

    @property
    def needs_cage(self) -> bool:
        """The kernel decides what these keep, so that only its own limit is a cap to them."""
        return self.cap_bytes is not None and (self.is_stock or (self.mechanism or "").startswith("mapped"))

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
