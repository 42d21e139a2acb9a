"""Traces: what the router chose and what every slab's read took, step by step, in memory and in a Parquet file."""

from moestream.trace.trace import EVENTS, Routes, Slabs, Trace, TraceBuilder, no_routes

__all__ = ["EVENTS", "Routes", "Slabs", "Trace", "TraceBuilder", "no_routes"]
