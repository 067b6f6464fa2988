"""The peers: torchvision's ImageFolder, NumPy, webdataset, litdata and SPDL, each as its own documentation uses it."""

import importlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.loading.images import jpeg_files
from benchmarks.loading.timing import Stream, endless
from duetgan.data.images.decode import RandomCrop
from duetgan.data.reading.sampler import GlobalSampler, Position

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
    position = Position()
    indices = []
    for _ in range(batches):
        indices.append(sampler.batch(position)[0])
        position = sampler.next_position(position)

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


def import_spdl() -> ModuleType | None:
    """SPDL, or None if it is not there, or FFmpeg's libraries, which it decodes with, are not."""
    package = import_peer("spdl")
    if package is None or import_peer("spdl.pipeline") is None or import_peer("spdl.io") is None:
        return None
    try:
        package.io.load_image  # noqa: B018 - FFmpeg is looked for at the first use
    except RuntimeError:
        print("  spdl is left out: it finds no libraries of FFmpeg (LD_LIBRARY_PATH)", flush=True)
        return None
    return package


class FilteredImage:
    """A path and a class to a decoded image, cropped at random, scaled and mirrored by FFmpeg's filters."""

    def __init__(self, package: ModuleType, side: int) -> None:
        self.io, self.side, self.crop = package.io, side, RandomCrop(area=(0.08, 1.0), aspect=(3 / 4, 4 / 3))

    def __call__(self, sample: tuple[str, int, int]) -> tuple[Any, int]:
        """Frames of side x side px and the class; the last of the sample is the seed of its draws."""
        path, label, seed = sample
        draws = np.random.default_rng(seed)
        packets = self.io.demux_image(path)
        top, left, height, width = self.crop.box(packets.codec.height, packets.codec.width, draws, (1, 1))
        flip = ",hflip" if draws.random() < 0.5 else ""
        scale = f"scale={self.side}:{self.side}:flags=bilinear{flip},format=pix_fmts=rgb24"
        return self.io.decode_packets(packets, f"crop={width}:{height}:{left}:{top}:exact=1,{scale}"), label

    def batch(self, samples: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [n, 3, S, S] in [-1, 1], and the classes."""
        frames, labels = zip(*samples, strict=True)
        images = self.io.to_torch(self.io.convert_frames(list(frames)))  # uint8 [n, S, S, 3]
        return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1), torch.tensor(labels)


def spdl(package: ModuleType, photos: Path, side: int, batch_size: int, threads: int) -> Stream:
    """Shuffled batches, endlessly, of a pipeline of threads in this process; two batches wait at its end."""
    files = [(str(file), int(file.parent.name)) for file in jpeg_files(photos)]
    image, draws = FilteredImage(package, side), np.random.default_rng(0)

    def samples() -> Iterator[tuple[str, int, int]]:
        while True:
            for index in draws.permutation(len(files)).tolist():
                yield *files[index], int(draws.integers(1 << 62))

    builder = package.pipeline.PipelineBuilder().add_source(samples()).pipe(image, concurrency=max(1, threads))
    builder = builder.aggregate(batch_size, drop_last=True).pipe(image.batch).add_sink(2)
    pipeline = builder.build(num_threads=max(1, threads))
    with pipeline.auto_stop():
        yield from pipeline
