"""The command line: Typer lives here and nowhere else. One module per command; heavy imports inside
the commands."""
