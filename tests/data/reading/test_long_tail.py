"""`data.pack --long-tail`: the exact counts, which images stay, what the file says of it, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.decode import stored_image
from data.inspect import main as inspect
from data.lmdb.reader import LMDBReader
from data.pack import main
from data.reading.long_tail import long_tail, profile, thin
from data.reading.verify import verify
from data.records import pack_arrays
from data.sources import open_source
from data.sources.base import ArraySource, Source
from tests.data.conftest import CLASSES, images
from tests.data.packing.test_split import refused
from utils.errors import EXIT_OK, EXIT_USER, UserError, run_cli
from utils.seeding import numpy_generator

THOUSAND = [1000, 599, 359, 215, 129, 77, 46, 27, 16, 10]  # of 10 classes at ratio 100


def numbered(counts: list[int], classes: list[str] | None = None) -> ArraySource:
    """Images of 4 px that differ, in a random order of labels."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    pixels = np.arange(len(labels) * 16, dtype=np.uint32).view(np.uint8).reshape(-1, 4, 4, 4)[..., :3]
    names = [f"c{label}" for label in range(len(counts))] if classes is None else classes
    return ArraySource("numbers", np.ascontiguousarray(pixels), labels, names)


def kept(source: Source) -> list[int]:
    return np.bincount(source.labels(), minlength=len(source.classes)).tolist()


def test_the_profile_is_the_published_one() -> None:
    # The counts of CIFAR-10-LT at ratio 100, as papers on long tails list them.
    assert profile(5000, 100, 10).tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert profile(1000, 100, 10).tolist() == THOUSAND
    assert profile(1000, 100, 3).tolist() == [1000, 100, 10]
    assert profile(27, 27, 4).tolist() == [27, 9, 3, 1]  # not 8 and 2: thirds are no binary fractions
    assert profile(7, 1, 2).tolist() == [7, 7]


def test_as_many_as_every_class_allows() -> None:
    assert kept(thin(numbered([1000] * 10), 100)) == THOUSAND
    assert kept(thin(numbered([40, 5, 30]), 4)) == [11, 5, 2]  # 12 would ask for 6 of the second
    assert kept(thin(numbered([9, 50]), 3)) == [9, 3]
    assert kept(thin(numbered([9, 50]), 1)) == [9, 9]
    assert kept(thin(numbered([40, 20, 30]), 4, largest=8)) == [8, 4, 2]


def test_which_images_stay() -> None:
    source = numbered([50, 60, 70])
    part = thin(source, 10, 20, seed=3)
    assert isinstance(part, ArraySource)
    labels, expected = source.labels(), []
    for label, number in enumerate((20, 6, 2)):
        order = numpy_generator(3, "long-tail", label).permutation(50 + 10 * label)
        expected += np.flatnonzero(labels == label)[order[:number]].tolist()
    np.testing.assert_array_equal(part.images, source.images[sorted(expected)])
    np.testing.assert_array_equal(part.labels(), labels[sorted(expected)])
    np.testing.assert_array_equal(long_tail(labels, 10, 3, 20), sorted(expected))
    assert part.long_tail == {"ratio": 10.0, "largest": 20, "seed": 3, "images": 180}

    def digests(source: ArraySource) -> set[bytes]:
        return {image.tobytes() for image in source.images}

    smaller, other = thin(source, 20, 20, seed=3), thin(source, 10, 20, seed=4)
    assert isinstance(smaller, ArraySource)
    assert isinstance(other, ArraySource)
    assert digests(smaller) < digests(part)
    assert digests(part) != digests(other)


