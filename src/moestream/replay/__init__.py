"""Replay: recorded routes through the engine's own cache, under other policies and budgets."""

from moestream.replay.belady import gaps_closed
from moestream.replay.curves import (
    Budget,
    Figures,
    Options,
    Point,
    Policy,
    check_same_model,
    curves,
    parse_budgets,
    parse_policies,
    sum_up,
)
from moestream.replay.run import BELADY, Fidelity, Recording, Replayed, check_fidelity, prepare, replay
from moestream.replay.speed import Rates, Speed, expected, parse_rates, saved_rates

__all__ = [
    "BELADY",
    "Budget",
    "Fidelity",
    "Figures",
    "Options",
    "Point",
    "Policy",
    "Rates",
    "Recording",
    "Replayed",
    "Speed",
    "check_fidelity",
    "check_same_model",
    "curves",
    "expected",
    "gaps_closed",
    "parse_budgets",
    "parse_policies",
    "parse_rates",
    "prepare",
    "replay",
    "saved_rates",
    "sum_up",
]
