"""`pip install .`: the package and the command `duet`, from a folder whose own modules are called as ours (U5)."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import duetgan
from duetgan.__main__ import usage
from duetgan.commands import COMMANDS
from duetgan.commands.planning.plan import GAN, LAST, PAIRS, SCRATCH, START, STARTED, TUNED
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from duetgan.utils.config.recipes import recipe_file, shipped_file
from tests.faults.conftest import run_command
from tests.inference.conftest import gan_run, styled
from tests.metrics.conftest import classifier_run
from tests.metrics.conftest import pack as pack_images
from tests.test_project import ROOT, project_files

OURS = ("commands", "data", "extras", "inference", "metrics", "models", "reporting", "training", "utils")


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
INSTALL = ["install", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The checkout as links: an installation leaves files beside its source."""
    copy = tmp_path_factory.mktemp("copy")
    for path in project_files():
        name = path.relative_to(ROOT)
        if name.parts[0] not in ("tests", "docs", "benchmarks"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).symlink_to(path)
    return copy


@pytest.fixture(scope="module")
def site(copy, tmp_path_factory):
    """A folder in which the package is installed."""
    site = tmp_path_factory.mktemp("site")
    command = [*PIP, *INSTALL, "--target", str(site), str(copy)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def mine(tmp_path):
    """A user's folder: modules of our names, which end whatever imports them."""
    for name in OURS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user')\n")
    return tmp_path


def python(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the user's folder, with the installed package beside the packages of the tests."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def duet(site: Path, folder: Path, *arguments: str) -> str:
    """What `duet arguments` prints; it must succeed."""
    done = python(site, folder, str(site / "bin" / "duet"), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_name_is_installed_and_all_that_the_program_needs_below_it(site):
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"bin", "duetgan"}
    files = [path.relative_to(ROOT) for path in project_files()]
    files = [name for name in files if name.parts[0] == "duetgan"]
    assert len(files) > 200
    assert [name for name in files if not (site / name).is_file()] == []
    recipes = (GAN, PAIRS, STARTED, SCRATCH, TUNED, LAST, START)
    assert all((site / "duetgan" / file).is_file() for file in recipes)


def test_make_setup_installs_the_checkout_in_editable_mode(copy, mine, tmp_path, monkeypatch):
    """U4: an environment whose packages are there; `make setup` adds `duet` and `duetgan` without a network."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv", with_pip=False)
    interpreter = str(tmp_path / "venv/bin/python")
    (packages,) = (tmp_path / "venv/lib").glob("*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "venv" / ".installed").touch()
    offline = os.environ | {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}
    subprocess.run(["make", "setup", f"VENV={tmp_path / 'venv'}"], cwd=copy, check=True, env=offline)
    code = "import duetgan; from duetgan.data import Dataset; print(duetgan.__file__)"
    done = subprocess.run([interpreter, "-c", code], cwd=mine, capture_output=True, text=True, check=False)
    assert done.stdout == f"{copy / 'duetgan' / '__init__.py'}\n", done.stderr
    command = [tmp_path / "venv/bin/duet", "train", "--list"]
    assert "gan_64_cpu" in subprocess.run(command, cwd=mine, capture_output=True, text=True, check=True).stdout


def test_the_command_runs_in_a_folder_with_modules_of_our_names(site, mine):
    assert duet(site, mine, "--help") == usage() + "\n"
    assert "gan_64_cpu" in duet(site, mine, "train", "--list")
    duet(site, mine, "pack", "sample", "sample.lmdb", "--split", "test", "--size", "32", "--workers", "2")
    options = ["--data.path", "sample.lmdb", "--data.val-path", "null", "--precision", "fp32", "--dry-run"]
    assert "dry run" in duet(site, mine, "train", "--config", "gan_32_cpu", *options)


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """What the examples of docs/library.md name: runs, photos, a folder of classes and a packed file."""
    folder = tmp_path_factory.mktemp("things")
    classifier_run(folder / "runs" / "classifier")
    gan_run(folder / "runs" / "gan", styled())
    generator = np.random.default_rng(0)
    for name in ("photos/a.png", "photos/b.png", "folder/x/a.png", "folder/y/b.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / name)
    pack(open_source(str(folder / "folder")), folder / "photos.lmdb", size=16)
    pack_images(folder / "grey.lmdb")
    for name in ("samples", "test"):
        (folder / f"{name}.lmdb").symlink_to("grey.lmdb")
    return folder


EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL | re.MULTILINE)


PROGRAM = f"""
import json, sys
import duetgan
assert "torch" not in sys.modules
import torch
classifier, generator = duetgan.load_classifier("runs/classifier"), duetgan.load_generator("runs/gan")
assert not set({OURS!r}) & set(sys.modules)
print(classifier(torch.zeros(2, 1, 8, 8)).shape, generator.sample(2).images.shape)
for number, text in enumerate(json.loads(sys.argv[1])):
    print("example")
    exec(compile(text, f"example {{number}}", "exec"), {{"__name__": "__main__"}})
"""


@pytest.mark.parametrize("where", [pytest.param("checkout", marks=pytest.mark.slow), "wheel"])
def test_the_library_and_the_examples_of_its_page_leave_the_users_modules_alone(where, request, things, mine):
    for name in ("runs", "photos", "folder", "samples.lmdb", "test.lmdb"):
        (mine / name).symlink_to(things / name)
    place = ROOT if where == "checkout" else request.getfixturevalue("site")
    done = python(place, mine, "-W", "error", "-P", "-c", PROGRAM, json.dumps(EXAMPLES))
    assert done.returncode == 0, done.stderr
    shapes, *printed = done.stdout.split("example\n")
    assert shapes == "torch.Size([2, 3]) torch.Size([2, 1, 8, 8])\n"
    assert len(printed) == len(EXAMPLES) > 0
    assert all(printed)


EXTENSION = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```\n\n```bash\nduet (.*?)^```", re.DOTALL | re.MULTILINE)
EXTENSIONS = EXTENSION.findall((ROOT / "docs" / "extending.md").read_text())
TINY = "--steps 2 --batch-size 4 --precision fp32 --log.samples-every 0"


@pytest.mark.parametrize(("file", "text", "command"), EXTENSIONS, ids=[file for file, _, _ in EXTENSIONS])
def test_the_examples_of_own_code_run(file, text, command, things, tmp_path):
    for name in ("runs", "photos.lmdb", "grey.lmdb"):
        (tmp_path / name).symlink_to(things / name)
    (tmp_path / file).write_text(text)
    arguments = shlex.split(command.replace("\\\n", ""))
    if arguments[0] == "train":
        arguments += shlex.split(TINY)
        gan = "classifier_64_cpu" not in arguments
        arguments += ["--run-dir=run", *(["--evaluation.n=4"] if gan else ["--model.input-size=null"])]
    if arguments[0] == "evaluate":
        arguments += ["--data", "grey.lmdb", "--out", "eval"]
    run_command(*arguments, folder=tmp_path).success()
    if arguments[0] == "evaluate":
        assert json.loads((tmp_path / "eval" / "metrics.json").read_text())["brightness"]


def test_every_command_has_a_module_and_the_version_is_declared():
    for module, _ in COMMANDS.values():
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert declared["project"]["name"] == "duetgan"
    assert declared["project"]["version"] == duetgan.__version__


@pytest.mark.parametrize("name", ["gan_64", "gan_64.yaml", "configs/gan_64.yaml"])
def test_a_recipe_is_found_from_any_folder_unless_there_is_one_of_that_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipe_file(name) == str(ROOT / "duetgan" / "configs" / "gan_64.yaml")
    assert recipe_file("other/gan_64.yaml") == "other/gan_64.yaml"
    assert recipe_file("nothing.yaml") == "nothing.yaml"
    assert recipe_file("nothing") == str(ROOT / "duetgan" / "configs" / "nothing.yaml")  # whose refusal names --list
    assert shipped_file("configs/gan_64.yaml") == str(ROOT / "duetgan" / "configs" / "gan_64.yaml")
    assert shipped_file("gan_64.yaml") == "gan_64.yaml"
    (tmp_path / "configs").mkdir()
    for own in (tmp_path / "gan_64", tmp_path / "gan_64.yaml", tmp_path / "configs/gan_64.yaml"):
        own.touch()
    assert recipe_file(name) == name
    assert shipped_file("configs/gan_64.yaml") == "configs/gan_64.yaml"
