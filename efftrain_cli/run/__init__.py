"""Rows, events and checkpoints of training in, a run's folder out; and back: the folder in, its
rows out."""
