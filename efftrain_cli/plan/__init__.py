"""A recipe and progress in; steps with their costs, times and memory out. No torch."""
