"""Side-by-side comparison of runs: which method reaches a loss with fewer tokens, FLOPs and
seconds, and is it real?

arms (runs of one recipe and setting) -> pairs of equal seeds -> checks (may they be compared?) ->
judge (an estimate of every measure, a verdict of each claim) -> show, figures, tables.
"""
