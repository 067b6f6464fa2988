"""A model folder can be loaded, and says what it is."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from PIL import Image

from duetgan.commands import export as script
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.model_folder.folder import described, readme
from duetgan.inference.export.check import CheckFailed
from duetgan.inference.export.formats import FORMATS
from duetgan.inference.export.subject import classifier_subject, generator_subject
from duetgan.models.restore import read_weights
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.inference.conftest import gan_run, styled
from tests.inference.test_export import spoilt
from tests.metrics.conftest import CLASSES, SIDE, classifier_run, pack


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """A conditional StyleGAN2 and a classifier."""
    folder = tmp_path_factory.mktemp("subjects")
    gan = load(resolve(gan_run(folder / "gan", styled(), resize_filter="zero-pad")))
    classifier = load(resolve(classifier_run(folder / "classifier", content_hash="abc123")))
    with Dataset(pack(folder / "x.lmdb")) as reader:
        return {
            "gan": generator_subject(gan, batch_size=24, psi=1.0, mean="class"),
            "classifier": classifier_subject(
                classifier, reader, count=30, batch_size=16, calibration=None, calibrated=0
            ),
        }


@pytest.fixture(scope="module")
def folders(subjects, tmp_path_factory):
    """Their folders, in one folder."""
    place = tmp_path_factory.mktemp("folders")
    for name, subject in subjects.items():
        FORMATS["folder"].write(subject, place / name)
    return place


def test_nothing_in_it_names_this_machine(folders):
    here = [str(Path(__file__).parents[3]).encode(), str(folders.parent).encode(), sys.prefix.encode()]
    for path in folders.rglob("*.*"):
        assert not any(place in path.read_bytes() for place in here), path


def test_the_cards_code_loads_what_was_exported(folders, tmp_path, monkeypatch):
    Image.new("L", (SIDE, SIDE)).save(tmp_path / "photo.jpg")
    for name in ("gan", "classifier"):
        shutil.copytree(folders / name, tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)
        exec((tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0], {})
    assert (tmp_path / "grid.png").is_file()


def test_the_config_says_what_the_network_is(folders):
    gan, classifier = (json.loads((folders / name / "config.json").read_text()) for name in ("gan", "classifier"))
    assert (gan["task"], gan["architecture"], gan["licence"]) == ("gan", "stylegan2", "unknown")
    assert classifier["architecture"] == "resnet18"
    assert read_weights(folders / "classifier" / "model.safetensors")["classes"] == CLASSES  # Duet reads it, too
    assert classifier["classes"] == gan["classes"] == CLASSES
    assert "pixels / 127.5 - 1" in classifier["input"]
    assert (gan["resize_filter"], classifier["resize_filter"]) == ("zero-pad", "none")
    assert (classifier["figures"], classifier["trained_on"]) == ([], ["abc123"])
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
    text = readme("my|model", described(held, licence="cc-by-4.0"), has_samples=True)
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
    assert described(held, licence="unknown")["figures"] == []  # they are those of another step


def test_names_are_no_more_than_text(checkpoint):
    names = ["`<b>x</b>`", "a\n# b", "c | d"]
    config = described(checkpoint | {"classes": names}, licence="<script>\n- x")
    _, head, body = readme("x\n# y", config, has_samples=False).split("---\n", 2)
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
    assert {path.name for path in out.iterdir()} == {*("README.md", "config.json", "model.safetensors", "samples.png")}
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} <= {0o644, 0o664}
    assert json.loads((out / "config.json").read_text())["licence"] == "mit"
    assert (out / "README.md").read_text().splitlines()[1] == "license: mit"
    assert_raises(UserError, "makes a folder, give a new one", script.main, [*command, "--overwrite"])
