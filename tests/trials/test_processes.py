"""Processes that train runs: forks of a warm process equal new interpreters, whatever ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from efftrain_cli.trials.processes import Child, ForkServer, Launch, launch_cold
from tests.conftest import REPOSITORY, python, sets, typed
from tests.fake_runs import read_jsonl, without_times
from tests.launch import processes_in, start_efftrain, wait_until
from tests.trials.stubs import write_recipes
from tests.wandb_files import read_history

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")

LONG = "train.tokens=1000000"


class Place:
    """A folder of recipes and runs, and a server that trains them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = ForkServer(folder / "server.log")

    def start(
        self, name: str, *settings: str, launch: Launch | None = None, line: str = "", **env: str
    ) -> Child:
        words = typed("pretrain", str(self.folder / "plain.toml"), "--name", name, "--no-probe")
        words += [*typed(line), *sets(*settings)]
        environment = {
            "EFFTRAIN_RUNS": str(self.folder / "runs"),
            "EFFTRAIN_CACHE": str(self.folder / "cache"),
            "PYTHONPATH": str(REPOSITORY),
            **env,
        }
        os.chdir(self.folder)  # until the test's end
        return (launch or self.server.launch)(words, environment, self.log(name))

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def rows(self, name: str) -> list[dict]:
        path = self.folder / "runs" / name / "metrics.jsonl"
        return [without_times(row) for row in read_jsonl(path)] if path.exists() else []

    def weights(self, name: str) -> bytes:
        checkpoints = self.folder / "runs" / name / "checkpoints"
        return max(checkpoints.glob("*/model.safetensors")).read_bytes()

    def process(self, name: str) -> int:
        """The process that trains a run, once it does."""
        wait_until(lambda: self.rows(name), timeout=60)
        return int(re.findall(r"\d+", (self.folder / "runs" / name / "lock").read_text())[0])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("warm")
    write_recipes(folder)
    return Place(folder)


def test_forks_of_a_killed_server_save(place):
    """The next process gets a new server, which the tests below use."""
    child = place.start("orphan", LONG)
    place.process("orphan")
    place.server.process.kill()
    assert child.wait() == -signal.SIGKILL
    assert "stopped by SIGTERM" in place.log("orphan").read_text() and place.weights("orphan")
    assert place.start("after", line="--plan").wait() == 0
    assert place.server.process.poll() is None


def test_a_fork_equals_a_new_process_to_the_bit(place):
    """Rows, weights and origin, with two threads where the server has one; the variables are those
    that were read at import."""
    rows, weights, origins, read = [], [], [], []
    for name, launch in (("forked", None), ("new", launch_cold)):
        assert place.start(name, launch=launch, OMP_NUM_THREADS="2").wait() == 0
        rows.append(place.rows(name))
        weights.append(place.weights(name))
        origin = json.loads((place.folder / "runs" / name / "origin.json").read_text())
        read.append(origin.pop("variables"))
        origins.append({**origin, "command": "", "started": ""})
    assert read[0]["OPENBLAS_NUM_THREADS"] == "1", "the server's"
    assert read[1]["OMP_NUM_THREADS"] == "2"
    for forked, new in (rows, weights, origins):
        assert forked == new != []


def test_what_ends_a_fork_is_its_exit_code(place):
    """A signal n is -n, as of a new process; 75 saved, 4 diverged, 2 usage, 1 a defect."""
    killed = place.start("killed", LONG)
    os.kill(place.process("killed"), signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    stopped = place.start("stopped", LONG)
    place.process("stopped")
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait() == 75
    early = place.start("early", LONG)
    early.send_signal(signal.SIGTERM)
    assert early.wait() in (75, -signal.SIGTERM)
    settings = ["optim.lr=1e6", "optim.grad_clip=0", LONG]
    assert place.start("diverged", *settings).wait() == 4
    assert place.start("usage", "no.key=1").wait() == 2
    assert place.start("defect", EFFTRAIN_PROBE="none").wait() == 1
    assert "Traceback" in place.log("defect").read_text()
    assert place.server.log.read_text() == ""


def test_loggers_of_a_fork_end_with_it(place):
    """wandb's files are whole, and none of its processes is left."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    child = place.start("logged", line="--wandb offline --tensorboard")
    assert child.wait() == 0, place.log("logged").read_text()
    run = place.folder / "runs" / "logged"
    assert [row["_step"] for row in read_history(run / "wandb")] == [*range(11)]
    assert list(run.rglob("events.out.tfevents*"))
    children = f"/proc/{place.server.process.pid}/task/{place.server.process.pid}/children"
    assert Path(children).read_text().split() == []


PARENT = """
import os, signal
from pathlib import Path
from efftrain_cli.trials.processes import launch_cold
words = ["race", "a", "b", "--command", "touch begun; exec sleep 6{seed}; {arm}"]
child = launch_cold(words, {}, Path("log"))
while not Path("begun").exists():
    assert child.poll() is None, Path("log").read_text()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_parent_leaves_no_process(tmp_path):
    """F78: a new interpreter that it started ends, and the program that this had started."""
    python(PARENT, cwd=tmp_path, code=-signal.SIGKILL)
    wait_until(lambda: not processes_in(tmp_path), timeout=60)
    assert "stopped by SIGTERM" in (tmp_path / "log").read_text()


HOOK = """
import os, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            with open(os.environ["IMPORTS"], "a") as file:
                file.write(f"{os.getpid()}\\n")
sys.meta_path.insert(0, Finder)
"""
THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


def test_a_sweep_imports_torch_once_and_killed_leaves_no_process(tmp_path):
    """F78: its two runs are saved."""
    write_recipes(tmp_path)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    process = start_efftrain(
        tmp_path,
        *typed("sweep plain.toml warm.toml --seeds 0 --jobs 2 --device cpu"),
        *sets(LONG),
        PYTHONPATH=f"{REPOSITORY}:{tmp_path / 'hook'}",
        IMPORTS=str(tmp_path / "imports"),
    )
    runs = [tmp_path / "runs" / f"{arm}-tokens1000000-seed0" for arm in ("plain", "warm")]
    rows = [run / "metrics.jsonl" for run in runs]
    wait_until(lambda: all(path.exists() and path.read_text() for path in rows), process)
    process.kill()
    wait_until(lambda: not processes_in(tmp_path), timeout=60)
    assert len((tmp_path / "imports").read_text().split()) == 1
    assert all(list((run / "checkpoints").iterdir()) for run in runs)


def test_what_cannot_be_forked_is_started_anew(place):
    """A server with a second thread cannot fork, and some variables exceed a packet."""
    hook = place.folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(THREAD)
    log = place.folder / "threads.log"
    launch = ForkServer(log).launch
    child = place.start("anew", launch=launch, line="--plan", PYTHONPATH=f"{REPOSITORY}:{hook}")
    assert child.wait() == 0, place.log("anew").read_text()
    assert "not safe to fork: 2 threads" in log.read_text()
    large = {f"LARGE{number}": "x" * 100_000 for number in range(3)}
    assert place.start("plan", line="--plan", **large).wait() == 0


@pytest.mark.slow
def test_the_server_s_memory_stays_flat(place):
    """100 forks, and no more open files."""
    sizes = []
    for _ in range(100):
        assert place.start("plan", line="--plan").wait() == 0
        process = Path("/proc") / str(place.server.process.pid)
        size = re.findall(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())[0]
        sizes.append((int(size), len(list((process / "fd").iterdir()))))
    # The pipe of a fork is closed just after its code is written.
    assert sizes[-1][0] - sizes[0][0] < 2048 and sizes[-1][1] <= sizes[0][1] + 1
