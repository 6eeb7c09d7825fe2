"""efftrain: train GPT models with training-efficiency methods and compare them honestly."""

__version__ = "0.1.0"
