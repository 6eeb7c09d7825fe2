"""Side-by-side comparison of runs: which method reaches a loss with fewer tokens, FLOPs and seconds, and is it real?

reading (a run directory reduced to numbers) -> groups (runs of one recipe over seeds) -> fairness (may they be
compared?) -> comparison (every number, with statistics) -> tables, plots, report.
"""
