"""Side-by-side comparison of runs: which method reaches a loss with fewer tokens, FLOPs and
seconds, and is it real?

reading (a run directory reduced to numbers) -> groups (runs of one recipe over seeds) ->
comparability (may they be compared?) -> comparison (which questions, against which baseline) ->
engine (a verdict each, for studies too) -> tables, the frame, plots, report.
"""
