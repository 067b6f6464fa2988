"""Mutated files end in a result or in a line, and the fuzzers notice where they do not.

A few cases of each kind, in `make test-all` more. The seeds are fixed; `python -m tests.fuzz` tries others.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.fuzz.kinds import KINDS


@pytest.fixture(scope="module", params=[3, pytest.param(20, marks=pytest.mark.slow)])  # seeds of each kind
def found(tmp_path_factory, request):
    """What `python -m tests.fuzz` wrote: the cases that were tried and those that broke the promise."""
    result = tmp_path_factory.mktemp("fuzz") / "result.json"
    command = ["-m", "tests.fuzz", "--minutes", "4", "--first", "0", "--count", str(request.param)]
    done = subprocess.run(
        [sys.executable, *command, "--json", str(result)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.is_file(), done.stderr[-3000:]
    print(done.stdout)
    return json.loads(result.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_end_in_a_result_or_a_line(found, kind):
    assert found["cases"][kind] > 0
    wrong = [case for case in found["findings"] if case["kind"] == kind]
    assert [f"python -m tests.fuzz {kind} {c['seed']}: {c['faults']}, kept in {c['kept']}" for c in wrong] == []


CASES = """
import json, sys, types
from pathlib import Path
from duetgan.commands import COMMANDS
from tests.fuzz import sandbox
sandbox.SECONDS, sandbox.MEMORY = 1, 64 << 20
COMMANDS["case"] = ("case", "")
for number, source in enumerate(json.loads(sys.argv[2])):
    sandbox.WALL = 2 if "sleep" in source else 30
    module = sys.modules["case"] = types.ModuleType("case")
    exec("import os, time\\nfrom duetgan.utils.errors import UserError\\n" + source, module.__dict__)
    folder = Path(sys.argv[1], str(number))
    folder.mkdir()
    argv, outcome = sandbox.run(lambda: Path("input").write_text("x") and ["case.py", "a"], folder)
    print(json.dumps([argv, outcome.code, outcome.faults()]))
"""
BREAKING = [  # source of a command, its exit code, what is noticed
    ("def main(argv): return len(argv) - 1", 0, None),
    ("def main(argv): raise UserError(argv[0])", 2, None),
    ("def main(argv): open('left', 'w').close(); raise UserError('x')", 2, "left behind: left"),
    ("def main(argv): bytearray(8 << 30)", 1, "traceback: MemoryError"),
    ("def main(argv): time.sleep(60)", -9, "2 s"),
    ("def main(argv):\n while True: pass", -24, "exit code -24"),
]


def test_a_command_that_breaks_the_promise_is_noticed(tmp_path):
    command = [sys.executable, "-c", CASES, str(tmp_path), json.dumps([source for source, *_ in BREAKING])]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for (source, code, told), line in zip(BREAKING, done.stdout.splitlines(), strict=True):
        argv, ended, faults = json.loads(line)
        assert (argv, ended) == (["case.py", "a"], code), (source, faults)
        assert (faults == []) if told is None else any(told in fault for fault in faults), (source, faults)
