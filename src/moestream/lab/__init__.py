"""The lab: which mechanism does the work on this box, measured on the user's own file under a real cap.

``worker`` and ``stock`` are arms, each a fresh process that writes one document; ``runs`` prepares, cages and
records them; ``bench`` asks the questions and ``bench_table`` answers them; ``demo`` is the short version.
"""
