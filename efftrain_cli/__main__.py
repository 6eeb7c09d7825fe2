"""`python -m efftrain_cli` and the console script `efftrain`."""

from __future__ import annotations


def main() -> None:
    from efftrain_cli.cli.app import run_app

    run_app()


if __name__ == "__main__":
    main()
