"""`python -m efftrain_cli` and the console script `efftrain`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    _open_streams()
    from efftrain_cli.foundation.signals import STOPPABLE, end_undisturbed, stop_before_training

    trains = bool(sys.argv[1:2]) and sys.argv[1] in STOPPABLE
    try:
        if trains:
            stop_before_training()
        _choose_allocator()
        _name_user()
        _guard_imports()
        from efftrain_cli.cli.app import run_app

        run_app()
    except KeyboardInterrupt:  # before anything was begun, or in a command with nothing to save
        raise SystemExit(130) from None
    finally:
        if trains:
            end_undisturbed()


def _open_streams() -> None:
    """Open a standard stream that was closed (`>&-`): the next file would take its number, and be
    printed into."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _choose_allocator() -> None:
    """Have PyTorch extend its CUDA segments rather than ask for new ones; read when PyTorch is
    loaded. Where lengths change, blocks of each size would otherwise be left behind: the logits of
    a warmup's 127 lengths alone add up to 419 GB."""
    # The second and third name are older ones, which PyTorch still reads; a choice of the user's
    # own stands.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _name_user() -> None:
    """Set USER for a user id without a name, as containers have: PyTorch's compiler names its
    folder after the user."""
    import getpass

    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid_{os.getuid()}"


def _guard_imports() -> None:
    """Keep the working folder off the import path of every process that this one starts, those of
    PyTorch and wandb too: a random.py of the user's there would be imported as Python's."""
    package_parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Of `python -m` in the folder that holds the package, children would not find it.
    if sys.flags.safe_path or sys.path[:1] != [package_parent]:
        os.environ.setdefault("PYTHONSAFEPATH", "1")


if __name__ == "__main__":
    main()
