"""Recipes, seeds and settings in; trained runs out, each by a process of its own."""
