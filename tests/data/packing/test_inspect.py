"""`duet inspect`: metadata, grid, and a check of every record."""

import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duetgan.commands.inspect import main
from duetgan.commands.pack import main as pack_main
from duetgan.data.images import encode
from duetgan.data.images.decode import CODEC_PNG
from duetgan.data.lmdb import format as record_format
from duetgan.data.lmdb.format import META_KEY
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.inspect import Damage, report, save_grid, verify
from duetgan.data.packing.records import add_image, pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.checkpoint.provenance import Lineage, Provenance, join, recorded
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import EXIT_USER, DamageError, UserError
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, change, flip, sample_images, stored, value
from tests.data.lmdb.test_damage import OTHERS, forge, read, use


def test_text_and_grid(packed, capsys):
    main([str(packed)])
    lines = capsys.readouterr().out.splitlines()
    words = [line.split() for line in lines]
    for expected in (["count", "20"], ["channels", "3"], ["resolutions", "[8]"], ["encoding", "raw"]):
        assert expected in words
    assert ["cat", "7"] in words
    assert ["emu", "6"] in words
    with Image.open(packed.parent / "packed.grid.png") as file:
        image = np.asarray(file.convert("RGB"))
    left = image.shape[1] - 7 * 66
    for row, column, record in ((0, 0, 0), (1, 0, 1), (2, 5, 17)):  # records 0, 3, 6 ... are of the first class
        place = image[66 * row :, left + 66 * column :][:64, :64]
        expected = sample_images(20)[record].transpose(1, 2, 0).repeat(8, axis=0).repeat(8, axis=1)
        np.testing.assert_array_equal(place, expected)
    assert image[:64, :left].min() < 50  # the class name


def test_json_is_one_document_and_out(packed, tmp_path, capsys):
    main([str(packed), "--json"])
    document = json.loads(capsys.readouterr().out)
    meta = LMDBReader(packed).meta
    assert (document["count"], document["size"]) == (20, 8)
    for key in ("classes", "channels", "resolutions", "encoding", "histogram", "content_hash", "mean"):
        assert document[key] == getattr(meta, key)
    assert document["bytes"] == packed.stat().st_size
    assert not (packed.parent / "packed.grid.png").exists()
    main([str(packed), "--json", "--verify", "--out", str(tmp_path / "g.png")])
    assert json.loads(capsys.readouterr().out)["damaged"] == []
    with Image.open(tmp_path / "g.png") as image:
        assert image.size[0] > 7 * 66
    assert_raises(UserError, r"end in \.png", main, [str(packed), "--out", str(tmp_path / "g.txt")])
    main([str(packed), "--out", str(tmp_path / "new" / "g.png")])
    assert (tmp_path / "new" / "g.png").is_file()
    assert_raises(UserError, "choose another place", main, [str(packed), "--out", str(packed / "g.png")])


def test_grids(tmp_path, photos):
    """Of unlabelled images, of large ones, of images with sizes of their own, of many classes, of one without any."""
    pack_arrays(tmp_path / "x.lmdb", sample_images(25, 1))
    pack_arrays(tmp_path / "large.lmdb", sample_images(2, 1, side=200))
    pack_main([str(photos), str(tmp_path / "s.lmdb"), "--encoding", "source"])
    pack_arrays(tmp_path / "c.lmdb", sample_images(50, 1), np.arange(50), [f"class {number}" for number in range(50)])
    pack_arrays(tmp_path / "e.lmdb", sample_images(5, 1), [0, 0, 2, 2, 2], ["a", "none", "b"])
    sizes = (("x", 660, 3 * 66), ("large", 260, 130), ("s", None, 2 * 130), ("c", None, 20 * 66), ("e", None, 3 * 66))
    for name, width, height in sizes:
        with LMDBReader(tmp_path / f"{name}.lmdb") as reader:
            save_grid(reader, tmp_path / "grid.png")
        with Image.open(tmp_path / "grid.png") as image:
            assert image.size == (width or image.width, height)


