"""Replay: recorded routes through the engine's own cache, under other policies and budgets."""

from moestream.replay.run import BELADY, Fidelity, Recording, Replayed, check_fidelity, prepare, replay

__all__ = ["BELADY", "Fidelity", "Recording", "Replayed", "check_fidelity", "prepare", "replay"]
