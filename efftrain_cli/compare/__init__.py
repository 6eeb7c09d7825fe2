"""Runs in; differences with intervals, and verdicts, out.

sources (runs) -> arms (runs of one recipe and setting) -> pairs of equal seeds -> checks (may they
be compared?) -> judge (an estimate of every measure, a verdict of each claim) -> show, figures.
"""