def verified(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[int], list[str]]:
    """The damaged records of a file that is refused, and the lines that say so."""
    assert run_cli(main, [str(path), "--verify", "--json"]) == EXIT_USER
    output = capsys.readouterr()
    return json.loads(output.out)["damaged"], output.err.splitlines()


def test_verify_compares_with_the_metadata_and_the_labels_of_the_resolutions(tmp_path):
    first, second = tmp_path / "a.lmdb", tmp_path / "b.lmdb"
    pack_arrays(first, sample_images(4), [0, 1, 2, 2], CLASSES)
    pack_arrays(second, sample_images(4, seed=1), [0, 1, 2, 2], CLASSES)
    for key in (b"pixels/00000000/00008", b"index/00000000/00008"):
        change(first, key, value(second, key))
    assert "content hash" in verify(LMDBReader(first)).content
    assert_raises(UserError, "content hash does not match", main, [str(first), "--verify"])
    for path, labels in ((first, [0, 1, 2]), (second, [1, 0, 2])):
        pack_arrays(path, sample_images(3, side=16), labels, CLASSES, smallest=8, overwrite=True)
    change(first, b"index/00000000/00008", value(second, b"index/00000000/00008"))
    assert verify(LMDBReader(first)).content == "the labels differ between the resolutions"


def test_verify_counts_label_sets_that_no_image_has(tmp_path):
    sets = [[], [0], [1], [0, 1], [2]]
    pack_arrays(tmp_path / "x.lmdb", sample_images(4), np.array([0, 1, 2, 2]), CLASSES, label_sets=sets)
    assert not verify(LMDBReader(tmp_path / "x.lmdb"))


@pytest.mark.parametrize("encoding", ["raw", "png", "jpeg"])
def test_verify_does_not_depend_on_the_number_of_threads(tmp_path, encoding, small_blocks):
    path = tmp_path / "x.lmdb"
    pack_arrays(path, sample_images(30, side=16), np.arange(30) % 3, CLASSES, encoding=encoding, smallest=4)
    assert [bool(verify(LMDBReader(path), workers)) for workers in (1, 3)] == [False, False]
    change(path, b"index/00000005/00004", None)
    change(path, b"index/00000002/00016", b"nonsense")
    for workers in (1, 3):
        damage = verify(LMDBReader(path), workers)
        assert sorted(damage.records) == [8, 9, 10, 11, 20, 21, 22, 23]
        assert damage.content == ""


def test_verify_finds_damage_at_every_resolution_and_labels_that_are_not_the_histograms(tmp_path):
    for encoding, side in itertools.product(("raw", "png"), (4, 8, 16)):
        path = tmp_path / f"{encoding}-{side}.lmdb"
        pack_arrays(path, sample_images(6, side=16), encoding=encoding, smallest=4)
        flip(path, stored(path, 4, side), offset=40)
        assert verify(LMDBReader(path)).records == {4: "its checksum does not match"}
    for label in (-1, 1, 3, 1 << 40):
        path = tmp_path / f"{label}.lmdb"
        pack_arrays(path, sample_images(3), [0, 1, 2], CLASSES)
        change_entry(path, label=label)
        assert verify(LMDBReader(path)).content == "the labels do not give the histogram in the metadata"
        if label != 1:
            told = f"record 0 is damaged: .*label {label} has no class, the file has 3 classes"
            assert_raises(DamageError, told, Dataset(path).read, [0])
    change_entry(path, height=2**32 - 1)
    assert_raises(DamageError, "record 0 is damaged: .*size", Dataset(path).read, [0])


def change_entry(path: Path, **values: int) -> None:
    """Change record 0's entry in the index of raw images of 8 px, with checksums that fit."""
    with LMDBReader(path) as reader, reader.handle().environment.begin(buffers=True) as transaction:
        found, entries = reader.index_record(transaction, 0)
        head = np.array([found])
        for name, value in values.items():
            entries[name][0] = value
        pixels = reader.raw_block(transaction, 0)[0].tobytes()
        entries["checksum"][0] = record_format.entry_checksum(entries[0], pixels)
    head["checksum"] = zlib.crc32(entries.tobytes())
    change(path, b"index/00000000/00008", head.tobytes() + entries.tobytes())


