"""How fast images come, ours against the peers on the same images: medians of alternating repeats of one run.

`python benchmarks/loader.py [--json] [--only raw32,raw64,jpeg224,pack,first_batch] [--repeats N] [--work DIR]`

raw32, raw64: small raw images with labels in shuffled batches, against torchvision's ImageFolder on PNG files and
NumPy gathering the same batches from memory. jpeg224: 500x375 JPEG files to augmented 224 px float crops, against
ImageFolder, webdataset, litdata and SPDL. pack: parallel packing against one process. first_batch: a million records. A
peer runs with the best of 0, 1, 2 and 4 workers (SPDL: threads), searched for at the beginning.
"""

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.harness import parser_of, show
from benchmarks.loading import first_batch, ours, packing, peers
from benchmarks.loading import images as sample_images
from benchmarks.loading.timing import Rates, Stream, Window, alternate, best_of, ratio, stream_rate
from duetgan.data.images.decode import RandomCrop
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import pack_arrays
from duetgan.data.packing.sources import open_source
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.machine import cores

Result = dict[str, float | int]

RAW_WINDOW = Window(skipped=8, timed=40)
PHOTO_WINDOW = Window(skipped=8, timed=24)
WORKERS = (0, 1, 2, 4)  # tried for a peer, who then runs with the best
PREFETCH = (0, 2)  # batches read ahead that are tried for ours; torch's workers read two ahead


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. The windows count batches."""

    repeats: int = 5
    raw_files: int = 5000  # different small images, PNG files for ImageFolder
    raw_images: dict[int, int] = field(default_factory=lambda: {32: 50_000, 64: 20_000})  # by px; they repeat
    raw_batch: int = 256
    raw_epochs: int = 10  # timed; the first verifies every block
    raw_window: Window = RAW_WINDOW  # of ImageFolder
    photos: int = 2304  # no fewer than the window below takes
    photo_batch: int = 64
    photo_window: Window = PHOTO_WINDOW
    pack_photos: int = 2400  # several seconds, or packing starts no workers by itself
    pack_size: int = 128  # px
    records: dict[str, int] = field(default_factory=lambda: {"raw": 1_000_000, "png": 200_000})  # by encoding
    record_batches: int = 200


def make_raw(side: int, sizes: Sizes, work: Path) -> tuple[Path, Path, np.ndarray, np.ndarray]:
    """The same small images as a folder of PNG files and, repeated, as a packed file and as arrays with labels."""
    count = sizes.raw_images[side]
    distinct = sample_images.small_images(min(sizes.raw_files, count), side)
    sample_images.write_png_folder(work / "png", distinct)
    images = np.resize(distinct, (count, *distinct.shape[1:]))
    labels = np.array([sample_images.label_of(index % len(distinct)) for index in range(count)])
    pack_arrays(work / "raw.lmdb", images, labels, [str(label) for label in range(sample_images.CLASSES)])
    return work / "png", work / "raw.lmdb", images, labels


def measure_raw(side: int, sizes: Sizes, work: Path) -> Result:
    """Small raw images of side x side px. Every turn of ours opens the file and verifies its blocks anew, within the
    time; `_steady` leaves the first epoch out of it, `_first_epoch` is that epoch alone.
    """
    folder, path, images, labels = make_raw(side, sizes, work)
    batch, epoch = sizes.raw_batch, -(-len(images) // sizes.raw_batch)
    first, whole = Window(skipped=0, timed=epoch), Window(skipped=0, timed=sizes.raw_epochs * epoch)
    steady = Window(skipped=epoch, timed=(sizes.raw_epochs - 1) * epoch)
    gather = peers.numpy_gather(images, labels, batch, whole.timed)
    open_ours = partial(ours.stream, path, batch)

    def imagefolder(workers: int) -> float:
        return stream_rate(
            partial(peers.imagefolder, folder, peers.small_transform(), batch, workers), sizes.raw_window
        )

    workers = best_of("imagefolder", "workers", imagefolder, WORKERS)
    contenders = {
        "": partial(stream_rate, open_ours, whole),
        "_steady": partial(stream_rate, open_ours, steady),
        "_first_epoch": partial(stream_rate, open_ours, first),
        "_float": partial(stream_rate, partial(open_ours, floats=True), whole),
        "_imagefolder": partial(imagefolder, workers),
        "_numpy": partial(stream_rate, gather, whole),
    }
    name = f"raw{side}"
    rates = alternate({name + contender: turn for contender, turn in contenders.items()}, sizes.repeats)
    return {
        f"{name}_vs_imagefolder_ratio": ratio(rates, name, f"{name}_imagefolder"),
        f"{name}_vs_numpy_ratio": ratio(rates, name, f"{name}_numpy"),
        f"{name}_steady_vs_numpy_ratio": ratio(rates, f"{name}_steady", f"{name}_numpy"),
        f"{name}_first_epoch_vs_imagefolder_ratio": ratio(rates, f"{name}_first_epoch", f"{name}_imagefolder"),
        f"{name}_float_vs_imagefolder_ratio": ratio(rates, f"{name}_float", f"{name}_imagefolder"),
        **medians(rates),
        f"{name}_imagefolder_workers": workers,
    }


def medians(rates: Rates) -> Result:
    """Images per second of every contender."""
    return {f"{name}_images_per_second": statistics.median(values) for name, values in rates.items()}


def measure_jpeg(sizes: Sizes, work: Path) -> Result:
    """500x375 JPEG files to augmented float crops of 224 px."""
    photos, path = work / "photos", work / "photos.lmdb"
    size = sample_images.write_jpeg_folder(photos, sizes.photos)
    print(f"  {sizes.photos} JPEG files of {size / sizes.photos / 1024:.0f} KiB on average", flush=True)
    with open_source(str(photos), split="train", root=None) as source:
        pack(source, path, encoding="source", workers=0)
    threads = cores() if cores() > 1 else 0

    def open_ours(prefetch: int = 0) -> Stream:
        crop, size = RandomCrop(area=(0.08, 1.0), aspect=(3 / 4, 4 / 3)), sizes.photo_batch
        return ours.stream(path, size, resolution=224, crop=crop, workers=threads, prefetch=prefetch, floats=True)

    def rate(open_stream: Callable[[int], Stream], count: int) -> float:
        return stream_rate(partial(open_stream, count), sizes.photo_window)

    shards = str(Path(peers.write_shards(photos, work / "shards")[0]).parent)
    ahead = best_of("ours", "batches ahead", partial(rate, lambda count: open_ours(prefetch=count)), PREFETCH)
    contenders = {"jpeg224": partial(rate, lambda count: open_ours(prefetch=count), ahead)}
    found: Result = {"jpeg224_threads": threads, "jpeg224_prefetch": ahead}
    for name, open_peer in jpeg_peers(photos, work, sizes.photo_batch, shards).items():
        workers = best_of(name, "workers", partial(rate, open_peer), WORKERS)
        contenders[f"jpeg224_{name}"] = partial(rate, open_peer, workers)
        found[f"jpeg224_{name}_workers"] = workers
    rates = alternate(contenders, sizes.repeats)
    ratios = {
        name.replace("224_", "224_vs_") + "_ratio": ratio(rates, "jpeg224", name) for name in rates if name != "jpeg224"
    }
    return {**ratios, **medians(rates), **found}


def jpeg_peers(photos: Path, work: Path, batch_size: int, shards: str) -> dict[str, Callable[[int], Stream]]:
    """The peers that are installed, with the photographs in the form that they read; each takes a number of workers."""
    transform = peers.crop_transform(224)
    found: dict[str, Callable[[int], Stream]] = {
        "imagefolder": partial(peers.imagefolder, photos, transform, batch_size)
    }
    webdataset = peers.import_peer("webdataset")
    if webdataset is not None:
        tars = sorted(map(str, Path(shards).iterdir()))
        found["webdataset"] = partial(peers.webdataset, webdataset, tars, transform, batch_size)
    litdata = peers.import_peer("litdata")
    if litdata is not None:
        optimized = peers.write_optimized(litdata, photos, work / "optimized")
        found["litdata"] = partial(peers.litdata, litdata, optimized, transform, batch_size)
    spdl = peers.import_spdl()
    if spdl is not None:
        found["spdl"] = partial(peers.spdl, spdl, photos, 224, batch_size)
    return found


def measure_pack(sizes: Sizes, work: Path) -> Result:
    """500x375 JPEG files to raw images: the default number of processes against one, in fresh interpreters."""
    photos, path = work / "photos", work / "pack.lmdb"
    sample_images.write_jpeg_folder(photos, sizes.pack_photos)

    def rate(workers: int | None) -> float:
        return packing.measure(photos, path, sizes.pack_size, workers)["rate"]

    rates = alternate({"pack": partial(rate, None), "pack_one_process": partial(rate, 0)}, sizes.repeats)
    return {"pack_vs_one_process_ratio": ratio(rates, "pack", "pack_one_process"), **medians(rates)}


def measure_first_batch(sizes: Sizes, work: Path) -> Result:
    """Start to first batch on a file of many tiny records, in fresh processes; the file lies in the page cache."""
    result: Result = {}
    for encoding, count in sizes.records.items():
        name = "first_batch" if encoding == "raw" else f"first_batch_{encoding}"
        path = work / f"{name}.lmdb"
        seconds = first_batch.write_tiny_records(path, count, encoding)
        print(f"  {count:,} {encoding} records written in {seconds:.1f} s, {path.stat().st_size:,} bytes", flush=True)
        runs = [first_batch.measure(path, sizes.record_batches) for _ in range(sizes.repeats)]
        result |= {f"{name}_{key}": statistics.median(run[key] for run in runs) for key in runs[0]}
    return result


SECTIONS: dict[str, Callable[[Sizes, Path], Result]] = {
    "raw32": partial(measure_raw, 32),
    "raw64": partial(measure_raw, 64),
    "jpeg224": measure_jpeg,
    "pack": measure_pack,
    "first_batch": measure_first_batch,
}


def run(names: list[str], sizes: Sizes, work: Path) -> Result:
    """Measure the sections named, each in an empty folder in `work` that is removed after it."""
    before, result = os.getloadavg()[0], Result()
    for name in names:
        started = time.perf_counter()
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=work) as folder:
            result |= SECTIONS[name](sizes, Path(folder))
        print(f"  done in {time.perf_counter() - started:.0f} s", flush=True)
    return {
        **result,
        "repeats": sizes.repeats,
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "load_1min_before": before,
        "load_1min_after": os.getloadavg()[0],
    }


def main(argv: list[str]) -> None:
    """The command line."""
    parser = parser_of("loader", __doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="NAME,...", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--repeats", type=int, default=Sizes.repeats)
    parser.add_argument("--work", type=Path, metavar="DIR", help="where files are made; default: the system's folder")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more workers than cores: meant
    names = options.only.split(",")
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        raise UserError(f"--only {unknown[0]}: choose from {', '.join(SECTIONS)}")
    if options.repeats < 1:
        raise UserError(f"--repeats {options.repeats}: must be at least 1")
    if options.work is not None and not options.work.is_dir():
        raise UserError(f"--work {options.work}: no such folder; make it first")
    result = run(names, Sizes(repeats=options.repeats), options.work)
    show(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(run_cli(main))
