"""The card of a set of samples, read by the format's own library where it is installed."""

import json

import pytest

import generate as script
from data.reading.dataset import Dataset
from utils.checkpoint import file_sha256


@pytest.fixture(scope="module")
def data(runs, tmp_path_factory):
    """A packed set of samples with its card."""
    out = tmp_path_factory.mktemp("croissant") / "fake.lmdb"
    command = ["dataset", "--checkpoint", str(runs["dcgan"]), "--out", str(out), "--n", "6", "--croissant"]
    assert script.main([*command, "--licence", "cc0-1.0"]) == 0
    return out


def test_the_card_names_the_file_and_where_it_comes_from(data):
    assert sorted(path.name for path in data.parent.iterdir()) == ["fake.croissant.json", "fake.lmdb"]
    card = json.loads((data.parent / "fake.croissant.json").read_text())
    (file,) = card["distribution"]
    assert (file["contentUrl"], file["sha256"]) == ("fake.lmdb", file_sha256(data))
    assert (card["license"], card["name"]) == ("cc0-1.0", "fake")
    with Dataset(data) as reader:
        assert reader.meta.content_hash in card["description"]
    assert card["description"].startswith("6 generated images, 8x8 px, grey, 3 classes (dark, grey, light)")
    assert str(data.parent) not in json.dumps(card)


@pytest.mark.filterwarnings("ignore")  # of its dependencies
def test_croissants_own_library_finds_no_error(data):
    croissant = pytest.importorskip("mlcroissant", reason="mlcroissant is not installed")
    found = croissant.Dataset(jsonld=data.with_suffix(".croissant.json")).metadata
    assert found.name == "fake"
    assert not found.issues.errors
    assert [file.id for file in found.distribution] == ["fake.lmdb"]
