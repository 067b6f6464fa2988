"""Five sets of real images that are not square RGB of 8 bits with one label, from the public registries' packages.

`python benchmarks/folders/kinds.py DEST [NAME ...]` makes DEST/NAME for each of KINDS, or for those named, packs it
with a held-out part, and prints the commands that train and judge its networks; `--run` runs them, with one thread.
Packages are kept in DEST/packages.
"""

import io
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tifffile

from benchmarks.folders.make import (
    EMOJI,
    SOUNDS,
    STILL,
    TWITTER,
    File,
    Packages,
    by_group,
    catalogue,
    made,
    messages,
    parser,
    power,
)
from duetgan.utils.distributed.process import run_cli

HOUSE = Path(__file__).resolve().parents[2]
FLAGS = ["npm:region-flags@1.1.0", "npm:svg-country-flags@1.2.10"]
TILE, STRIDE = 32, 8  # px of a satellite's tile, and between tiles
HELD_OUT = ((96, 136), (256, 296))  # columns of the scene, from and to
TONES = dict(zip(("1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF"), ("light", "fair", "tan", "brown", "dark"), strict=True))


def rectangles(packages: Packages) -> Iterator[File]:
    """Flags of countries and regions, by two hands, as they are: from 1:1 to 2.5:1."""
    for name, content in packages[0]():
        if "/png/" in name and name.endswith(".png"):
            yield f"regions/{Path(name).name}", content
    for name, content in packages[1]():
        if "/png250px/" in name and name.endswith(".png"):
            yield f"countries/{Path(name).name}", content


def transparent(packages: Packages) -> Iterator[File]:
    """Fluent emoji of eight of Unicode's groups, as RGBA."""
    groups = ["Smileys & Emotion", "Animals & Nature", "Food & Drink", "Travel & Places", "Objects"]
    groups += ["People & Body", "Symbols", "Activities"]
    yield from by_group(packages, {group: group.split()[0].lower() for group in groups})


def floats(packages: Packages) -> Iterator[File]:
    """Levels of spoken messages in dB, float32 [frequency, time], by language."""
    for name, content in messages(packages):
        means = power(content).reshape(64, 2, 64, 2).mean((1, 3))
        stored = io.BytesIO()
        np.save(stored, (10 * np.log10(means / means.max() + 1e-8)).astype(np.float32))
        yield f"{name}.npy", stored.getvalue()


def bands(packages: Packages) -> Iterator[File]:
    """Tiles of six bands of a Landsat 7 scene of Olinda; of two strips of it held out, no pixel is in both parts."""
    scene = next(content for name, content in packages[0]() if name.endswith("/tif/L7_ETMs.tif"))
    pixels = tifffile.imread(io.BytesIO(scene))  # [6, H, W] or [H, W, 6]
    pixels = pixels if pixels.shape[2] == 6 else pixels.transpose(1, 2, 0)
    for top in range(0, pixels.shape[0] - TILE + 1, STRIDE):
        for left in range(0, pixels.shape[1] - TILE + 1, STRIDE):
            inside = any(begin <= left and left + TILE <= end for begin, end in HELD_OUT)
            if inside or all(left + TILE <= begin or left >= end for begin, end in HELD_OUT):
                stored = io.BytesIO()
                tile = np.ascontiguousarray(pixels[top : top + TILE, left : left + TILE])
                tifffile.imwrite(stored, tile, photometric="minisblack", planarconfig="contig")
                yield f"{'val' if inside else 'train'}/{top:03}-{left:03}.tif", stored.getvalue()


def several(packages: Packages) -> Iterator[File]:
    """Emoji of people and hands by two hands, in five tones and none; labels: woman, man, hand, and the tone."""
    rows = ["path,labels"]
    for style, package in zip(("google", "twitter"), packages, strict=True):
        files = {Path(name).name: content for name, content in package() if "/64/" in name}
        for entry in catalogue(packages[0]):
            tones = {tone: image for tone, image in entry.get("skin_variations", {}).items() if tone in TONES}
            words = set(entry["name"].replace(":", " ").replace("-", " ").split()) if tones else set()
            own = [word.lower() for word in ("WOMAN", "MAN") if word in words]
            own += ["hand"] * entry["subcategory"].startswith("hand")
            for tone, image in ({"": entry} | tones if tones else {}).items():
                if content := files.get(image["image"]):
                    yield f"{style}-{image['image']}", content
                    rows.append(f"{style}-{image['image']},{';'.join([*own, *([TONES[tone]] if tone else [])])}")
    yield "list.csv", ("\n".join(rows) + "\n").encode()


