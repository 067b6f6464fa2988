"""A model folder works elsewhere, with torch and safetensors alone, and says what it is."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from safetensors.torch import save_file

from duetgan.commands import export as script
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.model_folder.folder import described, readme
from duetgan.inference.export.check import CheckFailed
from duetgan.inference.export.formats import FORMATS
from duetgan.inference.export.subject import classifier_subject, generator_subject
from duetgan.inference.samples import Sampler
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.models.restore import read_weights
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.inference.conftest import gan_run, styled
from tests.inference.test_export import spoilt
from tests.metrics.conftest import CLASSES, SIDE, classifier_run, pack

NEEDED = ["torch", "torchgen", "functorch", "safetensors", "typing_extensions.py", "sympy", "mpmath", "networkx"]
NEEDED += ["jinja2", "markupsafe", "filelock", "fsspec"]  # torch's own
ELSEWHERE = """
import importlib.util, sys
from pathlib import Path
import torch
from safetensors.torch import load_file

found = {}
given = load_file("inputs.safetensors")
for name in ("gan", "classifier"):
    spec = importlib.util.spec_from_file_location(name, Path(name, "duet_model.py"))
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    model = page.load()
    if name == "gan":
        found["psi"] = model(given["z"], given["labels"], truncation_psi=0.5)
        found["quiet"] = model(given["z"], given["labels"], noise="none")
        found["samples"] = model.samples(5, seed=3)
    else:
        found["probabilities"] = model.probabilities(given["images"])
others = [name for name in ("numpy", "PIL", "yaml", "models", "utils") if importlib.util.find_spec(name)]
assert not others, others
torch.save(found, "found.pt")  # safetensors writes by NumPy
"""


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """A conditional StyleGAN2 and a classifier."""
    folder = tmp_path_factory.mktemp("subjects")
    gan = load(resolve(gan_run(folder / "gan", styled(), resize_filter="zero-pad")))
    classifier = load(resolve(classifier_run(folder / "classifier", content_hash="abc123")))
    with Dataset(pack(folder / "x.lmdb")) as reader:
        return {
            "gan": generator_subject(gan, batch_size=24),
            "classifier": classifier_subject(classifier, reader, count=30, batch_size=16),
        }


@pytest.fixture(scope="module")
def folders(subjects, tmp_path_factory):
    """Their folders, in one folder."""
    place = tmp_path_factory.mktemp("folders")
    for name, subject in subjects.items():
        FORMATS["folder"].write(subject, place / name)
    return place


@pytest.fixture(scope="module")
def lonely_python(tmp_path_factory):
    """The interpreter of a virtual environment that has torch, what torch needs, and safetensors."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages, own = Path(sysconfig.get_path("purelib")), next(folder.glob("lib/python*/site-packages"))
    for name in NEEDED:
        (own / name).symlink_to(packages / name)
    return folder / "bin" / "python"


