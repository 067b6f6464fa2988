"""`duet pack --apart`: what the file holds, and what looks like it, is left out."""

import numpy as np
import pytest
from PIL import Image

from duetgan.commands.pack import main
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import stored_image
from duetgan.data.packing import near_duplicates
from duetgan.data.packing.duplicates import find
from duetgan.data.packing.inspect import verify
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from tests.data.conftest import succeed
from tests.data.packing.test_duplicates import photos as photo_like


@pytest.fixture
def pets(tmp_path):
    """Eight cats and four dogs to test on; beside other images all of them again, and two as JPEGs."""
    everything = photo_like(30, side=32).transpose(0, 2, 3, 1)
    for number, pixels in enumerate(everything):
        known = number < 12
        names = [f"{'test' if known else 'more'}/{'dog' if number % 3 == 2 else 'cat'}/{number:02d}.png"]
        names += [f"more/unlabelled/again{number:02d}.png"] if known else []
        names += [f"more/unlabelled/jpeg{number:02d}.jpg"] if number in (3, 14) else []
        for name in names:
            (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "pets" / name, quality=80)
    return tmp_path / "pets"


@pytest.mark.parametrize("options", [{}, {"encoding": "png"}, {"encoding": "source"}, {"smallest": 8}])
@pytest.mark.parametrize("how", [None, "none"])
def test_no_image_of_the_other_file_and_no_look_alike_is_there(pets, tmp_path, options, how):
    test, whole, out = (tmp_path / f"{name}.lmdb" for name in ("test", "whole", "out"))
    pack(open_source(str(pets / "test")), test, **options)
    source = open_source(str(pets / "more"), classes_from=how)
    pack(source, whole, **options)
    summary = pack(source, out, apart=test, **options)
    reader, everything = LMDBReader(out), LMDBReader(whole)
    assert not verify(reader)
    place = {name: index for index, name in enumerate(everything.names())}
    gone = {f"unlabelled/again{number:02d}.png" for number in range(12)} | {"unlabelled/jpeg03.jpg"}
    assert reader.names() == [name for name in place if name not in gone]
    assert ("unlabelled/jpeg14.jpg" in reader.names()) is (how == "none")
    assert (summary.meta, summary.written.excluded) == (reader.meta, 13 if how else 0)
    assert reader.classes == everything.classes == ([] if how else ["cat", "dog"])
    report = find(reader, LMDBReader(test), similar=True)
    assert (report.exact, report.near) == ([], [])
    for side in reader.meta.resolutions if reader.meta.resolutions[0] else [None]:
        part, original = (LMDBReader(path, resolution=side) for path in (out, whole))
        for index, name in enumerate(part.names()):
            np.testing.assert_equal(stored_image(part, index), stored_image(original, place[name]))
    assert not list(tmp_path.glob(".*"))


def test_command_line_and_refusals(pets, tmp_path, refused, capsys):
    test, out = str(tmp_path / "test.lmdb"), str(tmp_path / "out.lmdb")
    succeed(main, pets / "test", test)
    command = [str(pets / "more"), out, "--classes-from", "none", "--apart", test]
    succeed(main, *command)
    told = capsys.readouterr().out
    assert "13 images that the file of --apart holds, or that look like one of its" in told
    assert "also in" not in told  # they are not
    for options, message in (
        (["--apart", test, "--val-share", "0.1"], "--apart and --val-share: pack one after the other"),
        (["--apart", "nowhere.lmdb"], "nowhere.lmdb: no such file"),
    ):
        assert message in refused(main, str(pets / "more"), out, "--overwrite", *options)
    assert LMDBReader(out).meta.count == 19
    message = refused(main, str(pets / "test"), out, "--overwrite", "--apart", test)
    assert "no image could be used, 0 skipped, 12 left out by --apart" in message
    assert LMDBReader(out).meta.count == 19


def test_a_search_that_ended_early_gives_a_warning(pets, tmp_path, monkeypatch, capsys):
    pack(open_source(str(pets / "test")), tmp_path / "test.lmdb")
    monkeypatch.setattr(near_duplicates, "LIMIT", 0)
    pack(open_source(str(pets / "more"), classes_from="none"), tmp_path / "out.lmdb", apart=tmp_path / "test.lmdb")
    assert "test.lmdb: too many images look alike, so some of them may remain" in capsys.readouterr().err
