"""Sections of a recipe and a step's progress in; how the step is trained out. One file a method,
with citation, idea and equations."""
