"""Recipes: their sections, the rules between them, and their files. No torch."""