def test_verify_compares_records_with_their_index_and_their_images(tmp_path):
    path = tmp_path / "x.lmdb"
    pack_arrays(path, sample_images(4), [0, 1, 2, 0], CLASSES, encoding="png")
    payload = encode(sample_images(4)[1].transpose(1, 2, 0), "png")
    relabelled = record_format.make_entry(payload, 2, 8, 8, CODEC_PNG)
    change(path, b"picture/0000000001/00008", relabelled.tobytes() + payload)
    assert verify(LMDBReader(path)).records == {1: "it differs from its index"}
    layout = Layout.of(ImageSpec(3, 0, 0), "source")
    with LMDBWriter(tmp_path / "y.lmdb", layout, classes=[]) as writer:
        add_image(
            writer,
            sample_images(1)[0].transpose(1, 2, 0),
            payload=encode(np.zeros((5, 6, 3), np.uint8), "png"),
            label=0,
        )
        writer.finish()
    assert verify(LMDBReader(tmp_path / "y.lmdb")).records == {0: "is 6x5 px by its header, 8x8 px by its record"}


@pytest.mark.parametrize("other", [None, b"nonsense"])
def test_verify_checks_the_signatures(packed, capsys, other):
    change(packed, b"hash/00000000", other)
    damaged, (last,) = verified(packed, capsys)
    assert damaged == list(range(20))
    assert "20 of 20 records are damaged" in last
    assert "signatures" in last


def test_damaged_records_are_one_line_however_many_and_a_grid_names_them(packed, capsys):
    damage = Damage({0: "a", 1: "a", 3: "a", 4: "b", 7: "b"})
    with LMDBReader(packed) as reader, pytest.raises(UserError, match="5 of 20 records are damaged"):
        report(damage, reader)
    flip(packed, sample_images(20)[4].tobytes())
    assert run_cli(main, [str(packed)]) == EXIT_USER
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert "record 4 is damaged" in error
    assert not (packed.parent / "packed.grid.png").exists()


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
def samples(tmp_path):
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
    common = ["--workers", "0"]
    pack_main([str(samples), str(tmp_path / "small.lmdb"), "--size", "4", "--encoding", "png", *common])
    assert LMDBReader(tmp_path / "small.lmdb").meta.passport == PASSPORT
    pack_main([str(samples), str(tmp_path / "half.lmdb"), "--val-share", "0.4", *common])
    for name in ("half", "half-val"):
        assert LMDBReader(tmp_path / f"{name}.lmdb").meta.passport == PASSPORT
    pack_main([str(packed), str(tmp_path / "real.lmdb"), "--size", "4", *common])
    assert LMDBReader(tmp_path / "real.lmdb").meta.passport is None


def test_a_damaged_passport_is_an_error_of_one_line(samples):
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
    drawn = ('"generator": "sha256:0123456789ab"', '"step": 7', '"seed": -3', '"truncation_psi": 0.7')
    main([str(samples), "--json"])
    assert json.loads(capsys.readouterr().out)["passport"] == PASSPORT
    for path, told in ((samples, drawn), (packed, ("none, real images",))):
        main([str(path)])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("passport"))
        assert all(words in line for words in told)


def test_a_passport_that_could_not_be_read_back_is_not_written(tmp_path):
    for wrong in ({"step": -1}, {"truncation_psi": float("nan")}, {"seed": 2**70}):
        with pytest.raises((UserError, ValueError), match=next(iter(wrong))):
            pack_samples(tmp_path / "x.lmdb", passport=PASSPORT | wrong)
    assert not list(tmp_path.iterdir())


def test_lineages_join_are_read_from_checkpoints_and_say_who_may_judge_whom():
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
