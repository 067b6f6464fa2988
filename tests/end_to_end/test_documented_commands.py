"""The commands of README and docs in a fresh copy of the checkout, with the data that a page takes for granted.

Every command of every page: trainings up to their first step (`--dry-run`), packing and a look at packed files for
real, what needs a network, Docker or GPUs by its parser.
"""

import functools
import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from duetgan.utils.config.cli import normalise
from duetgan.utils.config.recipes import recipe_file
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from tests.conftest import REPOSITORY
from tests.test_docs import OVERRIDDEN, PAGES, commands, main_of, parser_of, tokens

SMALL = [f"--{net}.channel_{key}" for net in ("generator", "discriminator") for key in ("base=64", "max=8")]
EVERY = ["--log.tensorboard=false", "--log.samples_every=0", "--precision=fp32", "--threads=1"]


def link_scans(photos: Path, folder: Path) -> None:
    """Link the photos by names with four patients."""
    for index, file in enumerate(sorted(photos.glob("*/*.png"))):
        link = folder / file.parent.name / f"patient{index % 4}_{index}.png"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)


def write_photo(path: Path, rng: np.random.Generator) -> None:
    assert cv2.imwrite(str(path), rng.integers(0, 256, (80, 100, 3), dtype=np.uint8))


def write_tables() -> None:
    """Write tables of the photos, and a folder of them without classes, as a user of a CSV file has them."""
    photos = sorted(Path("photos").glob("*/*.png"))
    Path("train").mkdir()
    texts = {"labels.csv": "path,label,split\n", "tags.csv": "path,tags\n", "train.csv": "id,label\n"}
    for number, photo in enumerate(photos):
        kind = photo.parent.name
        shutil.copy(photo, f"train/{number}.jpg")
        texts["labels.csv"] += f"{photo},{kind},{'train' if number % 4 else 'val'}\n"
        texts["tags.csv"] += f"{photo},{kind} {'outside' if number % 3 else 'inside'}\n"
        texts["train.csv"] += f"{number},{kind}\n"
    for name, text in texts.items():
        Path(name).write_text(text)


def make_room(arguments: Sequence[str]) -> None:
    """Remove the files that a `duet pack` will write."""
    file = Path(arguments[1])
    file.unlink(missing_ok=True)
    if "--val-share" in arguments:
        file.with_stem(f"{file.stem}-val").unlink(missing_ok=True)


def file_of(page: str) -> Path:
    return next(path for path in PAGES if path.stem == page)


# --- every command, as typed

PREPARED = {  # page -> its files that are not of 64 px
    "first-run": {"train.lmdb": 32, "test.lmdb": 32},
    "classifier": {"few.lmdb": 32, "test.lmdb": 32, "fake.lmdb": 224},
    "gan": {"few.lmdb": 32, "runs/quickstart/data/train.lmdb": 32, "runs/quickstart/data/test.lmdb": 32},
    "data-at-scale": {"train.lmdb": 128},
}
FILES = ("train", "val", "train-val", "test", "photos", "photos-val", "few", "faces", "held-out", "datasets/photos")
PHOTOS = ("parts/train", "parts/val", "datasets/photos", "new-photos")
SHELL = ("cd", "cp", "mkdir", "export", "git", "source")  # of the system; what they name is on no fresh machine
NETWORK = re.compile(r"s3://|/mnt/|/local/|/shared/|shards/|\bsample\b|fake\.lmdb|all\.lmdb")


@functools.cache
def pages() -> dict[str, list[str]]:
    return {page.stem: commands_of(page) for page in PAGES if commands_of(page)}


