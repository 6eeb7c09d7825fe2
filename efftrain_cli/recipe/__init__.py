"""TOML and overrides in, one checked `Recipe` out. No torch."""
