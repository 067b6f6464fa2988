"""Runs of a classifier that starts from a GAN's discriminator: weights, resume to the bit, and what it may judge."""

import shutil

import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import fingerprint
from duetgan.metrics.lineage import unfit
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from tests.end_to_end.helpers import differing, state_of, train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim")
FROZEN = ["--finetune.freeze", "[backbone]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, packed):
    """gan: a run of one step; recipe.yaml of a classifier; straight: a classifier of 4 steps from D, frozen."""
    path = tmp_path_factory.mktemp("discriminator")
    assert train_in_process(write_config(path / "gan.yaml", "gan", packed), path / "gan", "--max-steps", "1") == 0
    recipe = write_config(path / "recipe.yaml", "classifier", packed)
    text = recipe.read_text().replace("{stem: small-stride2}", f"{{name: discriminator, weights: {path / 'gan'}}}")
    recipe.write_text(text)
    assert train_in_process(recipe, path / "straight", "--max-steps", "4", *FROZEN) == 0
    return path


def test_a_frozen_backbone_is_the_discriminators(folder):
    given, found = state_of(folder / "gan", 1)["discriminator"], state_of(folder / "straight", 4)["model"]
    assert torch.equal(found["network.stem.weight"], given["from_rgb.weight"])
    for part in ("first", "second", "skip"):
        assert torch.equal(found[f"network.stage2.{part}.weight"], given[f"blocks.1.{part}.weight"])
    early = state_of(folder / "straight", 2)["model"]
    assert differing({"head": early["network.fc.weight"]}, {"head": found["network.fc.weight"]})


def test_all_of_it_trains_unless_frozen(folder):
    assert train_in_process(folder / "recipe.yaml", folder / "tuned", "--max-steps", "2") == 0
    given, found = state_of(folder / "gan", 1)["discriminator"], state_of(folder / "tuned", 2)["model"]
    assert differing({"stem": found["network.stem.weight"]}, {"stem": given["from_rgb.weight"]})


def test_it_cannot_judge_samples(folder, packed):
    """D has seen its generator's: so has what starts from it."""
    checkpoint = load(resolve(folder / "straight"))
    (passport,) = checkpoint["lineage"]["synthetic"]
    assert passport["generator"] == fingerprint(generator_from(load(resolve(folder / "gan"))))
    with Dataset(packed / "test.lmdb") as reader:
        assert "was trained on samples" in unfit(checkpoint, reader)


def test_the_run_resumes_to_the_same_bits_and_needs_the_gan_no_more(folder, tmp_path):
    run = tmp_path / "run"
    assert train_in_process(folder / "recipe.yaml", run, "--max-steps", "2", *FROZEN) == 0
    assert train_in_process(folder / "recipe.yaml", run, "--max-steps", "4", *FROZEN) == 0
    assert differing(state_of(folder / "straight", 4), state_of(run, 4)) == []
    shutil.move(folder / "gan", tmp_path / "gone")
    try:
        model = classifier_from(load(resolve(run)))
        assert model(torch.zeros(1, 1, 16, 16)).shape == (1, 10)
    finally:
        shutil.move(tmp_path / "gone", folder / "gan")


def test_a_classifiers_run_is_no_gan(folder, capsys):
    more = ["--max-steps", "1", "--model.weights", str(folder / "straight")]
    assert train_in_process(folder / "recipe.yaml", folder / "none", *more) == 2
    assert "needs a GAN's run" in capsys.readouterr().err
