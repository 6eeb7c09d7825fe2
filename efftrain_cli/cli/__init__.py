"""Words of a command line in; the answer on standard output, messages and an exit code out. Typer
lives here and nowhere else."""