def test_files_stay_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in zip(CLASSES, (12, 8, 8), strict=True):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number, pixels in enumerate(images(count, seed=len(name) + count).transpose(0, 2, 3, 1)):
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number:02d}.png")
    command = [str(tmp_path / "pets"), str(tmp_path / "x.lmdb"), "--long-tail", "4", "--encoding", "source"]
    assert run_cli(main, [*command, "--workers", "1"]) == EXIT_OK
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "long tail ratio 4: 21 of 28 images, 12 of the first class; seed 0" in told
    reader = LMDBReader(tmp_path / "x.lmdb")
    assert (reader.meta.histogram, verify(reader).records) == ([12, 6, 3], {})
    for index, name in enumerate(reader.names()):
        pixels, label = stored_image(reader, index)
        np.testing.assert_array_equal(pixels, np.asarray(Image.open(tmp_path / "pets" / name)))
        assert CLASSES[label] == name.split("/")[0]
    with open_source(str(tmp_path / "pets")) as source:
        part = thin(source, 4)
        assert [part.item_name(index) for index in range(21)] == [str(tmp_path / "pets" / n) for n in reader.names()]


def test_the_metadata_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"ratio": 100.0, "largest": 1000, "seed": 5, "images": 10_000}
    tail = tmp_path / "tail.lmdb"
    assert run_cli(main, ["sample", str(tail), "--long-tail", "100", "--seed", "5", "--no-duplicates"]) == EXIT_OK
    assert LMDBReader(tail).meta.histogram == THOUSAND
    assert LMDBReader(tail).meta.long_tail == known
    capsys.readouterr()
    inspect([str(tail), "--json"])
    assert json.loads(capsys.readouterr().out)["long_tail"] == known
    assert run_cli(main, [str(tail), str(tmp_path / "again.lmdb"), "--size", "14", "--val-share", "0.1"]) == EXIT_OK
    for name in ("again", "again-val"):  # packed anew, and held out of it
        assert LMDBReader(tmp_path / f"{name}.lmdb").meta.long_tail == known
    pack_arrays(tmp_path / "whole.lmdb", images(20), np.arange(20) % 3, CLASSES)
    assert LMDBReader(tmp_path / "whole.lmdb").meta.long_tail is None


@pytest.mark.parametrize(
    ("counts", "ratio", "largest", "message"),
    [
        ([9, 9], 0.5, None, "give a ratio of 1 or more"),
        ([9, 9], float("nan"), None, "give a ratio of 1 or more"),
        ([9, 9], float("inf"), None, "give a ratio of 1 or more"),
        ([9], 2, None, "needs two classes or more, there is one"),
        ([9, 0], 2, None, "class c1 has no images"),
        ([9, 9], 10, None, "leaves no image of class c1, for class c0 has 9; give a ratio of at most 9"),
        ([9, 9], 6, 5, "give a ratio of at most 5"),
        ([9, 9], 3, 10, "class c0 has 9 images; give 1 to 9"),
        ([9, 9], 3, 10**30, "class c0 has 9 images"),
        ([9, 9], 3, 0, "give 1 to 9"),
        ([9, 3, 9], 4, 9, "asks for 4 images of class c1, there are 3; lower it"),
    ],
)
def test_what_cannot_be(counts: list[int], ratio: float, largest: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        thin(numbered(counts), ratio, largest)


def test_unlabelled_images_have_no_tail() -> None:
    with pytest.raises(UserError, match="is unlabelled: --long-tail needs classes"):
        thin(numbered([9], classes=[]), 2)


def test_refusals_on_the_command_line(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message, *options in (
        ("--long-tail-max is for --long-tail", "--long-tail-max", "2"),
        ("--on-error skip would leave some out", "--long-tail", "2", "--on-error", "skip"),
        ("--drop-duplicates would leave some out", "--long-tail", "2", "--drop-duplicates"),
        ("give a ratio of at most 2", "--long-tail", "3"),
    ):
        refused(capsys, message, photos, *options)
    assert run_cli(main, ["sample", str(photos.parent / "x.lmdb"), "--long-tail", "2", "--split", "test"]) == EXIT_USER
    assert "--split test stays balanced" in capsys.readouterr().err
    assert not (photos.parent / "x.lmdb").exists()
