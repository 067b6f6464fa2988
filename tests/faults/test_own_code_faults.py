"""Code of one's own (`--import`): what is wrong with it is told, a run keeps it, and no checkpoint imports anything."""

import hashlib
from pathlib import Path

import pytest
import torch

from duetgan.utils.checkpoint import resolve
from duetgan.utils.config import plugins
from duetgan.utils.config.yaml_files import read_yaml
from tests.faults.conftest import Command

OWN = """
from pathlib import Path
from dataclasses import replace
from duetgan.models.registry import BACKBONES
from duetgan.training.optim.config import DECAYS
Path(__file__).with_name("imported").touch()
resnet = BACKBONES["resnet18"]
BACKBONES["mine"] = replace(resnet, names=("mine",), network=lambda *_: resnet.build("resnet18"))
DECAYS["mine"] = lambda progress: 1 - progress
"""
NAMES = ["--model.name", "mine", "--optimizer.schedule", "mine"]
QUIET = ["--evaluation.every", "0", "--log.samples-every", "0"]


def test_a_run_keeps_what_it_imports_and_a_checkpoint_imports_nothing(
    command: Command, recipe: list[str], tmp_path: Path
) -> None:
    own, run, mark = tmp_path / "own.py", tmp_path / "run", tmp_path / "imported"
    own.write_text(OWN)
    imports = ["--import", str(own)]
    command(*recipe, *imports, *NAMES, *QUIET, "--max-steps", "1").success()
    digest = {str(own): hashlib.sha256(OWN.encode()).hexdigest()}
    assert read_yaml(run / "config.yaml")["imports"] == digest
    assert torch.load(resolve(run), weights_only=True)["config"]["imports"] == digest
    mark.unlink()

    made = f"it was made with --import {own}: add that"
    command(*recipe, *NAMES, *QUIET).refusal("is unknown", made)
    photo = tmp_path / "photo.ppm"
    photo.write_bytes(b"P6 16 16 255\n" + bytes(768))
    predict = ["predict.py", "--checkpoint", str(run), str(photo)]
    command(*predict).refusal("model 'mine' is unknown", made)
    assert not mark.exists()
    command(*predict, *imports).success()
    assert mark.exists()

    own.write_text(f"{OWN}# changed\n")
    told = command(*recipe, *imports, *NAMES, *QUIET, "--max-steps", "2").success().err
    assert f"config changed since the last start: imports.{own} was '{digest[str(own)]}'" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read (No such file or directory); give a .py file, or the name of an installed module"),
        ("x = (", "SyntaxError"),
        ("\n1 / 0", "ZeroDivisionError: division by zero ("),
        ("\n1 / 0", "own.py, line 2)"),
        ("from duetgan import UserError\nraise UserError('no such thing')", "own.py: no such thing"),
    ],
)
def test_code_that_cannot_be_imported_is_refused(
    command: Command, recipe: list[str], tmp_path: Path, text: str | None, told: str
) -> None:
    own = tmp_path / "own.py"
    if text is not None:
        own.write_text(text)
    command(*recipe, "--import", own, "--dry-run").refusal(f"--import {own}: ", told)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--import", "no_such_module"], "--import no_such_module: ModuleNotFoundError"),
        (["--optimizer.schedule", "cosin"], "schedule 'cosin' is unknown (did you mean 'cosine'?)"),
        (["--augment.own", "[x]"], "augment: own: augmentation 'x' is unknown; there are none, --import"),
    ],
)
def test_a_name_that_nothing_has_is_refused(command: Command, recipe: list[str], more: list[str], told: str) -> None:
    command(*recipe, *more, "--dry-run").refusal(told)


def test_a_recipes_imports_are_a_list_of_names(command: Command, recipe: list[str], tmp_path: Path) -> None:
    with (tmp_path / "recipe.yaml").open("a") as file:
        file.write("imports: {a.py: 1, 2: x}\n")
    command(*recipe, "--dry-run").refusal("imports: give a list of .py files or installed modules")


def test_installed_plug_ins_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "own-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[duetgan.plugins]\nlosses = installed_plug_in\n")
    module = tmp_path / "installed_plug_in.py"
    module.write_text("from pathlib import Path\nPath(__file__).with_name('imported').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.load()
    assert (tmp_path / "imported").exists()
    (about / "entry_points.txt").write_text("[duetgan.plugins]\nlosses = missing_plug_in\n")
    with pytest.raises(plugins.UserError, match=r"plug-in losses \(missing_plug_in\): ModuleNotFoundError"):
        plugins.load()
