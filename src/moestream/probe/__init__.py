"""This box's ceilings for a model: its disk, its page cache, its memory and its processors, measured one by one.

``run_probe`` measures, ``save_probe`` keeps, ``saved_probe`` finds again what still
holds.
"""

from __future__ import annotations

from moestream.probe.saved import fuller_probe, reader_of, save_probe, saved_probe, saved_probe_of

__all__ = ["fuller_probe", "reader_of", "save_probe", "saved_probe", "saved_probe_of"]
