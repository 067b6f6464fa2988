"""torch.hub from a folder whose own modules are called as ours: both sides get their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from duetgan.inference.export.weights import write_weights
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from tests.inference.conftest import R3, gan_run, styled, without_w
from tests.metrics.conftest import CLASSES, TINY, classifier_run
from tests.metrics.conftest import gan_run as unnamed_run

ROOT = Path(__file__).parents[1]
NAMES = ("utils", "models", "data", "metrics", "inference", "training")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    found = {
        "classifier": classifier_run(folder / "classifier"),
        "gan": gan_run(folder / "gan", styled()),
        "r3": gan_run(folder / "r3", without_w(), architecture="r3gan", sizes=R3),
        "sets": unnamed_run(folder / "sets", sets=[[0], [0, 1]]),  # its config names no architecture
        "several": classifier_run(folder / "several", sets=[[0], [0, 1]]),
    }
    for name in ("classifier", "gan"):
        write_weights(folder / f"{name}.safetensors", load(resolve(found[name])))
        found[f"{name} file"] = folder / f"{name}.safetensors"
    return found


@pytest.fixture
def project(tmp_path):
    """A user's folder: modules and packages of our names, each with a mark."""
    for name in ("utils", "models", "data"):
        (tmp_path / f"{name}.py").write_text(f"MARK = 'the user''s {name}'\ndef helper():\n    return 42\n")
    for name in ("metrics", "inference", "training"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MARK = 'the user''s {name}'\n")
        (tmp_path / name / "extra.py").write_text("VALUE = 7\n")
    return tmp_path


def run(project, body):
    """Run a user's script in their folder; it prints a JSON value as its last line."""
    before = "\n".join(f"import {name}\nassert {name}.MARK == 'the user''s {name}'" for name in NAMES)
    after = "\n".join(f"import {name}\nassert {name} is MINE['{name}']" for name in NAMES)
    mine = f"MINE = {{name: sys.modules[name] for name in {NAMES!r}}}\nPATH = list(sys.path)"
    script = project / "main.py"
    parts = ["import json, os, sys", "import torch"]
    parts += [before, mine, f"REPO = {str(ROOT)!r}", body, after, "assert sys.path == PATH"]
    script.write_text("\n".join(parts))
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::SyntaxWarning", str(script)]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_users_own_modules_of_our_names_stay_theirs_and_ours_are_found(project, runs):
    body = f"""
x = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)
z = torch.linspace(-1, 1, 2 * {TINY["z_dim"]}).view(2, -1)
labels = torch.tensor([0, 2])
torch.hub.set_dir("hub")  # as if fetched before: list and help know repositories on GitHub only
os.mkdir("hub")
os.symlink(REPO, "hub/someone_duet_main")
assert torch.hub.list("someone/duet:main", trust_repo=True) == ["dcgan", "r3gan", "resnet_classifier", "stylegan2"]
assert "logits" in torch.hub.help("someone/duet:main", "resnet_classifier", trust_repo=True)
found = {{}}
for name in ({str(runs["classifier"])!r}, {str(runs["classifier file"])!r}):
    model = torch.hub.load(REPO, "resnet_classifier", source="local", checkpoint=name)
    found[name] = [model(x).tolist(), model.class_names, model.training]
for name in ({str(runs["gan"])!r}, {str(runs["gan file"])!r}):
    model = torch.hub.load(REPO, "stylegan2", source="local", checkpoint=name)
    found[name] = [model(z, labels, truncation_psi=0.5).tolist(), model.class_names, model.training]
from training.extra import VALUE
from utils import helper
assert VALUE == 7 and helper() == 42
print(json.dumps(found))
"""
    found = run(project, body)
    x = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)
    z = torch.linspace(-1, 1, 2 * TINY["z_dim"]).view(2, -1)
    expected = {
        "classifier": classifier_from(load(resolve(runs["classifier"])))(x),
        "gan": generator_from(load(resolve(runs["gan"])))(z, torch.tensor([0, 2]), truncation_psi=0.5),
    }
    for name, outputs in expected.items():
        for given in (runs[name], runs[f"{name} file"]):
            values, classes, training = found[str(given)]
            torch.testing.assert_close(torch.tensor(values), outputs, rtol=1e-5, atol=1e-5)
            assert classes == CLASSES
            assert training is False


@pytest.fixture
def hub():
    """The entry points, as torch.hub calls them from this folder."""
    return lambda entry, checkpoint: torch.hub.load(str(ROOT), entry, source="local", checkpoint=str(checkpoint))


def test_a_network_tells_its_images_and_its_classes(hub, runs):
    generator = hub("stylegan2", runs["gan"])
    assert (generator.class_names, generator.image_shape) == (CLASSES, (1, 8, 8))  # U7
    assert generator.image_range == (-1.0, 1.0)
    assert not generator.training
    assert hub("r3gan", runs["r3"]).class_names == hub("stylegan2", runs["sets"]).class_names == CLASSES


@pytest.mark.parametrize(
    ("name", "checkpoint", "message"),
    [
        ("stylegan2", "nowhere", "nowhere: no such run folder or checkpoint"),
        ("resnet_classifier", "no.safetensors", "no.safetensors: no such run folder or checkpoint"),
        ("resnet_classifier", "gan", "checkpoint is needed here"),
        ("stylegan2", "classifier", "checkpoint is needed here"),
        ("resnet_classifier", "several", "is of several labels an image"),
        *((name, "r3", r"architecture r3gan; load 'r3gan'") for name in ("stylegan2", "dcgan")),
        *((name, "sets", r"architecture stylegan2; load 'stylegan2'") for name in ("r3gan", "dcgan")),
    ],
)
def test_bad_input_is_a_value_error_with_the_remedy(hub, runs, name, checkpoint, message):
    with pytest.raises(ValueError, match=message):
        hub(name, runs.get(checkpoint, checkpoint))