def test_elsewhere_it_gives_the_same_images_and_probabilities(subjects, folders, lonely_python, tmp_path):
    shutil.copytree(folders, tmp_path, dirs_exist_ok=True)
    z, labels = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 0, 1])
    images = torch.randint(0, 256, (4, 1, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    save_file({"z": z, "labels": labels, "images": images}, str(tmp_path / "inputs.safetensors"))
    command = [str(lonely_python), "-W", "ignore", "-I", "-c", ELSEWHERE]
    subprocess.run(command, cwd=tmp_path, env={}, check=True)
    found = torch.load(tmp_path / "found.pt")
    generator, classifier = subjects["gan"].network.generator, subjects["classifier"].network
    expected = {
        "psi": generator(z, labels, truncation_psi=0.5),
        "quiet": generator(z, labels, noise="none"),
        "probabilities": judge_images(classifier, images),
    }
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=1e-5)
    samples = Sampler(generator=generator, chosen=[0, 1, 2], seed=3).images(range(5))
    assert (found["samples"].int() - samples.int()).abs().max() <= 1  # a tie may be rounded to the other side
    assert (found["samples"] == samples).double().mean() > 0.99
    assert (found["psi"] - found["quiet"]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["plain", pytest.param("growing", marks=pytest.mark.slow)])
def test_a_generator_without_styles_is_one_program(runs, tmp_path, name):
    if name == "growing":  # at a smaller stage of its growth, half faded in
        checkpoint = load(resolve(gan_run(tmp_path / "run", styled(side=16)))) | {"stage": [8, 0.5]}
    else:
        checkpoint = load(resolve(runs["dcgan"]))
    subject = generator_subject(checkpoint, batch_size=24)
    FORMATS["folder"].write(subject, tmp_path / "model")
    run = FORMATS["folder"].load(subject, tmp_path / "model")
    for rows in (1, 3):
        torch.testing.assert_close(run(subject.rows(rows)), subject.network(*subject.rows(rows)), rtol=0, atol=1e-5)
    page: dict[str, Any] = {}
    exec((tmp_path / "model" / "duet_model.py").read_text(), page)
    model = page["load"](tmp_path / "model")
    assert_raises(ValueError, "has no w to truncate", model, *subject.rows(1), truncation_psi=0.5)
    if name == "plain":
        generator: Any = subject.network.generator
        expected = Sampler(generator=generator, chosen=[0, 1, 2]).images(range(4))
        assert (model.samples(4).int() - expected.int()).abs().max() <= 1


def test_nothing_in_it_names_this_machine_or_holds_images(folders, subjects):
    """Programs keep the stack of every operation, and the inputs they were traced with, unless told otherwise."""
    here = [str(Path(__file__).parents[3]).encode(), str(folders.parent).encode(), sys.prefix.encode()]
    for path in folders.rglob("*.*"):
        parts = [path.read_bytes()]
        if path.suffix == ".pt2":
            assert path.stat().st_size < 2**21  # without weights
            with zipfile.ZipFile(path) as file:
                parts = [file.read(name) for name in file.namelist()]
        assert not any(place in part for place in here for part in parts), path


def test_the_config_tells_what_a_program_must_know(folders):
    gan, classifier = (json.loads((folders / name / "config.json").read_text()) for name in ("gan", "classifier"))
    assert (gan["task"], gan["architecture"], gan["licence"]) == ("gan", "stylegan2", "unknown")
    assert classifier["architecture"] == "resnet18"
    assert read_weights(folders / "classifier" / "model.safetensors")["classes"] == CLASSES  # Duet reads it, too
    assert classifier["classes"] == gan["classes"] == CLASSES
    assert classifier["normalisation"] == {"outside": "pixels / 127.5 - 1", "inside": None}
    assert (gan["resize"]["filter"], classifier["resize"]["filter"]) == ("zero-pad", "none")
    assert gan["resize"]["rule"].startswith("centred on zeros")
    assert (classifier["figures"], classifier["data"]["trained_on"]) == ([], ["abc123"])
    assert (folders / "gan" / "samples.png").stat().st_size > 500
    assert not (folders / "classifier" / "samples.png").exists()  # someone's images are not handed on


RESNET = {"extractor": "resnet50", "n": 500, "frechet": 12.5, "floor": 2.5}
RESNET |= {"kernel": 0.01, "kernel_interval": [0.008, 0.012]}
JUDGE = {"extractor": "classifier:/home/me/judge", "n": 500, "frechet": 3.5, "floor": None, "diversity_ratio": 0.7}
GAN = {"task": "gan", "step": 7, "n": 500, "data_hash": "f" * 64, "distances": [RESNET, JUDGE]}
GAN |= {"recognised": 0.9, "recognised_interval": [0.88, 0.92]}


def test_the_card_is_read_by_the_hubs_own_reader(checkpoint, tmp_path):
    """Its online validator cannot be asked; its classes of cards and results are the next best."""
    hub = pytest.importorskip("huggingface_hub")
    run = tmp_path / "run"
    (run / "eval").mkdir(parents=True)
    (run / "eval" / "metrics.json").write_text(json.dumps(GAN))
    held = checkpoint | {"file": str(run / "checkpoints" / "step-00000007.pt"), "teachers": ["sha256:12"]}
    text = readme("my|model", described(held, licence="cc-by-4.0", entries={}), seed=0)
    card = hub.ModelCard(text)
    assert (card.data.license, card.data.pipeline_tag) == ("cc-by-4.0", "unconditional-image-generation")
    assert "/home" not in text
    assert "floor" not in text  # of real images alone
    assert "| frechet | 12.5 |  | 500 | resnet50 |" in text
    assert "| kernel | 0.01 | 0.008 to 0.012 | 500 | resnet50 |" in text
    assert r"| diversity\_ratio | 0.7 |  | 500 | classifier |" in text
    assert "| recognised | 0.9 | 0.88 to 0.92 | 500 | classifier |" in text
    assert "`sha256:12`" in text
    held["step"] = 8
    assert described(held, licence="unknown", entries={})["figures"] == []  # they are those of another step


def test_names_are_no_more_than_text(checkpoint):
    names = ["`<b>x</b>`", "a\n# b", "c | d"]
    config = described(checkpoint | {"classes": names}, licence="<script>\n- x", entries={})
    _, head, body = readme("x\n# y", config, seed=None).split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "<script>\n- x"
    html = MarkdownIt().render(body)
    assert html.count("<h1>") == 1
    assert "<script>" not in html
    assert "<b>" not in html


def test_the_command_makes_a_folder_where_there_is_none(runs, tmp_path, monkeypatch):
    out = tmp_path / "model"
    command = ["--checkpoint", str(runs["dcgan"]), "--format", "folder", "--out", str(out)]
    with monkeypatch.context() as patch:
        spoilt("folder", patch)
        assert_raises(CheckFailed, "outputs differ", script.main, command)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    assert script.main([*command, "--licence", "mit"]) == 0
    assert {path.name for path in out.iterdir()} == {
        *("README.md", "config.json", "duet_model.py", "generator.pt2", "model.safetensors", "samples.png")
    }
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} <= {0o644, 0o664}
    assert json.loads((out / "config.json").read_text())["licence"] == "mit"
    assert (out / "README.md").read_text().splitlines()[1] == "license: mit"
    assert_raises(UserError, "makes a folder, give a new one", script.main, [*command, "--overwrite"])
