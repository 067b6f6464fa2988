"""What the scripts import before their options are known to be right: nothing that takes seconds."""

import os
import subprocess
import sys
import tempfile

import pytest

import duetgan
from duetgan.commands import COMMANDS as TABLE
from tests.conftest import REPOSITORY

SCRIPTS = ["train.py", "evaluate.py", "generate.py", "predict.py", "export.py"]
EXTRAS = [name for name in ("influence", "study") if name in TABLE]
COMMANDS = [*EXTRAS, "data.pack", "data.inspect", "data.duplicates"]
NOWHERE = ["--checkpoint", "nowhere/nothing-here"]
OUT = ["--out", os.path.join(tempfile.gettempdir(), "x.png")]
MISSING = {
    "evaluate.py": NOWHERE,
    "predict.py": [*NOWHERE, "x.png"],
    "generate.py": ["grid", *NOWHERE, *OUT],
    "export.py": [*NOWHERE, *OUT, "--format", "onnx"],
    "influence": [*NOWHERE, *OUT, "--data", "x.lmdb", "--mislabelled"],
    "train.py": ["--config", "configs/nothing-here.yaml"],
}
if "influence" not in TABLE:
    del MISSING["influence"]
WATCHED = """
import runpy, sys
sys.argv = sys.argv[1:]
name = sys.argv[0]
try:
    if "." not in name:  # a command of `duet`
        sys.argv.insert(0, "duet")
        name = "duetgan.__main__"
    (runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
except SystemExit as end:
    code = end.code
heavy = {"torch", "torchvision", "matplotlib", "scipy"} & {name.partition(".")[0] for name in sys.modules}
print(code, *heavy, file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def default_runs(tmp_path, monkeypatch):
    """Give a run without --run-dir a folder of the test's own."""
    monkeypatch.setenv("DUET_RUNS", str(tmp_path / "runs"))


def started(script: str, *options: str, code: str = WATCHED) -> tuple[str, str]:
    """What it says on stderr, and the exit code with the heavy packages that were imported."""
    command = [sys.executable, "-c", code, script, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    *said, last = done.stderr.splitlines()
    return "\n".join(said), last


@pytest.mark.parametrize("script", SCRIPTS + COMMANDS)
def test_wrong_options_wait_for_no_import(script):
    """U22: 7 to 19 s on a busy machine."""
    said, last = started(script, "--no-such-option")
    assert said.startswith("error: ")
    assert last == "2"


@pytest.mark.parametrize("script", ["train.py", "data.pack", "duetgan.__main__"])
def test_version(script):
    """J24, and no torch is imported for it."""
    command = [sys.executable, "-c", WATCHED, script, "--version"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"duet {duetgan.__version__}\n", "0\n")


@pytest.mark.parametrize("command", [["train.py", "--help"], ["-m", "data.pack", "--help"]])
def test_a_python_without_the_packages_is_told_which_has_them(command):
    """J26: a traceback. -S: no site-packages."""
    done = subprocess.run([sys.executable, "-S", *command], cwd=REPOSITORY, capture_output=True, text=True)
    remedy = "needs the packages of this project: `make setup`, then .venv/bin/python ..."
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: Duet {remedy}\n")


@pytest.mark.parametrize("script", MISSING)
def test_a_missing_file_waits_for_no_import(script):
    said, last = started(script, *MISSING[script])
    assert said.count("\n") == 0
    assert "nothing-here" in said
    assert last == "2"


@pytest.mark.parametrize("script", ["train.py", "generate.py"])
def test_an_interruption_while_torch_is_imported_is_one_line(script, tmp_path):
    there = tmp_path / "there.pt"
    there.write_text("task: gan\n")
    interrupted = f"""
import sys
class Interrupted:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted)
{WATCHED}"""
    options = [str(there) if "nothing-here" in option else option for option in MISSING[script]]
    assert started(script, *options, code=interrupted) == ("stopped: interrupted from the keyboard", "130")
