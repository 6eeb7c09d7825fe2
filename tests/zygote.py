"""A process that has imported everything and forks one `efftrain` per request: real processes to
kill, without seconds of imports for each. Requests and answers are lines of JSON on stdin and
stdout."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback


def child(request: dict) -> None:
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    err = os.open(request["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.setsid()
    # A shell starts what runs in its background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["efftrain", *request["args"]]
    code = 0
    try:
        exec(compile(request["inject"], "inject", "exec"), {})
        from efftrain_cli.__main__ import main as efftrain

        efftrain()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def wait(pid: int, timeout: float) -> int | None:
    """Exit code, negative for a signal; None where it runs on."""
    end = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.005)


def main() -> None:
    import pandas  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch
    import typer

    from efftrain_cli.cli.app import app
    from efftrain_cli.cli.commands import register

    register()
    # Typer reads the signatures of all commands: 60 ms of each child.
    command = typer.main.get_command(app)
    typer.main.get_command = lambda _: command
    import efftrain_cli.pretrain
    import efftrain_cli.run_show  # noqa: F401  what verifies, lists and compares runs, and scipy

    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # as in conftest
    gc.collect()
    gc.freeze()  # what is here is never collected in the children, so their memory stays shared
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "wait":
            answer = {"code": wait(request["pid"], request["timeout"])}
        elif request["do"] == "import":
            importlib.import_module(request["module"])
            answer = {}
        else:
            pid = os.fork()
            if pid == 0:
                child(request)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
