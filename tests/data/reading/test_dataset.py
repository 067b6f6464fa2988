"""Images at any size, whole or in random parts: the same whoever reads them."""

import gc
import hashlib
import io
import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from duetgan.data.images.decode import CODEC_JPEG, RandomCrop, decode_crop
from duetgan.data.lmdb import environment
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.opening import dataset_for_model, open_dataset
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import add_image, make_record, pack_arrays
from duetgan.data.packing.sources import open_source
from duetgan.data.reading import dataset as dataset_module
from duetgan.data.reading.dataset import Dataset, combined_meta
from duetgan.data.reading.sampler import SampleKeys
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import numpy_generator
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, as_file, sample_images

pytestmark = pytest.mark.usefixtures("small_blocks")


def smooth(height: int, width: int, seed: int) -> np.ndarray:
    """Smooth coloured noise, uint8 [height, width, 3]."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return cv2.resize(noise, (width, height), interpolation=cv2.INTER_LINEAR)


def own_sizes(path: Path, count: int = 9) -> list[np.ndarray]:
    """Pack JPEGs of sizes of their own; record i has label i % 3. Returns their pixels."""
    layout = Layout.of(ImageSpec(3, 0, 0), "source")
    pixels = []
    with LMDBWriter(path, layout, classes=CLASSES) as writer:
        for number in range(count):
            sample_image = smooth(24 + 3 * number, 50 - 3 * number, number)
            content = as_file(Image.fromarray(sample_image), "JPEG", quality=95, subsampling=0)
            if number % 2:
                writer.add_record(make_record(sample_image, number % 3, layout, content, CODEC_JPEG))
            else:
                add_image(writer, sample_image, number % 3, payload=content)
            pixels.append(np.asarray(Image.open(io.BytesIO(content))))
        writer.finish()
    return pixels


def middle(pixels: np.ndarray, side: int) -> np.ndarray:
    """The largest square in the middle at side x side px: uint8 [C, side, side]."""
    height, width = pixels.shape[:2]
    square = min(height, width)
    top, left = (height - square) // 2, (width - square) // 2
    return scaled(pixels[top : top + square, left : left + square], side)


def scaled(pixels: np.ndarray, side: int) -> np.ndarray:
    """By the stated rule: bilinear, or area averaging below half the size; uint8 [C, side, side]."""
    method = cv2.INTER_AREA if max(pixels.shape[:2]) > 2 * side else cv2.INTER_LINEAR
    result = cv2.resize(np.ascontiguousarray(pixels), (side, side), interpolation=method)
    return result.reshape(side, side, -1).transpose(2, 0, 1)


@pytest.mark.parametrize("channels", [1, 3])
def test_pyramid_gives_the_stored_level_or_scales_the_next_larger(tmp_path, channels):
    path = tmp_path / "pyramid.lmdb"
    images = np.stack([smooth(32, 32, seed) for seed in range(5)]).transpose(0, 3, 1, 2)[:, :channels]
    pack_arrays(path, images, smallest=8)
    np.testing.assert_array_equal(Dataset(path).read(range(5))[0], images)
    levels = {}
    for side in (8, 16, 32):
        dataset = Dataset(path, resolution=side)
        assert dataset.gathers
        levels[side] = dataset.read(range(5))[0]
    assert (levels[16] != levels[32][:, :, ::2, ::2]).any()
    assert_raises(UserError, "holds no images of 12 px, only of 8, 16, 32: choose", LMDBReader, path, resolution=12)
    for side, source in ((12, 16), (4, 8), (20, 32)):
        for workers in (0, 2):
            dataset = Dataset(path, resolution=side, workers=workers)
            assert not dataset.gathers
            expected = [middle(sample_image.transpose(1, 2, 0), side) for sample_image in levels[source]]
            np.testing.assert_array_equal(dataset.read(range(5))[0], expected)
    wide, _ = Dataset(path, resolution="24x16").read(range(5))  # 16 px are high enough, but too narrow
    parts = [cv2.resize(np.ascontiguousarray(image[5:26]), (24, 16)) for image in images.transpose(0, 2, 3, 1)]
    np.testing.assert_array_equal(wide.transpose(0, 2, 3, 1), np.reshape(parts, (5, 16, 24, channels)))


def test_sizes_of_their_own_are_cropped_in_the_middle_and_a_model_says_the_side(tmp_path):
    pixels = own_sizes(tmp_path / "x.lmdb")
    dataset = Dataset(tmp_path / "x.lmdb", resolution=20, workers=2)
    images, labels = dataset.read([8, 0, 5])
    for image, record in zip(images, (8, 0, 5), strict=True):
        np.testing.assert_array_equal(image, middle(pixels[record], 20))
    assert labels.tolist() == [2, 0, 2]
    np.testing.assert_array_equal(dataset.image(3)[0], pixels[3])
    with pytest.raises(UserError, match=r"x\.lmdb: its images have sizes of their own; set data\.resolution"):
        Dataset(tmp_path / "x.lmdb").read([0])
    pack_arrays(tmp_path / "pyramid.lmdb", sample_images(3, side=32), smallest=8)
    own_sizes(tmp_path / "own.lmdb", 3)

    def model(asked: int | None, resolution: int) -> dict[str, Any]:
        return {"config": {"data": {"resolution": asked}}, "shape": {"channels": 3, "resolution": resolution}}

    cases = [("pyramid", None, 16, 16), ("own", None, 20, 20), ("pyramid", 12, 16, 12)]  # the last as the config asked
    for name, asked, side, expected in [*cases, ("pyramid", None, 12, 32)]:  # refused later, not rescaled
        assert dataset_for_model(tmp_path / f"{name}.lmdb", model(asked, side)).resolution == expected


def test_images_for_a_model_get_its_class_order_and_must_have_its_range(tmp_path):
    def opened(name: str, task: str = "classifier", **shape: Any) -> tuple[list[str], list[int]]:
        shape = {"channels": 3, "resolution": 8} | shape
        model = {"config": {}, "task": task, "classes": CLASSES, "shape": shape}
        with dataset_for_model(tmp_path / f"{name}.lmdb", model) as dataset:
            return dataset.classes, dataset.label_numbers().tolist()

    images, turned = sample_images(3), CLASSES[::-1]
    pack_arrays(tmp_path / "all.lmdb", images, [0, 1, 2], turned)
    pack_arrays(tmp_path / "some.lmdb", images, [0, 1, 0], ["emu", "cat"])
    pack_arrays(tmp_path / "sets.lmdb", images, [0, 1, 0], turned, label_sets=[[0], [0, 2]])
    pack_arrays(tmp_path / "deep.lmdb", images.astype(np.uint16) * 16)
    assert opened("all") == opened("all", "gan") == (CLASSES, [2, 1, 0])
    assert opened("some") == (CLASSES, [2, 0, 2])
    assert opened("some", "gan") == (["emu", "cat"], [0, 1, 0])
    assert opened("sets") == (turned, [0, 1, 0])
    assert opened("deep", pixel_format={"depth": "uint16", "high": 4095.0}) == ([], [0, 0, 0])
    told = r"16 bits \(0 to 4095\), those of the model's training RGB, 16 bits \(0 to 65535\); pack them alike"
    assert_raises(UserError, told, opened, "deep", pixel_format={"depth": "uint16"})


def keys(epochs: int | list[int], count: int = 9, seed: int = 3) -> SampleKeys:
    return SampleKeys(seed, np.broadcast_to(np.asarray(epochs, np.int64), count), np.zeros(count, np.int64))


@pytest.mark.parametrize("encoding", ["source", "raw", "png"])
@pytest.mark.parametrize("workers", [0, 3])
def test_crops_are_drawn_from_seed_epoch_and_record(tmp_path, encoding, workers):
    """In whatever place of a batch, and in another process; without keys the middle is taken."""
    path, crop = tmp_path / "x.lmdb", RandomCrop(area=(0.3, 1.0), aspect=(3 / 4, 4 / 3))
    if encoding == "source":
        pixels = own_sizes(path)
    else:
        pixels = [smooth(32, 32, seed) for seed in range(9)]
        pack_arrays(path, np.stack(pixels).transpose(0, 3, 1, 2), encoding=encoding, smallest=16)
    dataset = pickle.loads(pickle.dumps(Dataset(path, resolution=16, crop=crop, workers=workers)))
    np.testing.assert_array_equal(dataset.read(range(9))[0], [middle(image, 16) for image in pixels])
    records, epochs = [7, 2, 2, 8], [4, 0, 1, 2]
    images, _ = dataset.read(records, keys=keys(epochs, 4))
    for image, record, epoch in zip(images, records, epochs, strict=True):
        height, width = pixels[record].shape[:2]
        top, left, h, w = crop.box(height, width, numpy_generator(3, "augment", epoch, record), (1, 1))
        expected = scaled(pixels[record][top : top + h, left : left + w], 16)
        # libjpeg interpolates the edge of what it decodes a little differently
        assert np.abs(image.astype(int) - expected).max() <= 2


def test_crops_for_rectangles_have_their_aspect(tmp_path):
    pixels, crop = own_sizes(tmp_path / "x.lmdb"), RandomCrop(area=(0.2, 0.4), aspect=(3 / 4, 4 / 3))
    dataset = Dataset(tmp_path / "x.lmdb", resolution="24x12", crop=crop)
    (image,), _ = dataset.read([2], keys=keys(5, 1))
    height, width = pixels[2].shape[:2]
    top, left, h, w = crop.box(height, width, numpy_generator(3, "augment", 5, 2), (12, 24))
    expected = cv2.resize(pixels[2][top : top + h, left : left + w], (24, 12)).transpose(2, 0, 1)
    assert np.abs(image.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_order_memory_and_bounds(tmp_path, encoding):
    dataset = Dataset(pack_shards(tmp_path, encoding), workers=2)
    images, _ = dataset.read([21, 3, 9])
    np.testing.assert_array_equal(images, sample_images(COUNT)[[21, 3, 9]])
    assert (images if encoding == "raw" else images.transpose(0, 2, 3, 1)).flags.c_contiguous  # channels last
    images, labels = dataset.read([])
    assert (images.shape, labels.shape) == ((0, 3, 8, 8), (0,))
    assert labels.dtype == np.int64
    for index, read in itertools.product((-1, COUNT), (lambda index: dataset.read([0, index]), dataset.image)):
        assert_raises(IndexError, f"of {COUNT}", read, index)


COUNT, PARTS = 22, [(0, 9), (9, 10), (10, 22)]
LABELS = np.arange(COUNT) % 3


def pack_shards(folder: Path, encoding: str = "raw") -> list[Path]:
    """whole.lmdb and, in three files of different length, the same images."""
    images = sample_images(COUNT)
    pack_arrays(folder / "whole.lmdb", images, LABELS, CLASSES, encoding=encoding)
    paths = [folder / f"part-{number}.lmdb" for number in range(len(PARTS))]
    for path, (start, end) in zip(paths, PARTS, strict=True):
        pack_arrays(path, images[start:end], LABELS[start:end], CLASSES, encoding=encoding, source=path.stem)
    return paths


@pytest.mark.parametrize("encoding", ["raw", "png"])
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_one_data_set(tmp_path, encoding, workers):
    paths = pack_shards(tmp_path, encoding)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(COUNT), 2))
    options: dict[str, Any] = {"crop": RandomCrop(area=(0.3, 0.9), aspect=(0.8, 1.25)), "workers": workers}
    with Dataset(tmp_path / "whole.lmdb", **options) as whole, Dataset(paths, **options) as parts:
        cropped = [dataset.read(order, keys(0, len(order)))[0] for dataset in (whole, parts)]
    np.testing.assert_array_equal(cropped[0], cropped[1])
    patterns: list[str | Path] = [str(tmp_path / "part-[01].lmdb"), paths[2]]
    for given in (str(tmp_path / "part-*.lmdb"), paths, patterns):
        with open_dataset(given, workers=workers) as parts:
            assert len(parts) == COUNT
            images, labels = parts.read(order)
            np.testing.assert_array_equal(images, sample_images(COUNT)[order])
            np.testing.assert_array_equal(labels, LABELS[order])
            np.testing.assert_array_equal(parts.labels(), LABELS)
            np.testing.assert_array_equal(parts.image(9)[0], sample_images(COUNT)[9].transpose(1, 2, 0))
            assert parts.image(10)[1] == 1
    with Dataset([paths[2], paths[0]]) as parts:  # in the order given
        np.testing.assert_array_equal(parts.read([0, 12])[0], sample_images(COUNT)[[10, 0]])
        parts.relabel(["emu", "cat", "dog", "fox"])
        labels = np.array([1, 2, 0])[np.concatenate([LABELS[10:22], LABELS[:9]])]
        np.testing.assert_array_equal(parts.read(range(21))[1], labels)
        assert (parts.classes[3], parts.meta.by_class) == ("fox", [7, 7, 7, 0])
        assert [parts.image(index)[1] for index in range(4)] == labels[:4].tolist()
        parts.relabel(["cat", "emu", "dog"])
        again = pickle.loads(pickle.dumps(parts)).labels()
        np.testing.assert_array_equal(again, np.array([1, 0, 2])[labels])


def test_shards_pool_their_metadata(tmp_path):
    paths = pack_shards(tmp_path)
    whole, parts = Dataset(tmp_path / "whole.lmdb"), Dataset(paths)
    for name in ("classes", "histogram", "channels", "resolutions", "encoding", "count"):
        assert getattr(parts.meta, name) == getattr(whole.meta, name)
    np.testing.assert_allclose(parts.meta.mean, whole.meta.mean, rtol=1e-13)
    np.testing.assert_allclose(parts.meta.std, whole.meta.std, rtol=1e-13)
    np.testing.assert_array_equal(parts.signatures(), whole.signatures())
    assert (parts.meta.source, parts.meta.fingerprint) == ("part-0 + part-1 + part-2", "")
    hashes = {dataset.meta.content_hash for dataset in (whole, parts, Dataset(paths[0]), Dataset(paths[::-1]))}
    assert len(hashes) == 4  # a run resumed on other files, or in another order, is noticed
    changes: tuple[dict[str, Any], ...] = (
        {"fingerprint": "1"},
        {"fingerprint": "", "passport": {"step": 3}},
        {"fingerprint": "2", "passport": {"step": 5}},
    )
    files = [SimpleNamespace(path="x", meta=whole.meta.model_copy(update=change)) for change in changes]
    meta = combined_meta(files)  # type: ignore[arg-type]
    assert (meta.fingerprint, meta.passport) == ("", {"step": 3})
    for name in "ab":
        pack_arrays(tmp_path / f"unlabelled-{name}.lmdb", sample_images(3))
    dataset = open_dataset(tmp_path / "unlabelled-*.lmdb")
    assert (dataset.classes, dataset.meta.histogram, dataset.labels().tolist()) == ([], [], [0] * 6)


def test_shards_that_do_not_fit_and_patterns_without_files_are_named(tmp_path):
    first = tmp_path / "first.lmdb"
    how: dict[str, Any] = {"images": sample_images(4), "labels": [0, 1, 1, 0], "classes": CLASSES}
    pack_arrays(first, **how)
    others: dict[str, dict[str, Any]] = {
        "classes": {"classes": ["cat", "dog"]},
        "channels": {"images": sample_images(4, 1)},
        "resolutions": {"images": sample_images(4, side=16)},
        "encoding": {"encoding": "png"},
        "sets": {"label_sets": [[0], [0, 2]]},
        "size": {"images": sample_images(4, side=16)[:, :, :8]},
        "pixel_format": {"images": sample_images(4).astype(np.uint16)},
    }
    for name, options in others.items():
        other = tmp_path / f"other {name}.lmdb"
        pack_arrays(other, **how | options)
        with pytest.raises(UserError, match=rf"other {name}\.lmdb does not belong to .*first\.lmdb: {name} "):
            Dataset([first, other])
    assert_raises(UserError, r"train-\*\.lmdb: no file matches this pattern", open_dataset, tmp_path / "train-*.lmdb")
    assert_raises(UserError, "name at least one", open_dataset, [])
    pack_arrays(tmp_path / "all.lmdb", sample_images(6), [0, 1, 2] * 2, CLASSES)
    with open_source(str(tmp_path / "all.lmdb")) as source:
        pack(source, tmp_path / "train.lmdb", val_share=0.5, duplicates=False)
    with Dataset([tmp_path / "train.lmdb"] * 2) as twice:
        assert twice.meta.split is None
        fingerprint = 2 * twice.shards[0].meta.fingerprint
        assert twice.meta.fingerprint == hashlib.sha256(fingerprint.encode()).hexdigest()
    with open_source(str(tmp_path / "train-val.lmdb")) as source:  # what a part is stays known
        pack(source, tmp_path / "train-again.lmdb", duplicates=False)
    told = "train-again.lmdb hold training images and images held out from training"
    assert_raises(UserError, told, Dataset, [tmp_path / "train.lmdb", tmp_path / "train-again.lmdb"])
    odd = tmp_path / "a[1].lmdb"  # a file of this name wins over the pattern
    pack_arrays(odd, sample_images(3))
    assert len(Dataset(odd)) == 3


def batches(dataset: Dataset, **options: object) -> list[list[torch.Tensor]]:
    return list(torch.utils.data.DataLoader(dataset, batch_size=5, **options))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
def test_torch_data_loader(tmp_path):
    """Its workers are processes, however they are started; also with decoding threads in them."""
    dataset = Dataset(pack_shards(tmp_path, "png"), workers=2)
    image, label = dataset[4]
    np.testing.assert_array_equal(image, sample_images(COUNT)[4])
    assert label == 1
    expected = batches(dataset)
    np.testing.assert_array_equal(torch.cat([images for images, _ in expected]), sample_images(COUNT))
    np.testing.assert_array_equal(torch.cat([labels for _, labels in expected]), LABELS)
    for method, count in (("fork", 2), ("spawn", 1), ("forkserver", 1)):  # the last two import torch in each worker
        found = batches(dataset, num_workers=count, multiprocessing_context=method)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_threads_decode_side_by_side(tmp_path, monkeypatch):
    pack_shards(tmp_path, "png")
    together, before = threading.Barrier(3), set(threading.enumerate())

    def decode(*arguments: Any) -> None:
        together.wait(timeout=10)  # raises unless three images are decoded at once
        decode_crop(*arguments)

    monkeypatch.setattr(dataset_module, "decode_crop", decode)
    with Dataset(tmp_path / "whole.lmdb", workers=3) as dataset:
        for _ in range(2):
            np.testing.assert_array_equal(dataset.read(range(12))[0], sample_images(COUNT)[:12])
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_what_is_being_read_stays_open(tmp_path, monkeypatch, encoding):
    """Where another thread closes the data set meanwhile: reading an unmapped file would end the process."""
    pack_shards(tmp_path, encoding)
    dataset = Dataset(tmp_path / "whole.lmdb")
    dataset.read([0])
    owner, name = (environment.RawBlocks, "copy") if encoding == "raw" else (dataset_module, "decode_crop")
    real = getattr(owner, name)

    def closing(*arguments: Any) -> None:
        dataset.close()
        gc.collect()
        if not environment._handles:
            pytest.fail("the file was closed")
        real(*arguments)

    monkeypatch.setattr(owner, name, closing)
    np.testing.assert_array_equal(dataset.read([2, 9])[0], sample_images(COUNT)[[2, 9]])


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_many_readers_of_one_file(tmp_path, encoding):
    pack_shards(tmp_path, encoding)
    whole = tmp_path / "whole.lmdb"
    shared = Dataset(whole, workers=2)
    wrong: list[int] = []

    def work(number: int) -> None:
        dataset = shared if number % 2 else Dataset([whole, whole], workers=number)
        for order in np.random.default_rng(number).integers(0, COUNT, (40, 8)):
            if not np.array_equal(dataset.read(order)[0], sample_images(COUNT)[order]):
                wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [None] * 4
    assert wrong == []
