"""The passport of generated images: kept by the file, told by data.inspect, carried on by everything that packs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.inspect import main as inspect_main
from duetgan.data.lmdb.format import META_KEY
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.pack import main as pack_main
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import pack_arrays
from duetgan.utils.errors import UserError
from duetgan.utils.provenance import Lineage, Provenance, join, recorded
from tests.data.conftest import CLASSES, sample_images
from tests.data.lmdb.test_damage import OTHERS, forge, read, use

PASSPORT: Provenance = {
    "generator": "sha256:0123456789ab",
    "step": 7,
    "seed": -3,
    "truncation_psi": 0.7,
    "selection": None,
    "trained_on": "f00d",
    "classes": CLASSES,
}


def pack_samples(path: Path, *, count: int = 20, seed: int = 0, passport: Provenance | None = PASSPORT) -> Path:
    """Images that say that a generator drew them."""
    pack_arrays(path, sample_images(count, seed=seed), np.arange(count) % 3, CLASSES, passport=passport)
    return path


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return pack_samples(tmp_path / "samples.lmdb")


def test_it_is_read_back_and_carried_on_and_files_without_one_are_real(samples, packed, tmp_path):
    assert LMDBReader(samples).meta.passport == PASSPORT
    with Dataset(samples) as dataset:
        assert dataset.meta.passport == PASSPORT
    assert LMDBReader(packed).meta.passport is None
    assert "passport" not in read(packed, META_KEY)  # as in files of before: they read as real ones
    assert LMDBReader(packed).meta.content_hash == LMDBReader(samples).meta.content_hash
    with Dataset([packed, samples]) as both, Dataset([packed, packed]) as real:
        assert both.meta.passport == PASSPORT
        assert real.meta.passport is None
    common = ["--workers", "0", "--no-duplicates"]
    pack_main([str(samples), str(tmp_path / "small.lmdb"), "--size", "4", "--encoding", "png", *common])
    assert LMDBReader(tmp_path / "small.lmdb").meta.passport == PASSPORT
    pack_main([str(samples), str(tmp_path / "half.lmdb"), "--val-share", "0.4", *common])
    for name in ("half", "half-val"):
        assert LMDBReader(tmp_path / f"{name}.lmdb").meta.passport == PASSPORT
    pack_main([str(packed), str(tmp_path / "real.lmdb"), "--size", "4", *common])
    assert LMDBReader(tmp_path / "real.lmdb").meta.passport is None


def test_a_damaged_passport_is_an_error_of_one_line(samples: Path) -> None:
    true = read(samples, META_KEY)
    allowed: dict[str, Any] = {"seed": (int,), "step": (int,), "truncation_psi": (int, float), "classes": (list,)}
    allowed |= dict.fromkeys(("selection", "trained_on"), (str, type(None)))
    wrong: list[Any] = [3, "x", [], PASSPORT | {"step": -1}]
    lies: list[tuple[Any, str]] = [(other, "passport") for other in wrong]
    for field in PASSPORT:
        fine = allowed.get(field, (str,))
        lies.append(({key: value for key, value in PASSPORT.items() if key != field}, f"passport.{field}"))
        lies += [(PASSPORT | {field: odd}, f"passport.{field}") for odd in OTHERS if type(odd) not in fine]
    for lie, named in lies:
        forge(samples, true | {"passport": lie})
        told = use(samples)
        assert named in told, lie
        assert "\n" not in told


def test_inspect_shows_it(samples: Path, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ("generator sha256:0123456789ab", "step 7", "seed -3", "truncation_psi 0.7")
    for path, passport, told in ((samples, PASSPORT, drawn), (packed, None, ("none, real images",))):
        inspect_main([str(path), "--json"])
        assert json.loads(capsys.readouterr().out)["passport"] == passport
        inspect_main([str(path)])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("passport"))
        assert all(words in line for words in told)


def test_a_passport_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    for wrong in ({"step": -1}, {"truncation_psi": float("nan")}, {"seed": 2**70}):
        with pytest.raises((UserError, ValueError), match=next(iter(wrong))):
            pack_samples(tmp_path / "x.lmdb", passport=PASSPORT | wrong)
    assert not list(tmp_path.iterdir())


def test_lineages_join_are_read_from_checkpoints_and_say_who_may_judge_whom() -> None:
    real, samples = Lineage.of(trained_on=["a"]), Lineage.of(trained_on=["a"], synthetic=[PASSPORT])
    taught = Lineage.of(teachers=["w"], pretrained=["imagenet"])
    assert real.may_not_judge(taught, "x", {"b"}) == ""
    assert "supplied a loss" in real.may_not_judge(taught, "w", {"b"})
    assert "trained on samples" in samples.may_not_judge(taught, "x", {"b"})
    assert real.may_not_judge(taught, "x", {"a"}) == "was trained on the test images"
    assert Lineage.of(pretrained=["imagenet", "y"]).related(taught)
    assert not Lineage.of(pretrained=["y"]).related(taught)
    assert not real.related(real)  # of the same images: that is what a judge of a generator is
    other = PASSPORT | {"seed": 4}
    one = Lineage.of(trained_on=["a", "b"], synthetic=[PASSPORT], teachers=["t"])
    two = Lineage.of(trained_on=["b", "c"], synthetic=[PASSPORT, other], pretrained=["w"])
    both = {"trained_on": ["a", "b", "c"], "synthetic": [PASSPORT, other], "teachers": ["t"], "pretrained": ["w"]}
    assert join(one, two).document() == both
    assert Lineage.read(both) == join(one, two)
    assert join() == Lineage.of()
    assert Lineage.of().document() == {"trained_on": [], "synthetic": []}  # as in checkpoints of before
    before = {"data": {"content_hash": "a"}, "teachers": ["t"]}
    assert recorded(before) == Lineage.of(trained_on=["a"], teachers=["t"])
    assert recorded({"data": None}) == Lineage.of()
    known = {"trained_on": ["b"], "synthetic": [PASSPORT]}
    own = {"data": {"content_hash": "a"}, "lineage": known}
    assert recorded(own).document() == {**known, "trained_on": ["a", "b"]}
