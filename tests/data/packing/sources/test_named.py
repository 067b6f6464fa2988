"""Idx files, Fashion-MNIST, its embedded sample and CIFAR-10: every format and place, and damaged files."""

import gzip
import json
import pickle
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from duetgan.data.packing.sources import named, open_source
from duetgan.data.packing.sources.named import DEBIAN, SAMPLE, cache_folder, find_idx, read_idx
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from tests.data.packing.sources.make_sample import idx_gz, sample_files
from tests.data.packing.sources.source_files import refused


def write_idx(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray, suffix: str = ".gz") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        content = idx_gz(array)
        (folder / f"{prefix}-{kind}-ubyte{suffix}").write_bytes(content if suffix else gzip.decompress(content))


IMAGES = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 4


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files(tmp_path, suffix):
    write_idx(tmp_path, "train", IMAGES, LABELS, suffix)
    write_idx(tmp_path, "t10k", IMAGES[:5], LABELS[:5], suffix)
    for source in (open_source(str(tmp_path)), open_source("idx", root=tmp_path)):
        assert source.classes == ["0", "1", "2", "3"]
        assert (source.spec, len(source)) == (ImageSpec(1, 28, 28), 12)
        np.testing.assert_array_equal(source.content(7), IMAGES[7, :, :, None])
        assert source.labels()[7] == 3
        assert source.splits == ("test", "train")
    assert len(open_source(str(tmp_path), split="test")) == 5
    for kind in ("images-idx3", "labels-idx1"):
        (tmp_path / f"train-{kind}-ubyte{suffix}").unlink()
    for source in (open_source(str(tmp_path), split="test"), open_source("idx", root=tmp_path, split="val")):
        assert (len(source), source.splits) == (5, ("test",))


def test_root_must_exist_and_fit(photos, tmp_path):
    refused("fashion-mnist", "no such folder", root=tmp_path / "typo")
    refused(photos, "--root does not apply", root=tmp_path)
    refused("sample", "--root does not apply", root=tmp_path)


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """The folders into which torchvision's data set was downloaded: what stands for it writes four idx files."""
    roots: list[str] = []

    def download(root: str, *, download: bool) -> None:
        assert download
        roots.append(root)
        for prefix in ("train", "t10k"):
            write_idx(Path(root) / "FashionMNIST" / "raw", prefix, IMAGES, LABELS, "")

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", download)
    monkeypatch.delenv("DUET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return roots


def test_fashion_mnist_is_looked_for_in_order(tmp_path, monkeypatch, downloads):
    debian, root = tmp_path / "debian", tmp_path / "root"
    write_idx(debian, "train", IMAGES[:3], LABELS[:3])
    write_idx(root, "train", IMAGES[:6], LABELS[:6])
    monkeypatch.setattr(named, "DEBIAN", debian)
    assert len(open_source("fashion-mnist")) == 3
    assert len(open_source("fashion-mnist", root=root)) == 6  # what is given wins
    assert not downloads
    monkeypatch.setattr(named, "DEBIAN", tmp_path / "not-installed")
    assert len(open_source("fashion_mnist")) == 12
    assert len(open_source("fashion-mnist")) == 12
    assert downloads == [str(tmp_path / "cache" / "duet")]  # once
    assert cache_folder() == tmp_path / "cache" / "duet"
    (tmp_path / "tv").mkdir()
    assert open_source("fashion-mnist", root=tmp_path / "tv", split="test").classes[9] == "Ankle boot"
    assert len(downloads) == 2


def test_failed_download_is_one_line(tmp_path, monkeypatch, downloads):
    monkeypatch.setattr(named, "DEBIAN", tmp_path / "not-installed")
    network, route = RuntimeError("Error downloading:\nTried mirror, got:\n<no network>\n"), OSError("<no route>")
    for place, error in (("FashionMNIST", network), ("cifar.download_and_extract_archive", route)):
        monkeypatch.setattr(f"torchvision.datasets.{place}", Mock(side_effect=error))
    refused("fashion-mnist", r"Fashion-MNIST .*\(<no network>\); .*dataset-fashion-mnist or pass --root")
    refused("cifar10", r"CIFAR-10 .*\(<no route>\); pass --root")


COLOUR = np.random.default_rng(1).integers(0, 256, (15, 32, 32, 3), dtype=np.uint8)
CIFAR_LABELS = (np.arange(15) * 7 % 10).tolist()


def parts(split: str) -> list[tuple[str, slice]]:
    """Names of the batches and their rows of COLOUR."""
    if split == "test":
        return [("test_batch", slice(10, 15))]
    return [(f"data_batch_{number + 1}", slice(2 * number, 2 * number + 2)) for number in range(5)]


def write_npm(folder: Path) -> None:
    for split in ("train", "test"):
        labels = []
        for name, rows in parts(split):
            Image.fromarray(COLOUR[rows].reshape(-1, 1024, 3)).save(folder / f"{name}.png")
            labels += CIFAR_LABELS[rows]
        (folder / f"{split}_lables.json").write_text(json.dumps(labels))


def write_python(folder: Path) -> None:
    for name, rows in parts("train") + parts("test"):
        pixels = COLOUR[rows].transpose(0, 3, 1, 2).reshape(-1, 3072)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": CIFAR_LABELS[rows]}, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": []}))


