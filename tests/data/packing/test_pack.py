"""`duet pack`: what goes in comes out; what cannot go in is named and leaves nothing behind."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duetgan.commands.pack import main
from duetgan.data.images import trained_mode
from duetgan.data.images.decode import CODEC_JPEG
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import make_plan
from duetgan.data.packing.sources import open_source
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.errors import UserError
from duetgan.utils.runlog import progress
from tests.conftest import REPOSITORY, assert_raises
from tests.data.conftest import save


def packed(path: Path, *options: str) -> Dataset:
    """Pack into a file beside the source."""
    dest = path.parent / "packed.lmdb"
    main([str(path), str(dest), "--overwrite", *options])
    return Dataset(dest)


def refused(path: Path, message: str, *options: str) -> None:
    """Packing fails with `message`, and nothing new lies around."""
    before = sorted(path.parent.rglob("*"))
    assert_raises(UserError, message, main, [str(path), str(path.parent / "new.lmdb"), *options])
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize(("encoding", "tolerance"), [("raw", 0), ("png", 0), ("source", 0), ("jpeg", 3)])
def test_folder_round_trip(photos, encoding, tolerance):
    reader = packed(photos, "--encoding", encoding)
    assert reader.classes == ["cat", "dog"]
    assert reader.meta.histogram == [2, 2]
    assert reader.meta.resolutions == ([0] if encoding == "source" else [8])
    assert (reader.meta.encoding, reader.meta.channels, reader.meta.resize_filter) == (encoding, 3, "none")
    for index, name in enumerate(("cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png")):
        sample_image, label = reader.image(index)
        assert np.abs(sample_image - np.asarray(Image.open(photos / name)).astype(int)).max() <= tolerance
        assert label == index // 2
    if encoding == "raw":
        grey = np.asarray(Image.open(photos / "cat" / "a.png").convert("L"))
        np.testing.assert_array_equal(packed(photos, "--channels", "1").read([0])[0], grey[None, None])


def test_sizes_of_their_own(tmp_path):
    for side in (8, 20):
        save(tmp_path / "photos" / f"{side}.jpg", side=side)
    reader = packed(tmp_path / "photos", "--encoding", "source")
    assert reader.image(0)[0].shape == (20, 20, 3)
    assert reader.image(1)[0].shape == (8, 8, 3)
    with reader.shards[0].encoded(0) as (entry, _, _):
        assert entry["codec"] == CODEC_JPEG  # the fast way
    assert_raises(UserError, r"sizes of their own; .*pack with --size", reader.read, [0])
    refused(tmp_path / "photos", r"8\.jpg is 8x8 px where 20x20 was expected; pass --size N")


def test_size_crops_and_scales_or_pads(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    image = Image.new("RGB", (48, 16), "red")
    image.paste("blue", (16, 0, 32, 16))
    image.save(tmp_path / "photos" / "wide.png")
    save(tmp_path / "photos" / "small.png", side=4)
    reader = packed(tmp_path / "photos", "--size", "8")
    assert reader.read([1])[0][0].reshape(3, -1).T.tolist() == [[0, 0, 255]] * 64
    assert reader.meta.resize_filter == "centre-crop+lanczos"
    Image.new("L", (8, 4), 200).save(tmp_path / "photos" / "wide.png")
    reader = packed(tmp_path / "photos", "--size", "8", "--resize", "pad", "--channels", "1")
    assert reader.read([1])[0][0, 0, :, 0].tolist() == [0, 0, 200, 200, 200, 200, 0, 0]
    assert reader.meta.resize_filter == "zero-pad"


def test_auto_pads_only_what_is_near() -> None:
    scaled, source = "centre-crop+lanczos", open_source("sample", split="test")
    for size, expected in {None: "none", 28: "none", 32: "zero-pad", 64: scaled, 16: scaled}.items():
        plan = make_plan(source, size=size, encoding="raw", channels=None, resize="auto")
        assert plan.resize_filter == expected


def test_skipped_images_and_other_files(photos, capsys):
    (photos / "cat" / "aa.jpg").write_text("text")
    (photos / "dog" / "notes.txt").write_text("text")
    reader = packed(photos, "--on-error", "skip")
    np.testing.assert_array_equal(reader.image(1)[0], np.asarray(Image.open(photos / "cat" / "b.png")))
    lines = capsys.readouterr().out.splitlines()
    assert ["ignored", "1:", "dog/notes.txt"] in [line.split() for line in lines]
    assert ["cat", "2"] in [line.split() for line in lines]


def test_a_program_packs_without_bars_and_reads_what_was_skipped(photos, tmp_path, monkeypatch, capsys):
    (photos / "cat" / "aa.jpg").write_text("text")
    monkeypatch.setattr(progress, "has_terminal", lambda: True)
    for shown in (True, False, True):
        options: dict[str, Any] = {"on_error": "skip", "overwrite": True, "progress": shown}
        summary = pack(open_source(str(photos)), tmp_path / "x.lmdb", val_share=0.5, **options)
        error = capsys.readouterr().err
        totals = [bool(re.search(words, error)) for words in (r"packing: .*/5 ", r"splitting: .*/4 ")]
        assert ("packing" in error, totals) == (shown, [shown, shown])
    (problem,) = summary.problems
    assert (problem.name, "not an image" in problem.reason) == (str(photos / "cat" / "aa.jpg"), True)


def test_problems_of_the_listing_count_too(photos: Path) -> None:
    for name in ("emu", "fox"):
        (photos / name).mkdir()
    refused(photos, r"photos/emu is a class folder without images \(and 1 more\): fix it")


def test_nothing_left_after_skipping(photos):
    for path in (photos / "cat").iterdir():
        path.write_text("text")
    refused(photos, r"no image of class cat could be used, 2 skipped; the first: .*a\.png", "--on-error", "skip")
    for path in (photos / "dog").iterdir():
        path.write_text("text")
    refused(photos, "none of 4 images can be read", "--on-error", "skip")
    refused(photos, "no image could be used, 4 skipped", "--on-error", "skip", "--size", "8")


def test_pyramid(photos, capsys):
    reader = packed(photos, "--size", "32", "--pyramid", "8")
    assert reader.meta.resolutions == [8, 16, 32]
    assert reader.meta.resize_filter == "centre-crop+lanczos+2x2-mean"
    large = reader.read(range(4))[0].astype(float)
    small = Dataset(reader.path, resolution=16).read(range(4))[0]
    np.testing.assert_array_equal(small, np.floor(large.reshape(4, 3, 16, 2, 16, 2).mean((3, 5)) + 0.5))
    rows = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert ["resolutions", "8 16 32"] in rows
    resized = "centre crop, scaled by Lanczos; lower resolutions by means of 2x2 pixels"
    assert ["encoding", f"raw, {resized}"] in rows
    assert packed(photos, "--pyramid", "4").meta.resize_filter == "none+2x2-mean"
    whole = packed(photos, "--pyramid", "8").meta
    assert (whole.resolutions, whole.resize_filter) == ([8], "none")


def test_a_file_that_is_packed_anew_keeps_how_its_images_were_resized(photos, tmp_path):
    """A classifier of the new file resizes other images so, too: with "none" it cropped where those were padded."""
    cropped, padded = "centre-crop+lanczos", "zero-pad"
    for first, options, expected in (
        ("--size 32 --pyramid 8", "", cropped),
        ("--size 32 --pyramid 8", "--encoding png --pyramid 16", f"{cropped}+2x2-mean"),
        ("--size 32 --pyramid 8", "--size 16", f"{cropped}+2x2-mean"),
        ("--size 32 --pyramid 8", "--size 16 --pyramid 8", f"{cropped}+2x2-mean"),
        ("--size 32 --pyramid 8", "--size 36 --resize pad", padded),
        ("--size 9 --resize pad", "--val-share 0.5", padded),
        ("--size 10 --resize pad", "--pyramid 5", f"{padded}+2x2-mean"),
        ("--size 9 --resize pad", "--size 7", cropped),
        ("", "--encoding png", "none"),
    ):
        path = packed(photos, *first.split()).path
        main([str(path), str(tmp_path / "again.lmdb"), "--overwrite", *options.split()])
        for name in ("again.lmdb", "again-val.lmdb")[: 1 + ("val" in options)]:
            with Dataset(tmp_path / name) as reader:
                assert reader.meta.resize_filter == expected
        assert trained_mode({"data": {"resize_filter": expected}}) == ("pad" if padded in expected else "crop")


def test_classes_of_another_file(photos, tmp_path):
    pack(open_source(str(photos)), tmp_path / "train.lmdb", duplicates=False)
    against = ("--against", str(tmp_path / "train.lmdb"))
    assert packed(photos, *against).classes == ["cat", "dog"]
    (photos / "cat").rename(tmp_path / "cat")
    part = packed(photos, *against)
    assert (part.classes, part.meta.histogram, set(part.labels())) == (["cat", "dog"], [0, len(part)], {1})
    (tmp_path / "list.csv").write_text("path,label,split\nphotos/dog/a.png,dog,train\nphotos/dog/b.png,cat,val\n")
    refused(tmp_path / "list.csv", "class dog has no images; add some, or --against TRAIN.lmdb", "--split", "val")
    assert packed(tmp_path / "list.csv", "--split", "val", *against).meta.histogram == [1, 0]
    save(photos / "emu" / "a.png")
    refused(photos, "its classes are not those of .*train.lmdb.*; labels would not mean the same", *against)
    (tmp_path / "flat").mkdir()
    save(tmp_path / "flat" / "a.png")
    assert packed(tmp_path / "flat", *against).classes == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--encoding source --pyramid 4", "drop --size and --pyramid"),
        ("--encoding source --size 8", "drop --size"),
        ("--workers many", "'many' is not a whole number of at least 0"),
        ("--workers=-1", "'-1' is not a whole number of at least 0"),
        ("--size 2", "--size: size 2: give a side in px, or width x height"),
        *((f"--pyramid {n}", rf"--pyramid {n}: 8 px must be {n} px times") for n in (3, 5, 16, 0, -8)),
    ],
)
def test_options_that_do_not_fit(photos, options, message):
    refused(photos, message, *options.split())


def test_sources_and_targets_that_do_not_fit(photos, tmp_path):
    refused(tmp_path / "nowhere", "no such folder or zip file")
    assert_raises(UserError, "is a folder: DEST is one file", main, [str(photos), str(tmp_path)])
    pack(open_source(str(photos)), tmp_path / "y.lmdb", encoding="source", duplicates=False)
    refused(tmp_path / "y.lmdb", "has no files to keep: choose", "--encoding", "source")

    (tmp_path / "tall").mkdir()
    Image.new("RGB", (8, 12)).save(tmp_path / "tall" / "a.png")
    refused(tmp_path / "tall", "8x12 px, not square: pass --size N")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_command_line(photos, tmp_path):
    command: list[Any] = ["-m", "data.pack", photos, tmp_path / "x.lmdb"]
    done = run(*command, "--on_error", "skip", "--workers", "auto")
    assert done.returncode == 0, done.stderr
    assert ["images", "4,", "8x8,", "RGB"] in [line.split() for line in done.stdout.splitlines()]
    for arguments, told in (
        (command, "--overwrite"),
        ([*command, "--siez", "8"], "did you mean '--size'"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert told in done.stderr
    assert run(REPOSITORY / "data" / "pack.py", "--help").stdout.startswith("usage: duet pack")
