"""One file per method, each the paper's: citation, idea, equations, and how it attaches to a
step."""