@pytest.mark.parametrize(
    ("write", "inner"),
    [(write_npm, "package"), (write_python, "cifar-10-batches-py")],
)
def test_cifar10_formats(tmp_path, monkeypatch, write, inner):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    for folder, root in ((tmp_path / "a" / inner, tmp_path / "a"), (tmp_path / "b", tmp_path / "b")):
        folder.mkdir(parents=True)
        write(folder)
        for split, rows in (("train", slice(0, 10)), ("test", slice(10, 15))):
            source = open_source("cifar10", split=split, root=root)
            assert (source.name, source.spec, source.classes[3]) == (f"cifar10 {split}", ImageSpec(3, 32, 32), "cat")
            assert source.labels().tolist() == CIFAR_LABELS[rows]
            np.testing.assert_array_equal([source.content(i) for i in range(len(source))], COLOUR[rows])


def test_cifar10_damage(tmp_path):
    write_npm(tmp_path)
    for labels, told in (("[1, 2]", "cannot reshape"), ("[1, 2, 3, 4, 10]", "other than 0 to 9"), ("{}", "")):
        (tmp_path / "test_lables.json").write_text(labels)
        refused("cifar10", rf"test_lables\.json cannot be read .*{told}", split="test", root=tmp_path)
    (tmp_path / "test_batch.png").write_bytes(b"text")
    refused("cifar10", r"test_batch\.png cannot be read", split="test", root=tmp_path)


def test_cifar10_pickle_cannot_run_code(tmp_path, monkeypatch):
    """Files of another MD5 than the published ones are not unpickled."""
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", lambda *_, **__: None)
    write_python(tmp_path)
    evil = f"cos\nsystem\n(S'touch {tmp_path}/was-here'\ntR."
    (tmp_path / "test_batch").write_text(evil)
    message = r"CIFAR-10 was not found here and cannot be downloaded \([^\n]*corrupted"
    refused("cifar10", message, split="test", root=tmp_path)
    assert not (tmp_path / "was-here").exists()
    pickle.loads(evil.encode())
    assert (tmp_path / "was-here").exists()


def test_idx_files_that_are_missing_or_wrong(tmp_path):
    assert find_idx(tmp_path, "train") is None
    write_idx(tmp_path, "train", IMAGES, LABELS)
    assert find_idx(tmp_path, "train") is not None
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    assert find_idx(tmp_path, "train") is None
    write_idx(tmp_path, "train", IMAGES, LABELS[:5])
    refused(tmp_path, "do not match")
    refused(tmp_path, "lacks t10k", split="test")
    whole = idx_gz(IMAGES)
    for name, content, message in (
        ("x.gz", whole[:500], r"x\.gz cannot be read"),
        ("plain", gzip.decompress(whole)[:-1], "plain is not an idx file of bytes, or damaged"),
        ("plain", b"hello", "plain is not an idx file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_idx(tmp_path / name)
    refused("idx", "idx needs --root")


@pytest.mark.parametrize(("split", "count"), [("train", 10_000), ("test", 2_000)])
def test_class_balance(split, count):
    source = open_source("sample", split=split)
    assert (source.name, len(source), source.spec) == (f"sample {split}", count, ImageSpec(1, 28, 28))
    assert np.bincount(source.labels()).tolist() == [count // 10] * 10
    assert len(source.classes) == 10
    assert (np.diff(source.labels()) < 0).any()  # in the set's order, not sorted by class


def test_size_and_licence():
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) <= 6_000_000
    licence = (SAMPLE / "LICENSE").read_text()
    assert "Zalando SE" in licence
    assert "Permission is hereby granted, free of charge" in licence
    assert "fashion-mnist" in (SAMPLE / "README.md").read_text()


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_files_are_what_the_script_makes():
    files = sample_files(None)
    assert len(files) == 4
    for name, content in files.items():
        committed = (SAMPLE / name).read_bytes()
        assert gzip.decompress(content) == gzip.decompress(committed), name
        if "ng" not in zlib.ZLIB_RUNTIME_VERSION:  # zlib-ng compresses to other bytes
            assert content == committed, name
