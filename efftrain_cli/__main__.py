"""`python -m efftrain_cli` and the console script `efftrain`."""

from __future__ import annotations


def main() -> None:
    try:
        from efftrain_cli.cli.app import run_app

        run_app()
    except KeyboardInterrupt:  # before anything was begun, or in a command with nothing to save
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
