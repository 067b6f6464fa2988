"""The loader benchmark at tiny sizes: it measures what it says, and every contender delivers real batches."""

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from benchmarks import loader
from benchmarks.loading import first_batch, ours, peers, timing
from benchmarks.loading import images as sample_images
from benchmarks.loading.timing import Window, alternate, best_of, ratio, stream_rate
from duetgan.data.decode import RandomCrop
from duetgan.data.pack import pack
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import pack_arrays
from duetgan.data.sources import open_source
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import decode_file

TINY = loader.Sizes(
    repeats=1, raw_files=20, raw_images={8: 70}, raw_batch=8, raw_epochs=2, raw_window=Window(skipped=1, timed=2),
    photos=16, photo_batch=2, photo_window=Window(skipped=1, timed=2), pack_photos=4, pack_size=16,
    records={"raw": 5000}, record_batches=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight JPEG files in class folders."""
    folder = tmp_path_factory.mktemp("photos") / "photos"
    written = sample_images.write_jpeg_folder(folder, 8)
    assert written == sum(file.stat().st_size for file in sample_images.jpeg_files(folder))
    return folder


def batches(count: int, size: int = 3) -> timing.Stream:
    for _ in range(count):
        yield torch.zeros(size, 1, 1, 1), torch.zeros(size)


def test_rate_counts_the_timed_batches_only(monkeypatch):
    """Every look at the clock takes a second, opening the stream four."""
    now = [0.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    def slow_to_open() -> timing.Stream:
        now[0] += 4
        return batches(10)

    monkeypatch.setattr(timing.time, "perf_counter", tick)
    assert stream_rate(lambda: batches(10), Window(skipped=4, timed=5)) == 15.0
    assert stream_rate(slow_to_open, Window(skipped=0, timed=5)) == 3.0
    assert stream_rate(slow_to_open, Window(skipped=1, timed=5)) == 15.0


def test_rate_refuses_a_stream_that_ends_early_or_lacks_labels():
    with pytest.raises(ValueError, match="after 3 of 5"):
        stream_rate(lambda: batches(4), Window(skipped=1, timed=5))
    with pytest.raises(ValueError, match="3 images with 2 labels"):
        stream_rate(lambda: iter([(torch.zeros(3), torch.zeros(2))]), Window(skipped=0, timed=1))


def test_alternates_in_rotating_order_and_best_of_takes_the_fastest(capsys):
    calls: list[str] = []

    def contender(name: str, values: list[float]):
        def turn() -> float:
            calls.append(name)
            return values.pop(0)

        return turn

    rates = alternate({"a": contender("a", [10, 40, 90]), "b": contender("b", [5, 10, 10])}, 3)
    assert "".join(calls) == "abbaab"
    assert rates == {"a": [10, 40, 90], "b": [5, 10, 10]}
    assert ratio(rates, "a", "b") == 4.0
    assert best_of("peer", "workers", lambda count: {0: 5.0, 1: 9.0, 2: 7.0}[count], (0, 1, 2)) == 1
    assert capsys.readouterr().out == "  peer: 0 workers 5/s, 1 workers 9/s, 2 workers 7/s\n"


def test_images_are_fixed_and_different_and_photographs_jpeg_files_of_500_by_375(photos):
    one, same = sample_images.small_images(6, 32), sample_images.small_images(6, 32)
    assert one.shape == (6, 3, 32, 32)
    assert one.dtype == np.uint8
    assert np.array_equal(one, same)
    assert len({image.tobytes() for image in one}) == 6
    assert one.std() > 20  # photographs, not a plain colour
    files = sample_images.jpeg_files(photos)
    assert [int(file.stem) % 10 for file in files] == [int(file.parent.name) for file in files]
    assert decode_file(files[3].read_bytes(), 3).shape == (375, 500, 3)


def test_ours_and_numpy_deliver_the_same_batches_and_every_stream_of_ours_verifies_anew(tmp_path):
    images, labels, path = sample_images.small_images(30, 8), np.arange(30) % 10, tmp_path / "raw.lmdb"
    pack_arrays(path, images, labels, [str(label) for label in range(10)])
    theirs = list(peers.numpy_gather(images, labels, 8, 9)())
    mine = list(itertools.islice(ours.stream(path, 8), 9))
    assert len(mine) == len(theirs) == 9
    assert all(torch.equal(a, b) for pair in zip(mine, theirs, strict=True) for a, b in zip(*pair, strict=True))
    content = path.read_bytes()
    assert images[7].tobytes() in content
    path.write_bytes(content.replace(images[7].tobytes(), images[7].tobytes()[::-1]))
    with pytest.raises(UserError, match="record 7 is damaged"):
        list(itertools.islice(ours.stream(path, 8), 9))


def check_floats(stream: timing.Stream, batch: int, side: int) -> None:
    images, labels = next(stream)
    assert images.shape == (batch, 3, side, side)
    assert images.dtype == torch.float32
    assert -1 <= images.min() < images.mean() < images.max() <= 1
    assert len(labels) == batch
    assert labels.dtype == torch.int64


def test_streams_of_photographs(photos, tmp_path):
    with open_source(str(photos), split="train", root=None) as source:
        pack(source, tmp_path / "photos.lmdb", encoding="source", workers=0)
    stream = ours.stream(tmp_path / "photos.lmdb", 4, resolution=24, crop=RandomCrop(), workers=1, floats=True)
    check_floats(stream, 4, 24)
    endless = peers.imagefolder(photos, peers.crop_transform(24), 4, 0)
    for _ in range(5):  # more than an epoch
        check_floats(endless, 4, 24)


@pytest.mark.filterwarnings("ignore")  # the packages' own
@pytest.mark.parametrize("name", ["webdataset", "litdata"])
def test_streams_of_peers(name, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("LITDATA_DISABLE_VERSION_CHECK", "1")
    package = pytest.importorskip(name, exc_type=ImportError)
    crop = peers.crop_transform(24)
    if name == "webdataset":
        stream = peers.webdataset(package, peers.write_shards(photos, tmp_path / "shards"), crop, 4, 0)
    else:
        stream = peers.litdata(package, peers.write_optimized(package, photos, tmp_path / "optimized"), crop, 4, 0)
    for _ in range(5):
        check_floats(stream, 4, 24)


def test_a_peer_that_is_missing_is_left_out(capsys):
    assert peers.import_peer("no_such_package") is None
    assert "no_such_package is left out" in capsys.readouterr().out


def check_numbers(result: loader.Result, ratios: set[str]) -> None:
    assert {name for name in result if name.endswith("_ratio")} == ratios
    assert all(value >= 0 for value in result.values())
    assert all(value > 0 for name, value in result.items() if name.endswith(("_ratio", "_per_second")))


def test_raw_section(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "WORKERS", (0,))  # a fork of a process with threads is slow, and Python warns of it
    result = loader.measure_raw(8, TINY, tmp_path)
    kinds = ("", "_first_epoch", "_float")
    to_numpy = {"raw8_vs_numpy_ratio", "raw8_steady_vs_numpy_ratio"}
    check_numbers(result, {f"raw8{kind}_vs_imagefolder_ratio" for kind in kinds} | to_numpy)
    assert result["raw8_imagefolder_workers"] == 0


def test_spdl_stream(photos):
    pytest.importorskip("spdl", exc_type=ImportError)
    package = peers.import_spdl()
    if package is None:
        pytest.skip("no libraries of FFmpeg")
    stream = peers.spdl(package, photos, 24, 4, 2)
    check_floats(stream, 4, 24)
    del stream  # ends its threads
    image = peers.FilteredImage(package, 24)
    image.crop = RandomCrop(area=(1.0, 1.0), aspect=(1.0, 1.0))  # none fits: the middle
    file = sample_images.jpeg_files(photos)[0]
    pixels = image.batch([image((str(file), 3, 5))])[0][0].permute(1, 2, 0).numpy()
    whole = decode_file(file.read_bytes(), 3)[:, 62:437] / 127.5 - 1
    expected = cv2.resize(whole, (24, 24), interpolation=cv2.INTER_AREA)
    assert min(np.abs(pixels - expected).mean(), np.abs(pixels[:, ::-1] - expected).mean()) < 0.05


def test_jpeg_section_leaves_missing_peers_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loader, "WORKERS", (0,))
    monkeypatch.setattr(peers, "import_peer", lambda name: None)
    monkeypatch.setenv(loader.CACHE, "unused")  # the section sets it
    result = loader.measure_jpeg(TINY, tmp_path)
    check_numbers(result, {"jpeg224_vs_imagefolder_ratio", "jpeg224_vs_shards_ratio"})
    assert result["jpeg224_imagefolder_workers"] == 0
    assert "16 JPEG files of" in capsys.readouterr().out


def test_pack_and_first_batch_sections(tmp_path):
    check_numbers(loader.measure_pack(TINY, tmp_path), {"pack_vs_one_process_ratio"})
    result = loader.measure_first_batch(TINY, tmp_path)
    with Dataset(tmp_path / "first_batch.lmdb") as reader:
        assert len(reader) == 5000
        images, labels = reader.read([4095, 4096, 0])
    assert np.array_equal(images[1], images[2])  # the records repeat
    assert not np.array_equal(images[0], images[2])
    assert labels.tolist() == [5, 0, 0]
    assert 0 < result["first_batch_seconds"] < result["first_batch_with_imports_seconds"]
    assert result["first_batch_rss_mib"] >= result["first_batch_later_rss_mib"] >= 0
    assert_raises(RuntimeError, r"missing\.lmdb: no such file", first_batch.measure, tmp_path / "missing.lmdb", 1)


def test_command_line_ends_with_json(tmp_path, monkeypatch, last_line):
    seen: list[tuple[int, Path]] = []

    def section(sizes: loader.Sizes, work: Path) -> loader.Result:
        seen.append((sizes.repeats, work))
        return {"pack_vs_one_process_ratio": 1.5}

    monkeypatch.setitem(loader.SECTIONS, "pack", section)
    result = last_line(loader, ["--only", "pack", "--repeats", "3", "--work", str(tmp_path), "--json"])
    assert result["pack_vs_one_process_ratio"] == 1.5
    assert {"cores", "load_1min_before", "load_1min_after"} < set(result)
    assert [repeats for repeats, _ in seen] == [3]
    assert seen[0][1].parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "raw32,raw"], "--only raw: choose from raw32, raw64, jpeg224, pack, first_batch"),
        (["--repeats", "0"], "--repeats 0"),
        (["--work", "missing"], "--work missing: no such folder"),
    ],
)
def test_command_line_refuses(argv, message):
    assert_raises(UserError, message, loader.main, argv)
