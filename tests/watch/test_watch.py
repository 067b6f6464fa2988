"""Planted tests that leave their folders: each is named, and the session fails."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.watch.isolation import FOLDER, SITE

CONFTEST = "from tests.conftest import in_its_folder, pytest_sessionfinish\n"
PLANTED = f"""
import contextlib, os, pathlib, shutil, subprocess, sys
HOME = pathlib.Path({{home!r}})
def test_reads():
    os.scandir(HOME).close()
    with contextlib.suppress(FileNotFoundError):
        open({str(REPOSITORY / "runs" / "plan.json")!r})
def test_child():
    subprocess.run([sys.executable, "-c", "open('note', 'w')"], cwd=HOME, check=True)
def test_renames(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "a").rename(HOME / "a")
def test_unseen():
    subprocess.run(["touch", HOME / ".cache" / "duet" / "x"], check=True)
def test_in_its_folder(tmp_path):
    (tmp_path / "runs").mkdir()
    shutil.rmtree(tmp_path / "runs")
    (pathlib.Path.home() / "mine").touch()
    assert "DUET_WEIGHTS" not in os.environ
"""


def test_a_test_that_leaves_its_folder_fails_and_so_does_the_session(tmp_path: Path) -> None:
    home = tmp_path / "home é"
    (home / ".cache" / "duet").mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_planted.py").write_text(PLANTED.format(home=str(home)))
    variables = {"HOME": str(home), "DUET_WEIGHTS": "x", "PYTHONPATH": f"{SITE}:{REPOSITORY}"}
    environment = {name: value for name, value in os.environ.items() if name != FOLDER} | variables
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "5 passed, 3 errors" in done.stdout.splitlines()[-1]
    for line in (
        f"test_planted.py::test_reads (call) reads {home} in ",
        f"test_planted.py::test_reads (call) reads {REPOSITORY / 'runs' / 'plan.json'} in ",
        f"test_planted.py::test_child (call) writes {home / 'note'} in -c",
        f"test_planted.py::test_renames (call) writes {home / 'a'} in ",
        f"{home / '.cache' / 'duet' / 'x'}: was written or removed while the tests ran",
    ):
        assert line in done.stdout