class Kind(NamedTuple):
    make: Callable[[Packages], Iterator[File]]
    packages: list[str]
    licence: str
    pack: list[str]  # arguments of `duet pack`, with {folder} of the images and {dest}
    gan: str  # arguments of train.py
    classifier: str = ""  # the same; empty: none is trained


# R1 of ten times the recipe's: with as little as there D leaves G behind on these
LARGE = "--config configs/gan_64_cpu.yaml --loss.r1-gamma 4 --ema.ema-kimg 5 --evaluation.every 0 --steps"
SMALL = "--config configs/fashion_mnist_gan_short.yaml --ada.mode fixed --ada.p 0.2 --evaluation.every 0 --steps"
NAMED = "--config configs/quickstart_classifier.yaml --steps 400 --batch-size 32 --optimizer.warmup-steps 50"
SHARE = "{folder} {dest}.lmdb --val-share 0.1"
KINDS = {
    "rectangles": Kind(
        *(rectangles, FLAGS, "public domain", [f"{SHARE} --size 96x64"]),
        f"{LARGE} 4800 --augment.flip false --conditional false",
    ),
    "transparent": Kind(transparent, [EMOJI, STILL], "MIT", [f"{SHARE} --size 64 --channels 4"], f"{LARGE} 5500"),
    "floats": Kind(
        *(floats, SOUNDS, "CC-BY-SA-3.0; Russian CC-BY-3.0", [f"{SHARE} --depth float --size 64"]),
        *(f"{LARGE} 3200 --augment.flip false", f"{NAMED} --augment.flip false"),
    ),
    "bands": Kind(
        *(bands, ["apt:r-cran-stars=0.6-0-4"], "Apache-2.0; NASA's scene: public domain"),
        ["{folder}/train {dest}.lmdb --channels auto", "{folder}/val {dest}-val.lmdb --channels auto"],
        f"{LARGE} 20800 --augment.flip true --generator.channel-base 512 --discriminator.channel-base 512",
    ),
    "several": Kind(
        *(several, [EMOJI, TWITTER], "Apache-2.0; CC-BY-4.0"),
        ["{folder}/list.csv {dest}.lmdb --size 32 --val-share 0.1"],
        *(f"{SMALL} 4500 --augment.flip true", f"{NAMED} --loss.kind bce"),
    ),
}


def commands(kind: Kind, place: str) -> list[list[str]]:
    """What trains and judges; runs are PLACE-gan and PLACE-classifier."""
    about = f"--data.path {place}.lmdb --data.val-path {place}-val.lmdb --precision bf16 --threads 1"
    found = []
    for name, given in (("classifier", kind.classifier), ("gan", kind.gan)):
        if given:
            found.append(f"train.py {given} {about} --run-dir {place}-{name}")
            found.append(f"evaluate.py --checkpoint {place}-{name} --data {place}-val.lmdb")
    found[-1] += " --extractor resnet50" + f" --classifier {place}-classifier" * bool(kind.classifier)
    return [[sys.executable, *line.split()] for line in found]


def main(argv: list[str]) -> None:
    options = parser("kinds.py", "Make, pack, train and judge images of five kinds.", KINDS)
    options.add_argument("--run", action="store_true", help="run the commands, half an hour each")
    asked = options.parse_args(argv)
    for name, place in made(asked, KINDS):
        packing = [line.format(folder=place, dest=place).split() for line in KINDS[name].pack]
        every = [[sys.executable, "-m", "data.pack", *line, "--overwrite"] for line in packing]
        for command in [*every, *commands(KINDS[name], str(place))]:
            print(f"python {shlex.join(command[1:])}", flush=True)
            if asked.run or "data.pack" in command:
                subprocess.run(command, check=True, cwd=HOUSE)


if __name__ == "__main__":
    sys.exit(run_cli(main))
