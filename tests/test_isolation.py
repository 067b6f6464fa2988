"""A session of tests has a home of its own, and fails where a test has written into the user's caches."""

import os
import subprocess
import sys

from tests.conftest import REPOSITORY
from tests.isolation import FOLDER

CONFTEST = "from tests.conftest import pytest_sessionfinish\n"
PLANTED = """
import os, pathlib, subprocess
HOME = pathlib.Path({home!r})
def test_writes_into_a_cache():
    subprocess.run(["touch", HOME / ".cache" / "duet" / "x"], check=True)
def test_in_its_folder():
    assert pathlib.Path.home() != HOME
    (pathlib.Path.home() / "mine").touch()
    assert "DUET_WEIGHTS" not in os.environ
"""


def test_a_session_that_wrote_into_the_users_caches_fails(tmp_path):
    home = tmp_path / "home é"
    (home / ".cache" / "duet").mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_planted.py").write_text(PLANTED.format(home=str(home)))
    variables = {"HOME": str(home), "DUET_WEIGHTS": "x", "PYTHONPATH": str(REPOSITORY)}
    environment = {name: value for name, value in os.environ.items() if name != FOLDER} | variables
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "2 passed" in done.stdout.splitlines()[-1]
    assert f"{home / '.cache' / 'duet' / 'x'}: was written or removed while the tests ran" in done.stdout
