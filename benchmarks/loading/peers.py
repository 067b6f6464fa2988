"""The peers: torchvision's ImageFolder, NumPy, webdataset and litdata, each as its own documentation uses it."""

import importlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.loading.images import jpeg_files
from benchmarks.loading.timing import Stream, endless
from data.sampler import GlobalSampler

Transform = Callable[[Image.Image], torch.Tensor]

SHARDS = 8  # tar files: two for each of the most workers
SHUFFLE_BUFFER = 1000  # samples
CHUNK_BYTES = 16 << 20


def small_transform() -> Transform:
    """Mirrored at random, float32 in [-1, 1]."""
    return transforms.Compose([transforms.RandomHorizontalFlip(), *_to_float()])


def crop_transform(side: int) -> Transform:
    """A random part scaled to side x side px, mirrored at random, float32 in [-1, 1]."""
    flip = transforms.RandomHorizontalFlip()
    return transforms.Compose([transforms.RandomResizedCrop(side), flip, *_to_float()])


def _to_float() -> list[Callable]:
    return [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]


def import_peer(name: str) -> ModuleType | None:
    """The package, or None if it is not installed or cannot be imported; one line then says so."""
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")  # it asks the package index at every start
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"  {name} is left out: {error} (pip install '.[bench]')", flush=True)
        return None


def imagefolder(folder: Path, transform: Transform, batch_size: int, workers: int) -> Stream:
    """ImageFolder + DataLoader: shuffled batches, endlessly."""
    dataset = ImageFolder(str(folder), transform)
    sampler = RandomSampler(dataset, num_samples=1 << 40)  # one permutation after the other: epochs without a pause
    return iter(DataLoader(dataset, batch_size, sampler=sampler, num_workers=workers))


def numpy_gather(
    images: np.ndarray,  # uint8 [n, C, H, W]
    labels: np.ndarray,  # int64 [n]
    batch_size: int,
    batches: int,
) -> Callable[[], Stream]:
    """Batches from memory with the indices that ours has; these are drawn here and cost the stream nothing.

    numpy.take: faster than indexing.
    """
    sampler = GlobalSampler(len(images), batch_size=batch_size, seed=0)
    indices = [sampler.next_batch()[0] for _ in range(batches)]

    def stream() -> Stream:
        for batch in indices:
            yield torch.from_numpy(np.take(images, batch, axis=0)), torch.from_numpy(np.take(labels, batch))

    return stream


def write_shards(photos: Path, folder: Path) -> list[str]:
    """Tar files of the photographs and their classes, for webdataset."""
    folder.mkdir()
    shards = [folder / f"{number:02d}.tar" for number in range(SHARDS)]
    files = jpeg_files(photos)
    for number, shard in enumerate(shards):
        with tarfile.open(shard, "w") as archive:
            for file in files[number::SHARDS]:
                _add(archive, f"{file.stem}.jpg", file.read_bytes())
                _add(archive, f"{file.stem}.cls", file.parent.name.encode())
    return [str(shard) for shard in shards]


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def webdataset(package: ModuleType, shards: list[str], transform: Transform, batch_size: int, workers: int) -> Stream:
    """Shuffled batches, endlessly."""
    dataset = (
        package.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(SHUFFLE_BUFFER)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform, int)
        .batched(batch_size, partial=False)
        .repeat()
    )
    return _tensors(package.WebLoader(dataset, batch_size=None, num_workers=workers))


def _tensors(loader: Iterator) -> Stream:
    for images, labels in loader:
        yield images, torch.as_tensor(labels)


def write_optimized(package: ModuleType, photos: Path, folder: Path) -> str:
    """The photographs' bytes and classes in litdata's chunks, written in this process."""
    cache = package.streaming.Cache(str(folder), chunk_bytes=CHUNK_BYTES)
    for index, file in enumerate(jpeg_files(photos)):
        cache[index] = {"image": file.read_bytes(), "label": int(file.parent.name)}
    cache.done()
    cache.merge()
    return str(folder)


class DecodeBytes:
    """A sample of `write_optimized` to an image and its label."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, sample: dict) -> tuple[torch.Tensor, int]:
        """float32 [3, H, W] and the class."""
        with Image.open(io.BytesIO(sample["image"])) as image:
            return self.transform(image.convert("RGB")), sample["label"]


def litdata(package: ModuleType, folder: str, transform: Transform, batch_size: int, workers: int) -> Stream:
    """Shuffled batches, one epoch after the other. Workers start with each: persistent ones take seconds to end."""
    dataset = package.StreamingDataset(folder, shuffle=True, transform=DecodeBytes(transform))
    loader = package.StreamingDataLoader(dataset, batch_size=batch_size, num_workers=workers, drop_last=True)
    return endless(lambda: iter(loader))
