"""Runs in; differences with intervals, and verdicts, out.

arms (runs of one recipe and setting) -> pairs of equal seeds -> checks (may they be compared?) ->
judge (an estimate of every measure, a verdict of each claim) -> show, figures, tables.
"""