def commands_of(page: Path) -> list[str]:
    """Return the commands of a page's fences, continued lines joined, without comments, `&&` taken apart."""
    fences = [block for block in tokens(page) if block.type == "fence" and block.info in ("", "bash", "sh")]
    found = []
    for fence in fences:
        for line in re.sub(r'python -c "[^"]*"', "", fence.content).replace("\\\n", " ").splitlines():
            found += [part.strip() for part in shlex.join(shlex.split(line, comments=True)).split("'&&'")]
    return [command for command in found if command]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Packed photos of two classes, by their size."""
    folder = tmp_path_factory.mktemp("packed")
    rng = np.random.default_rng(0)
    for index in range(24):
        file = folder / "photos" / ("cats", "dogs")[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_photo(file, rng)
    for size in (32, 64, 128, 224):
        assert run("pack", [str(folder / "photos"), str(folder / f"{size}.lmdb"), "--size", str(size)]) == 0
    return folder


@pytest.fixture
def checkout(photos, tmp_path, monkeypatch):
    """Return a function that makes a fresh copy of the checkout, as links, with what a page takes for granted."""

    def make(page: str) -> None:
        files = [path for path in REPOSITORY.iterdir() if path.suffix in (".toml", ".lock", ".yaml", ".py")]
        for path in [*files, REPOSITORY / "configs", REPOSITORY / "Makefile"]:
            (tmp_path / path.name).symlink_to(path)
        for folder in (*PHOTOS, "photos", "photos/train", "photos/val"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            if folder != "photos" or page != "classifier":
                for name in ("cats", "dogs"):
                    (tmp_path / folder / name).symlink_to(photos / "photos" / name)
        link_scans(photos / "photos", tmp_path / "scans")
        for folder in ("photos/train", "photos/val") if page != "classifier" else ():
            shutil.rmtree(tmp_path / folder)
        sizes = {f"{name}.lmdb": 64 for name in FILES} | PREPARED.get(page, {})
        for name, size in sizes.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(photos / f"{size}.lmdb", tmp_path / name)
        for block in tokens(file_of(page)):  # code of the page that a command imports
            if block.type == "fence" and (title := re.match(r"# (\w+\.py)\n", block.content)):
                (tmp_path / title[1]).write_text(block.content)
        monkeypatch.chdir(tmp_path)
        if page == "your-data":
            write_tables()

    return make


@pytest.mark.parametrize("page", sorted(pages()))
def test_every_command_of_a_page_is_right(page, checkout, slim, monkeypatch):
    """U2: the only training that docs/docker.md showed named a file of the quickstart, which no container has."""
    checkout(page)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(Path.cwd()))
    monkeypatch.setattr("duetgan.extras.paper.predictions.predictions", lambda *_: "")  # takes 20 s; tests/extras/paper
    for command in dict.fromkeys(pages()[page]):
        check(command)


def check(command: str) -> None:
    """Run a command as typed, as far as one CPU without a network can."""
    assert "..." not in command, command
    words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, shlex.split(command)))
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], check=True, capture_output=True)
    elif words[0] == "docker":
        for module, rest in commands([command]):
            check_module(module, shlex.split(rest), network=True)
    elif words[0] not in (*SHELL, "tensorboard"):
        (module, rest), *others = commands([command])
        assert not others
        check_module(module, shlex.split(rest), network=bool(NETWORK.search(command)))


def check_module(module: str, arguments: list[str], *, network: bool = False) -> None:
    """Run a script's command in this process, or parse it.

    Code of one's own would stay registered here; tests/test_package.py runs it.
    """
    if "--import" in arguments or "--new-data" in arguments:  # the latter takes a run
        network = True
    if module == "train" and "--list" not in arguments and not network:
        arguments = without_processes(arguments)
        arguments += ["--dry-run"] * ("--dry-run" not in arguments)
        assert run("train", made_short(arguments)) == 0, arguments
        return
    if module in ("pack", "inspect", "duplicates") and not network:
        if module == "pack":
            make_room(arguments)
        assert run(module, arguments) == 0, arguments
        return
    _, unknown = parser_of(module).parse_known_args(normalise(arguments))
    assert module in OVERRIDDEN or not unknown, arguments


def made_short(arguments: list[str]) -> list[str]:
    """Return a training's options with small networks, and without the sweep of --lr-find."""
    own = [word for word in arguments if word != "--lr-find"]
    tree = read_yaml(recipe_file(own[own.index("--config") + 1]))
    is_stylegan2 = tree["task"] == "gan" and tree.get("architecture", "stylegan2") == "stylegan2"
    return [*own, *(SMALL if is_stylegan2 else []), *EVERY]


def without_processes(arguments: list[str]) -> list[str]:
    """Return a training's options without those that start processes."""
    own = list(arguments)
    for option in ("--gpus", "--procs"):
        if option in own:
            place = own.index(option)
            del own[place : place + 2]
    return own


def test_recipes_for_ones_own_images_name_no_file_of_the_quickstart():
    own = [file for file in (REPOSITORY / "configs").glob("*.yaml") if "our own" in file.read_text().split("task:")[0]]
    assert len(own) > 10
    named = {file.stem for file in own if "runs/" in str(read_yaml(file).get("data"))}
    assert named <= {"quickstart_gan", "quickstart_classifier"}


def run(module: str, arguments: list[str]) -> int:
    return run_cli(main_of(module), arguments)
