"""Exact and near duplicates within packed files and between them."""

import itertools
import json
from collections.abc import Callable

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetgan.commands.duplicates import main
from duetgan.data.lmdb.format import SIGNATURE
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing import near_duplicates
from duetgan.data.packing.duplicates import Report, find, group_equal, lines, naming
from duetgan.data.packing.near_duplicates import DISTANCE, correlations, near
from duetgan.data.packing.records import add_image, pack_arrays, signature
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import numpy_generator
from tests.data.conftest import CLASSES, succeed


def photos(count: int, side: int = 64, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Different images with structure at every scale, like photos: uint8 [count, channels, side, side]."""
    draws = numpy_generator("test", "photos", seed, side)
    images = np.zeros((count, side, side, channels))
    for cells in (2, 4, 8, 16, 32):
        for sample_image in images:
            noise = draws.normal(size=(cells, cells, channels)) / cells**0.8
            sample_image += cv2.resize(noise, (side, side), interpolation=cv2.INTER_CUBIC).reshape(side, side, channels)
    images -= images.min(axis=(1, 2, 3), keepdims=True)
    return (20 + 215 * images / images.max(axis=(1, 2, 3), keepdims=True)).astype(np.uint8).transpose(0, 3, 1, 2)


def saved(images: np.ndarray, quality: int = 60) -> np.ndarray:
    """The images as JPEG and back."""
    options = [cv2.IMWRITE_JPEG_QUALITY, quality]
    files = [cv2.imencode(".jpg", one.transpose(1, 2, 0), options)[1] for one in images]
    return np.stack([np.asarray(cv2.imdecode(file, cv2.IMREAD_COLOR)).transpose(2, 0, 1) for file in files])


def scaled(images: np.ndarray, side: int) -> np.ndarray:
    """The images at another size."""
    return np.stack([cv2.resize(one.transpose(1, 2, 0), (side, side)).transpose(2, 0, 1) for one in images])


EDITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "saved": saved,
    "brighter": lambda images: (images * 1.05).clip(0, 255).astype(np.uint8),
    "cropped": lambda images: scaled(images[:, :, 1:-1, 1:-1], 64),
    "halved": lambda images: scaled(scaled(images, 32), 64),
}
brighter = EDITS["brighter"]


def signatures(hashes: list[int], digests: list[int] | None = None) -> np.ndarray:
    """SIGNATURE [n]; different digests unless given."""
    result = np.zeros(len(hashes), SIGNATURE)
    result["dhash"] = hashes
    result["digest"] = np.arange(len(hashes)) if digests is None else digests
    return result


# Hashes that are often near each other: one of three, with a few bits flipped.
HASHES = st.builds(
    lambda base, bits: base ^ sum(1 << bit for bit in set(bits)),
    st.sampled_from([0x0123456789ABCDEF, 0x0123456789ABC0F0, 0xFFFF0000FFFF0000]),
    st.lists(st.integers(0, 63), max_size=6),
)
MANY = st.lists(st.tuples(HASHES, st.integers(0, 2)), max_size=25).map(
    lambda images: signatures([one[0] for one in images], [hash(one) % 2**64 for one in images])
)


@settings(deadline=None)
@given(MANY)
def test_near_is_brute_force_also_in_parts(several: np.ndarray) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "TILE", 30)
        patch.setattr(near_duplicates, "CROWD", 2)
        found = near(several)
    firsts = [row for row in range(len(several)) if several["digest"][row] not in several["digest"][:row]]
    expected = [
        [i, j]
        for i, j in itertools.combinations(firsts, 2)
        if int(several["dhash"][i] ^ several["dhash"][j]).bit_count() <= DISTANCE
    ]
    assert sorted(found.pairs.tolist()) == expected
    counts = np.bincount(found.pairs.ravel(), minlength=len(several))
    assert found.is_crowded.tolist() == [max(counts[pair]) > 2 for pair in found.pairs.tolist()]
    assert not found.cut_short


@given(st.lists(st.integers(0, 8), max_size=20))
def test_groups_of_equal_numbers_are_brute_force(numbers):
    groups = [[index for index, other in enumerate(numbers) if other == number] for number in dict.fromkeys(numbers)]
    assert [group.tolist() for group in group_equal(np.array(numbers, np.int64))] == groups


def test_the_search_ends_at_the_limit(monkeypatch):
    base = 0x0F0F0F0F0F0F0F0F
    several = signatures([base, base ^ 0b1110000, base ^ 0b1, base ^ 0b111])
    assert (len(near(several).pairs), near(several).cut_short) == (6, False)
    monkeypatch.setattr(near_duplicates, "LIMIT", 1)
    monkeypatch.setattr(near_duplicates, "TILE", 4)
    found = near(several)
    assert (found.pairs.tolist(), found.cut_short) == ([[0, 1], [0, 2], [0, 3]], True)


def test_signatures_and_images_without_texture() -> None:
    flat = [signature(np.full((16, 16, 3), shade, np.uint8))[0] for shade in (0, 0, 100, 255)]
    assert not len(near(np.array(flat, SIGNATURE)).pairs)
    cells = numpy_generator("test", "signature").integers(0, 256, (8, 9), dtype=np.uint8)
    pixels = cells.repeat(3, axis=0).repeat(2, axis=1)[:, :, None]
    bits = "".join(str(int(left < right)) for row in cells.tolist() for left, right in itertools.pairwise(row))
    assert int(signature(pixels)["dhash"][0]) == int(bits, 2)
    assert signature(pixels.reshape(18, 24, 1))["digest"] != signature(pixels)["digest"]  # the same bytes


def correlated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Correlations of the images in the same rows, uint8 [n, C, H, W]."""
    images = [*a.transpose(0, 2, 3, 1), *b.transpose(0, 2, 3, 1)]
    pairs = np.stack([np.arange(len(a)), len(a) + np.arange(len(b))], axis=1)
    return correlations(pairs, lambda record: np.ascontiguousarray(images[record]))


@pytest.mark.parametrize("edit", EDITS)
def test_edited_images_are_near_duplicates_and_others_are_not(edit: str) -> None:
    images = photos(40)
    edited = EDITS[edit](images)
    signed = [signature(one.transpose(1, 2, 0)) for one in (*images, *edited)]
    pairs = near(np.concatenate(signed)).pairs
    assert (pairs[:, 0] + 40 == pairs[:, 1]).all()
    assert len(pairs) >= 38
    assert (correlated(images, edited) > near_duplicates.LEAST_CORRELATION).all()
    assert (correlated(images, np.roll(edited, 1, axis=0)) < 0.9).all()
    if edit == "saved":
        assert (correlated(images, saved(images, 90)) > near_duplicates.CROWD_CORRELATION).all()


def test_correlations_need_contrast_and_count_colours_but_not_sizes() -> None:
    dull = (photos(5) // 128 + 100).astype(np.uint8)
    assert (correlated(dull, dull) < near_duplicates.LEAST_CORRELATION).all()
    images = photos(10)
    assert (correlated(images, scaled(images, 32)) > near_duplicates.LEAST_CORRELATION).all()
    assert (correlated(images, images[:, [1, 2, 0]]) < 0.9).all()
    grey = images[:, :1]
    np.testing.assert_allclose(correlated(grey, grey.repeat(3, axis=1)), 1, rtol=1e-5)
    assert len(correlated(images[:0], images[:0])) == 0


@pytest.fixture
def planted(tmp_path):
    """20 images, labels i % 3, then 20 = 3 = 21 (other label), 22 = 4, 23 near 5, 24 near 6 (other), 25, 26 flat."""
    images = photos(20)
    colour = np.full((2, 3, 64, 64), 90, np.uint8)
    colour[1] = 91
    copies = [images[[3, 3, 4]], saved(images[[5]]), brighter(images[[6]]), colour]
    labels = [*(np.arange(20) % 3), 0, 1, 1, 2, 1, 0, 0]
    pack_arrays(tmp_path / "a.lmdb", np.concatenate([images, *copies]), labels, CLASSES)
    return tmp_path / "a.lmdb"


def summary(report: Report) -> tuple[list[tuple[list[int], list[int], bool]], list[tuple[int, int, bool]]]:
    """The groups and the pairs, without the correlations."""
    exact_groups = [(group.records, group.other_records, group.labels_differ) for group in report.exact]
    return exact_groups, sorted((pair.record, pair.other_record, pair.labels_differ) for pair in report.near or [])


def test_find(planted, monkeypatch):
    report = find(LMDBReader(planted), similar=True)
    assert summary(report) == ([([3, 20, 21], [], True), ([4, 22], [], False)], [(5, 23, False), (6, 24, True)])
    assert (report.exact_duplicates, report.cut_short) == (3, False)
    assert report.near[0].correlation >= report.near[1].correlation
    of = {pair.record: f"{pair.correlation:.3f}" for pair in report.near}
    name = naming(LMDBReader(planted))
    assert lines(report, name, name) == [
        "3 exact duplicates of other images, in 2 groups; 1 group with different labels",
        "  3 (cat), 20 (cat), 21 (dog): different labels",
        "  4 (dog), 22 (dog)",
        "2 pairs of near duplicates",
        f"  6 (cat) ~ 24 (dog), correlation {of[6]}: different labels",
        f"  5 (emu) ~ 23 (emu), correlation {of[5]}",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(near_duplicates, "CROWD", 0)  # all are of a crowd, for which nothing is similar enough
        patch.setattr(near_duplicates, "CROWD_CORRELATION", 1.1)
        assert find(LMDBReader(planted), similar=True).near == []
    monkeypatch.setattr(near_duplicates, "LIMIT", 1)
    report = find(LMDBReader(planted), similar=True)
    assert report.cut_short
    assert lines(report, name, name)[-1] == "the search for near duplicates ended early: too many images look alike"


def test_leaks(planted, tmp_path):
    images, other = photos(20), photos(5, seed=1)
    shared = np.concatenate([other, images[[3]], images[[7, 7]], saved(images[[8]])])
    pack_arrays(tmp_path / "b.lmdb", shared, [0, 0, 0, 0, 0, 1, 1, 1, 0], ["emu", "dog"])  # classes by name
    report = find(LMDBReader(planted), LMDBReader(tmp_path / "b.lmdb"), similar=True)
    assert summary(report) == ([([3, 20, 21], [5], True), ([7], [6, 7], False)], [(8, 8, False)])
    assert (report.exact_duplicates, report.images, report.other_images) == (3, 27, 9)
    names = naming(LMDBReader(planted)), naming(LMDBReader(tmp_path / "b.lmdb"))
    assert lines(report, *names)[:4] == [
        f"3 images of {tmp_path / 'b.lmdb'} also in {planted}, in 2 groups; 1 group with different labels",
        "  3 (cat), 20 (cat), 21 (dog) = 5 (dog): different labels",
        "  7 (dog) = 6 (dog), 7 (dog)",
        "1 pairs of near duplicates",
    ]
    pack_arrays(tmp_path / "c.lmdb", scaled(photos(20)[[9, 10]], 32))  # of another size, without labels
    report = find(LMDBReader(planted), LMDBReader(tmp_path / "c.lmdb"), similar=True)
    assert summary(report) == ([], [(9, 0, False), (10, 1, False)])


def test_images_with_sizes_of_their_own(planted, tmp_path):
    images = photos(20)[[11, 12, 13]]
    layout = Layout.of(ImageSpec(3, 0, 0), "source")
    with LMDBWriter(tmp_path / "b.lmdb", layout, classes=[]) as writer:
        for sample_image, side in zip(images, (64, 96, 80), strict=True):
            pixels = cv2.resize(sample_image.transpose(1, 2, 0), (side, side + 10))
            for quality in (95, 70):
                content = cv2.imencode(".jpg", pixels[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
                pixels_read = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
                add_image(writer, np.asarray(pixels_read), 0, content)
        writer.finish()
    own = LMDBReader(tmp_path / "b.lmdb")
    assert summary(find(own, similar=True)) == ([], [(0, 1, False), (2, 3, False), (4, 5, False)])
    expected = [(11, 0, False), (11, 1, False), (12, 2, False), (12, 3, False), (13, 4, False), (13, 5, False)]
    assert summary(find(LMDBReader(planted), own, similar=True)) == ([], expected)


def test_command_line(planted, tmp_path, capsys):
    succeed(main, planted)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "  4 (dog), 22 (dog)"  # look-alikes are searched for when that is asked for
    succeed(main, planted, "--similar", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["exact"][0] == {"records": [3, 20, 21], "other_records": [], "labels_differ": True}
    assert (document["images"], document["other_images"], document["exact_duplicates"]) == (27, None, 3)
    assert {pair["record"] for pair in document["near"]} == {5, 6}


def test_bad_input(planted, tmp_path, refused):
    assert "no such file" in refused(main, planted, tmp_path / "none.lmdb")
