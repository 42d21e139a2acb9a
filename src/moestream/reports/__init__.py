"""Reports: records of runs as tables, pictures and one HTML page. Measures nothing."""

from moestream.reports.records import Results, read_results
from moestream.reports.summary import Group, summarize

__all__ = ["Group", "Results", "read_results", "summarize"]
