"""An environment without a home, a working directory or temporary files, and closed streams."""

from __future__ import annotations

import pytest

from tests.conftest import cli, python
from tests.trained_run import make_run

NO_HOME = """
import os, pwd

def unknown(uid):
    raise KeyError(uid)

os.environ.pop("HOME", None)
os.environ.pop("XDG_CACHE_HOME", None)
pwd.getpwuid = unknown
"""


def test_a_user_without_a_home(lab):
    """F66: HOME unset and no such user, as in many containers: exit 2 with the variable to set;
    with it, it works."""
    no_cache = 'os.environ.pop("EFFTRAIN_CACHE", None)'
    process = lab.train("r", "--steps", "1", inject=NO_HOME + no_cache, code=2)
    assert "~/.cache/efftrain: no home directory" in process.errors
    assert "set EFFTRAIN_CACHE" in process.errors
    lab.train("r", "--steps", "1", inject=NO_HOME)


RUN_MAIN = """
import sys
from efftrain_cli.__main__ import main
sys.argv = ["efftrain", "--version"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def test_a_user_without_a_name():
    """F66: PyTorch 2.11 asks for one before it compiles, and raises KeyError without."""
    nameless = """
for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
    os.environ.pop(name, None)
"""
    named = "import getpass\nassert getpass.getuser() == f'uid_{os.getuid()}'"
    python(f"{NO_HOME}{nameless}{RUN_MAIN}{named}")


def test_python_without_docstrings_and_assertions(tmp_path):
    """F66: PYTHONOPTIMIZE=2."""
    source = "import sys; sys.argv[1:] = ['pretrain', 'small', '--plan']\n"
    source += "from efftrain_cli.__main__ import main\nmain()"
    python(source, cwd=tmp_path, PYTHONOPTIMIZE="2")


def test_a_module_of_the_user_s_is_not_imported_in_place_of_python_s(tmp_path, monkeypatch):
    """F66: by no process that a command starts in the folder that holds it."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (tmp_path / "random.py").write_text("raise SystemExit('the user has a random.py')\n")
    child = f"subprocess.run([sys.executable, '-c', 'import random'], cwd={str(tmp_path)!r})"
    python(f"{RUN_MAIN}import subprocess\n{child}.check_returncode()")


def test_a_working_directory_that_was_deleted(lab):
    """F66."""
    inject = "import os\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')\n"
    process = lab.train(recipe="small", inject=inject, code=2)
    assert "the working directory was deleted\n  change to one that exists" in process.errors


def test_no_folder_for_temporary_files(lab):
    """F66: where one is needed."""
    inject = """
import tempfile

def refuse():
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

tempfile.tempdir = None
tempfile._get_default_tempdir = refuse
"""
    lab.train("r", "--steps", "5", inject=inject)
    process = lab.call("bench", "--recipe", lab.recipe(), inject=inject, code=2)
    assert "No usable temporary directory found in ['/tmp']: set TMPDIR" in process.errors


def test_a_prompt_that_is_longer_than_the_context(tmp_path):
    """F76: 64 positions."""
    make_run(tmp_path)
    done = cli("sample random --max-tokens 1 --prompt", "the " * 100)
    assert done.stderr.endswith("tokens; the model reads the last 64\n")


@pytest.mark.parametrize("closed", ["1", "0 1 2"])
def test_closed_standard_streams(tmp_path, closed):
    """F76: `efftrain runs list >&-` says nothing, and no file of a run takes the stream's
    number."""
    code = f"""
import os, sys
for number in {[int(n) for n in closed.split()]}:
    os.close(number)
sys.argv = ["efftrain", "runs", "list"]
sys.stdout = sys.stdout if {"1" not in closed} else None
sys.stderr = sys.stderr if {"2" not in closed} else None
from efftrain_cli.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
free = os.open(os.devnull, os.O_RDONLY)
os._exit(0 if free > 2 else 9)
"""
    python(code, EFFTRAIN_RUNS=str(tmp_path))
