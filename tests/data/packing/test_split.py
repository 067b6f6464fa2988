"""Held-out images: which ones (data/packing), and `duet pack --val-share` from a source to two files (U3)."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from duetgan.commands.pack import main
from duetgan.data.lmdb.format import Split
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import stored_image
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.duplicates import find
from duetgan.data.packing.inspect import verify
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.split import draw, quotas, to_fraction, val_path
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import EXIT_USER, UserError
from duetgan.utils.seeding import seed_of
from tests.data.conftest import sample_images, save, source_at, succeed
from tests.data.packing.test_duplicates import photos as photo_like

TENTH = Fraction(1, 10)
SHARES = st.fractions(min_value=Fraction(1, 100), max_value=Fraction(1, 2))
QUARTER: dict[str, Any] = {"val_share": "0.25", "overwrite": True}


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), SHARES)
def test_quotas_are_the_largest_remainders(counts, share):
    found = quotas(counts, share)
    splittable = [count if count > 1 else 0 for count in counts]
    ideal = [share * count for count in splittable]
    for count, wanted, part in zip(splittable, found, ideal, strict=True):
        assert (0 < wanted < count) if count else wanted == 0
        assert abs(wanted - part) < 1  # one image at least is never more than one above the ideal
    extra = sum(1 for wanted, part in zip(found, ideal, strict=True) if part < 1 and wanted)
    assert sum(found) <= int(share * sum(splittable) + Fraction(1, 2)) + extra
    raised = [part % 1 for wanted, part in zip(found, ideal, strict=True) if wanted > part and part >= 1]
    lowered = [part % 1 for wanted, part in zip(found, ideal, strict=True) if wanted < part]
    assert not raised or not lowered or min(raised) >= max(lowered)


def test_quotas_by_hand_and_shares_that_are_none():
    assert quotas([1000, 1000], TENTH) == [100, 100]
    assert quotas([14, 16, 20], TENTH) == [1, 2, 2]  # 1.4, 1.6, 2.0
    assert quotas([5, 5, 5, 5], TENTH) == [1, 1, 1, 1]  # 0.5 each: two by the remainders, then one at least
    assert quotas([2, 1, 0, 3], Fraction(1, 2)) == [1, 0, 0, 2]  # 1.0, -, -, 1.5
    assert quotas([300], Fraction("0.29")) == [87]  # not 0.28999999999999998
    for share in ("0", "-0.1", "0.51", "1", "nan", "inf", "a", "1/0", ""):
        with pytest.raises(UserError, match=r"give a share above 0 and up to 0\.5"):
            to_fraction(share)


def alone(count: int) -> list[np.ndarray]:
    return list(np.arange(count)[:, None])


def contents(count: int) -> list[bytes]:
    return [b"image %d" % number for number in range(count)]


def test_the_draw_is_the_smallest_keys_and_images_that_are_added_move_few():
    few, many = (draw(alone(n), np.zeros(n, int), contents(n), TENTH, 0) for n in (1000, 1100))
    assert (few.sum(), many.sum()) == (100, 110)
    assert (few != many[:1000]).sum() <= 12  # of 1,100; another seed moves 180 of 1,000
    assert (few != draw(alone(1000), np.zeros(1000, int), contents(1000), TENTH, 1)).sum() > 100
    digests = contents(50)
    keys = [seed_of(7, "split", digest.hex()) for digest in digests]
    held = draw(alone(50), np.zeros(50, int), digests, TENTH, 7)
    assert sorted(np.flatnonzero(held)) == sorted(sorted(range(50), key=lambda number: keys[number])[:5])


GROUPINGS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=2, max_size=40)


@settings(deadline=None)
@given(GROUPINGS, SHARES)
def test_groups_are_never_divided(records, share):
    numbers, labels = (np.array(column) for column in zip(*records, strict=True))
    groups = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
    held = draw(groups, labels, contents(len(labels)), share, 0)
    assert all(len(set(held[group])) == 1 for group in groups)
    counts = np.bincount(labels)
    kept = np.bincount(labels[~held], minlength=len(counts))
    assert (kept[counts > 0] > 0).all()  # no class is held out whole
    for label in np.flatnonzero((counts > 1) & (kept == counts)):  # without held-out images: no group could be taken
        for group in groups:
            need = np.bincount(labels[group], minlength=len(counts))
            assert not need[label] or (need >= kept)[need > 0].any()


@pytest.fixture
def pets(tmp_path):
    """20 cats and 12 dogs; cats 0 and 1 with a copy and a JPEG of theirs under other names, dog 11 a copy of dog 10."""
    everything = photo_like(32, side=32).transpose(0, 2, 3, 1)
    names = {f"cat/{number:02d}.png": number for number in range(20)}
    names |= {f"dog/{number:02d}.png": 20 + number for number in range(11)} | {"dog/11.png": 30}
    names |= {f"cat/{name}": int(name[4]) for name in ("copy0.png", "copy1.png", "jpeg0.jpg", "jpeg1.jpg")}
    for name, number in names.items():
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(everything[number]).save(tmp_path / "pets" / name, quality=80)
    return tmp_path / "pets"


def halves(dest: Path) -> tuple[LMDBReader, LMDBReader]:
    return LMDBReader(dest), LMDBReader(val_path(dest))


@pytest.mark.parametrize("options", [{}, {"encoding": "png"}, {"encoding": "source"}, {"smallest": 8}])
def test_two_files_hold_every_image_once(pets, tmp_path, options):
    source = source_at(pets)
    whole = pack(source, tmp_path / "whole.lmdb", **options).meta
    summary = pack(source, tmp_path / "x.lmdb", val_share=0.25, **options)
    training, held_out = halves(tmp_path / "x.lmdb")
    assert (summary.meta, summary.held_out) == (training.meta, held_out.meta)
    assert not verify(training)
    assert not verify(held_out)
    assert np.add(training.meta.histogram, held_out.meta.histogram).tolist() == whole.histogram == [24, 12]
    assert held_out.meta.histogram == [6, 3]
    assert sorted(training.names() + held_out.names()) == LMDBReader(tmp_path / "whole.lmdb").names()
    place = {name: index for index, name in enumerate(LMDBReader(tmp_path / "whole.lmdb").names())}
    for side in whole.resolutions if whole.resolutions[0] else [None]:
        original = LMDBReader(tmp_path / "whole.lmdb", resolution=side)
        for path in (training.path, held_out.path):
            part = LMDBReader(path, resolution=side)
            assert [place[name] for name in part.names()] == sorted(place[name] for name in part.names())
            for index, name in enumerate(part.names()):
                np.testing.assert_equal(stored_image(part, index), stored_image(original, place[name]))
    pooled = np.average([training.meta.mean, held_out.meta.mean], axis=0, weights=[27, 9])
    if whole.resolutions[-1]:
        np.testing.assert_allclose(pooled, whole.mean, rtol=1e-12)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["pets", "whole.lmdb", "x-val.lmdb", "x.lmdb"]


def test_no_look_alike_is_on_both_sides(pets, tmp_path):
    for seed in range(4):
        pack(source_at(pets), tmp_path / "x.lmdb", val_share=0.4, seed=seed, overwrite=True, duplicates=False)
        training, held_out = halves(tmp_path / "x.lmdb")
        report = find(training, held_out, similar=True)
        assert (report.exact, report.near) == ([], [])
        sides = [set(training.names()), set(held_out.names())]
        for group in ({"00.png", "copy0.png", "jpeg0.jpg"}, {"01.png", "copy1.png", "jpeg1.jpg"}):
            assert any({f"cat/{name}" for name in group} <= side for side in sides)
    # in a crowd stricter rules hold (data/packing/near_duplicates.py); the parts' crowds are those of the whole
    pack(open_source("sample", split="test"), tmp_path / "y.lmdb", val_share=0.3, duplicates=False)
    report = find(*halves(tmp_path / "y.lmdb"), similar=True)
    assert report.near == []


def test_the_split_is_recorded_and_keyed(pets, tmp_path):
    source = source_at(pets)
    whole = pack(source, tmp_path / "whole.lmdb").meta
    first = pack(source, tmp_path / "x.lmdb", workers=0, **QUARTER)
    split = Split(part="train", share=0.25, seed=0, whole=whole.fingerprint, images=36)
    assert (first.meta.split, first.held_out.split) == (split, split.model_copy(update={"part": "val"}))
    assert whole.split is None
    with open_source(str(halves(tmp_path / "x.lmdb")[1].path)) as part:
        assert pack(part, tmp_path / "part.lmdb", size=24, resize="pad").meta.split == first.held_out.split
        inner = pack(part, tmp_path / "inner.lmdb", seed=3, val_share=0.5, duplicates=False)
        packed = pack(part, tmp_path / "part.lmdb", overwrite=True).meta
    split = Split(part="train", share=0.5, seed=3, whole=packed.fingerprint, images=9)
    assert (inner.meta.split, inner.held_out.split) == (split, split.model_copy(update={"part": "val"}))
    names = halves(tmp_path / "x.lmdb")[1].names()
    again = pack(source, tmp_path / "x.lmdb", workers=1, **QUARTER)
    assert (again.meta, again.held_out) == (first.meta, first.held_out)
    pack(source, tmp_path / "x.lmdb", size=48, encoding="jpeg", **QUARTER)
    assert halves(tmp_path / "x.lmdb")[1].names() == names
    pack(source, tmp_path / "x.lmdb", seed=1, **QUARTER)
    assert halves(tmp_path / "x.lmdb")[1].names() != names
    # Another place and other names of the same files: the same images.
    for path in sorted(pets.rglob("*.*g")):
        path.rename(path.with_name(f"z{99 - len(path.name)}{path.name}"))
    pack(source_at(pets), tmp_path / "x.lmdb", **QUARTER)
    renamed = {Path(name).name[3:] for name in halves(tmp_path / "x.lmdb")[1].names()}
    assert renamed == {Path(name).name for name in names}


def test_command_line(pets, tmp_path, refused, capsys):
    save(pets / "emu" / "only.png", side=32)
    command = [str(pets), str(tmp_path / "x.lmdb"), "--val-share", "0.1"]
    succeed(main, *command)
    told = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    held_out = tmp_path / "x-val.lmdb"
    assert ["cat", "21,", "3 held out"] in told
    with LMDBReader(tmp_path / "x.lmdb") as kept, LMDBReader(held_out) as held:
        count = len(kept) + len(held)
        text = f"{held_out}: {len(held)} of {count} images, {len(held) / count:.1%}"
        assert ["held", "out", text] in told
    assert ["emu", "1,", "0 held out"] in told
    assert "x.lmdb exists: choose another name or add --overwrite" in refused(main, *command)
    (tmp_path / "x.lmdb").unlink()
    assert "x-val.lmdb exists" in refused(main, *command)
    succeed(main, *command, "--overwrite", "--val-dest", tmp_path / "v.lmdb")
    assert len(LMDBReader(tmp_path / "v.lmdb")) == 4
    assert "--val-dest is for --val-share" in refused(main, pets, tmp_path / "y.lmdb", "--val-dest", "z.lmdb")


def test_the_summary_has_the_values_of_both_files(pets, tmp_path):
    (pets / "cat" / "broken.png").write_text("no image")
    (pets / "notes.txt").write_text("text")
    dest, held_out_file = tmp_path / "x.lmdb", tmp_path / "v.lmdb"
    source = source_at(pets, group_from="([0-9]|broken)[.]")
    options: dict[str, Any] = {"val_share": 0.3, "val_dest": held_out_file, "on_error": "skip"}
    found = replace(pack(source, dest, size="16x8", encoding="png", **options), seconds=4.0)
    kept, held = (LMDBReader(path).meta for path in (dest, held_out_file))
    assert (found.meta, found.held_out, kept.count + held.count) == (kept, held, 36)
    classes = [
        (name, f"{kept.by_class[label]}, {held.by_class[label]} held out") for label, name in enumerate(kept.classes)
    ]
    rows = [
        ("packed", f"{dest} ({dest.stat().st_size:,} bytes)"),
        ("held out", f"{held_out_file}: {held.count} of 36 images, {held.count / 36:.1%}"),
        ("groups", f"{held.split.groups} held out whole (--group-from '([0-9]|broken)[.]')"),
        ("source", "pets"),
        ("images", f"{kept.count}, 16x8, RGB"),
        ("time", "4.0 s, 9 images/s"),
        ("encoding", "png, centre crop, scaled by Lanczos"),
        ("resolutions", "8"),
        ("classes", "2"),
        *classes,
        ("duplicates", "3 exact duplicates of other images, in 3 groups"),
        ("skipped", "1"),
        ("", str(found.problems[0])),
        ("ignored", "1: notes.txt"),
    ]
    assert kept.split.groups != held.split.groups
    assert [" ".join(line.split()) for line in found.lines(dest)] == [" ".join(row).strip() for row in rows]


def test_refusals(pets, tmp_path, refused, capsys):
    alike, noise = photo_like(1, side=32).repeat(5, axis=0), sample_images(8)
    pictures = {"alone": {"cat/0": noise[0], "dog/0": noise[1]}, "same": {str(n): one for n, one in enumerate(alike)}}
    pictures["splits"] = {f"{('train', 'test')[n // 4]}/{n}": one for n, one in enumerate(noise)}
    for folder, files in pictures.items():
        for name, pixels in files.items():
            path = tmp_path / folder / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.transpose(1, 2, 0)).save(path)
    before = sorted(tmp_path.rglob("*"))
    for folder, options, message in (
        ("pets", "--val-share 0.6", "--val-share 0.6: give a share above 0 and up to 0.5"),
        ("pets", "--split val", "or add --val-share 0.1"),
        ("alone", "--val-share 0.5", "(the largest group has 1 of 2), so none can be held out"),
        ("same", "--val-share 0.2", "look alike (the largest group has 5 of 5), so none can be held out"),
    ):
        assert message in refused(main, tmp_path / folder, tmp_path / "x.lmdb", *options.split(), alone=True)
        assert sorted(tmp_path.rglob("*")) == before
    succeed(main, tmp_path / "splits", tmp_path / "x.lmdb", "--val-share", "0.25")
    assert "holds out a part of its train images" in capsys.readouterr().err
    assert [len(reader) for reader in halves(tmp_path / "x.lmdb")] == [3, 1]
    part = ["--split", "test"]
    for tokens, told in (
        (["--val-share", "0.5", *part], "--val-share holds out a part of its test images"),
        ([], "only its training images are packed; for the others run this again with --split ("),
        (part, ""),
    ):
        succeed(main, tmp_path / "splits", tmp_path / "y.lmdb", "--overwrite", *tokens)
        error = [line for line in capsys.readouterr().err.splitlines() if "packing" not in line]
        assert len(error) == bool(told)
        assert told in "".join(error)


def test_a_fault_leaves_both_files_as_they_were(pets, tmp_path, monkeypatch, capsys):
    dest = tmp_path / "new" / "x.lmdb"
    with monkeypatch.context() as patch:
        patch.setattr(LMDBWriter, "complete", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run_cli(main, [str(pets), str(dest), "--val-share", "0.1"]) == 130
    assert list(dest.parent.iterdir()) == []
    capsys.readouterr()
    pack(source_at(pets), dest, val_share=0.1)
    before = [reader.meta for reader in halves(dest)]
    for fault in ("duetgan.data.packing.split.draw", "duetgan.data.packing.pack.publish_both"):
        with monkeypatch.context() as patch:
            patch.setattr(fault, lambda *arguments: (_ for _ in ()).throw(UserError("a fault")))
            assert run_cli(main, [str(pets), str(dest), "--val-share", "0.3", "--overwrite"]) == EXIT_USER
        assert capsys.readouterr().err.splitlines() == ["error: a fault"]
        assert [reader.meta for reader in halves(dest)] == before
        assert sorted(item.name for item in dest.parent.iterdir()) == ["x-val.lmdb", "x.lmdb"]


def test_between_the_two_names_there_is_no_training_file(pets, tmp_path, monkeypatch):
    dest = tmp_path / "x.lmdb"
    pack(source_at(pets), dest, val_share=0.1)
    old, publish = LMDBReader(dest).meta, LMDBWriter.publish
    published = []

    def stop_at_the_training_file(writer: LMDBWriter) -> None:
        published.append(writer.path.name)
        if writer.path == dest:
            raise KeyboardInterrupt
        publish(writer)

    monkeypatch.setattr(LMDBWriter, "publish", stop_at_the_training_file)
    assert run_cli(main, [str(pets), str(dest), "--val-share", "0.3", "--overwrite"]) == 130
    assert [name for name in published if not name.startswith(".x.lmdb.whole")] == ["x-val.lmdb", "x.lmdb"]
    assert not dest.exists()
    monkeypatch.undo()
    assert LMDBReader(val_path(dest)).meta.split != old.split.model_copy(update={"part": "val"})
