"""Optimizers over named parameters."""
