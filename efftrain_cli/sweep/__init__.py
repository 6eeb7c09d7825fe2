"""`efftrain sweep`: every recipe with every seed and setting, then the comparison."""
