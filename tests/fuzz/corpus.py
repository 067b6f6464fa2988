"""The small real files that are mutated: packed files, runs of both tasks, images, and what else can be packed."""

import gzip
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
from PIL import Image
from pyarrow.parquet import write_table

from duetgan.commands import train
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import pack_arrays
from duetgan.data.packing.sources import open_source
from tests.data.packing.sources.make_sample import idx_gz
from tests.slim import slim_down

SIDE = 16  # px
CLASSES = ("cat", "dog", "emu")
FORMATS = {"a.png": "RGB", "b.jpg": "RGB", "c.bmp": "RGB", "d.gif": "P", "e.webp": "RGB", "f.tif": "RGB"}
FORMATS |= {"g.png": "RGBA", "h.png": "I;16", "i.jpg": "L", "j.jpg": "CMYK", "k.png": "P"}
GAN = """
task: gan
steps: 8
batch_size: 8
generator: {z_dim: 8, w_dim: 8, mapping_layers: 2, channel_base: 64, channel_max: 8}
discriminator: {channel_base: 64, channel_max: 8, minibatch_std_group: 2}
"""
CLASSIFIER = """
task: classifier
steps: 8
batch_size: 8
model: {stem: small-stride2}
optimizer: {lr: 0.02, warmup_steps: 2}
augment: {flip: true, shift: 1}
"""
COMMON = """
log: {{every: 1, samples_every: 0, tensorboard: false}}
checkpoint: {{every: 1}}
evaluation: {{every: 0, n: 12}}
data: {{path: {data}/train.lmdb, val_path: {data}/test.lmdb, workers: 0}}
"""
TASKS = {"gan": GAN, "classifier": CLASSIFIER}


def make(folder: Path) -> None:
    """All of it into `folder`. For a fork: what is used here starts threads."""
    slim_down()
    images = np.random.default_rng(0).integers(0, 256, (24, 3, SIDE, SIDE), dtype=np.uint8)
    labels = np.arange(24) % 3
    for name, first in (("train", 0), ("test", 12)):
        rows = slice(first, first + 12)
        pack_arrays(folder / f"{name}.lmdb", images[rows], labels=labels[rows], classes=list(CLASSES))
    pack_arrays(folder / "pyramid.lmdb", images[:12], labels=labels[:12], classes=list(CLASSES), smallest=4)
    make_images(folder / "images", images)
    for encoding in ("source", "png"):
        source = open_source(str(folder / "images"), split=None, root=None)
        size = None if encoding == "source" else SIDE
        pack(source, folder / f"{encoding}.lmdb", encoding=encoding, size=size, duplicates=False, workers=0)
    files = sorted((folder / "images").rglob("*.*"))
    with zipfile.ZipFile(folder / "images.zip", "w") as archive, tarfile.open(folder / "images.tar", "w") as tar:
        for path in files:
            kind = zipfile.ZIP_DEFLATED if path.suffix == ".bmp" else zipfile.ZIP_STORED  # each is met
            archive.write(path, path.relative_to(folder / "images"), kind)
            tar.add(path, path.name)
    cells = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
    table = pyarrow.table({"image": cells, "label": [number % 3 for number in range(len(cells))]})
    write_table(table, folder / "images.parquet", row_group_size=4)
    (folder / "idx").mkdir()
    for name, array in (("images-idx3", images[:8, 0]), ("labels-idx1", labels[:8])):  # MNIST's files
        (folder / "idx" / f"train-{name}-ubyte").write_bytes(gzip.decompress(idx_gz(array)))
    for task, recipe in TASKS.items():
        config = folder / f"{task}.yaml"
        config.write_text(recipe + COMMON.format(data=folder))
        run = ["--config", str(config), "--run-dir", str(folder / task), "--device", "cpu", "--max-steps", "2"]
        if train.main(run):
            raise RuntimeError(f"{task}: the run that is to be mutated failed")


def make_images(folder: Path, images: np.ndarray) -> None:
    """Class folders with a file of every format, and `dataset.json` apart, which names them."""
    for number, (name, mode) in enumerate(FORMATS.items()):
        path = folder / CLASSES[number % 3] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(images[number].transpose(1, 2, 0))
        (image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode)).save(path)
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.*"))]
    pairs = [[name, number % 3] for number, name in enumerate(names)]
    (folder.parent / "dataset.json").write_text(json.dumps({"labels": pairs}))
    rows = [f"images/{name},{Path(name).parent},{('train', 'val')[n % 2]}" for n, name in enumerate(names)]
    (folder.parent / "list.csv").write_text("path,label,split\n" + "\n".join(rows) + "\n")


def copy(corpus: Path, name: str, folder: Path) -> Path:
    """A file or folder of the corpus in `folder`."""
    source, target = corpus / name, folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    return target
