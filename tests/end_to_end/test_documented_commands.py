"""The commands of README and docs in a fresh copy of the checkout, with the data that a page takes for granted.

Every command of every page: trainings up to their first step (`--dry-run`), packing and a look at packed files for
real, what needs a network, Docker or GPUs by its parser. Slow: the pages' other commands for real, on a few images.
"""

import functools
import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torchvision.models import resnet50

from duetgan.utils.config.cli import normalise
from duetgan.utils.config.recipes import recipe_file
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from tests.conftest import REPOSITORY
from tests.test_docs import OVERRIDDEN, PAGES, SHORTENED, commands, fenced, main_of, parser_of, tokens

# what makes a training last seconds: two steps of small networks
SMALL = {
    "gan": [f"--{net}.channel_{key}" for net in ("generator", "discriminator") for key in ("base=64", "max=8")]
    + ["--evaluation.n=8"],
    "classifier": ["--model.name=resnet18", "--model.weights=null"],
}
EVERY = ["--batch-size=8", "--log.tensorboard=false", "--log.samples_every=0", "--precision=fp32"]
SHORT = {  # of other commands, or of those with this word
    "grid": ["--n=4"],
    "interpolate": ["--n=2", "--frames=2"],
    "project": ["--steps=2"],
    "dataset": ["--n=8"],
    "--classifier": ["--n=20", "--per-class=4"],
    "--extractor": ["--n=20"],
    "--lr-find": ["--lr-find-steps=10"],
}
WEIGHTS = "resnet50.safetensors"
# what needs more than one machine's CPU, or files that are not here
ELSEWHERE = re.compile(
    r"--gpus|torchrun|s3://|docker|sbatch|/local/|\bFILE\b|my_gan|fake\.lmdb|shards|\.tar\b|ffhq|"
    r"[-. ]compare |runs/judge|rest\.lmdb|more\.lmdb|all\.lmdb|"  # of few labels: tests/inference/test_dataset.py
    r"duet study|duet explore|generate\.py edit|--import|--counterfactual|--format folder"  # have tests of their own
)


@pytest.fixture(autouse=True)
def runs_here(monkeypatch):
    """Put runs/ where commands are typed."""
    monkeypatch.delenv("DUET_RUNS", raising=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the pages say is there: recipes, class folders of photos, images to predict."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    rng = np.random.default_rng(0)
    for part, count in (("photos", 12), ("parts/train", 12), ("parts/val", 12), ("new-photos", 12)):
        for name in ("cats", "dogs"):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(count):
                write_photo(tmp_path / part / name / f"{index}.png", rng)
    link_scans(tmp_path / "photos", tmp_path / "scans")
    for name in ("image1.jpg", "image2.png", "a.jpg", "b.jpg"):
        write_photo(tmp_path / name, rng)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def link_scans(photos: Path, folder: Path) -> None:
    """Link the photos by names with four patients."""
    for index, file in enumerate(sorted(photos.glob("*/*.png"))):
        link = folder / file.parent.name / f"patient{index % 4}_{index}.png"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)


def write_photo(path: Path, rng: np.random.Generator) -> None:
    assert cv2.imwrite(str(path), rng.integers(0, 256, (80, 100, 3), dtype=np.uint8))


def pack(source: str, *names: str, options: Sequence[str] = ("--size", "64")) -> None:
    for name in names:
        assert run("pack", [source, name, *options]) == 0


def train(name: str, folder: str) -> None:
    data = ["--data.path", "train.lmdb", "--data.val-path", "val.lmdb", "--run-dir", folder]
    assert run("train", made_small("train", ["--config", f"configs/{name}.yaml", *data])) == 0


def pack_sample() -> None:
    """What `make quickstart` has packed."""
    for part in ("train", "test"):
        pack("sample", f"runs/quickstart/data/{part}.lmdb", options=["--size", "32", "--split", part])


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


def before_classifier() -> None:
    shutil.rmtree("photos")
    shutil.move("parts", "photos")


def before_evaluation() -> None:
    pack("photos", "train.lmdb")
    pack("parts/val", "val.lmdb")
    for name, run_folder in (("finetune_resnet50", "judge"), ("finetune_resnet50", "x"), ("gan_64_cpu", "gan")):
        train(name, f"runs/{run_folder}")


def before_audit() -> None:
    before_evaluation()
    pack("parts/val", "held-out.lmdb")


def before_gan() -> None:
    pack("photos", "train.lmdb", "val.lmdb")
    pack_sample()
    run_python("gan", {})  # makes few.lmdb
    train("gan_64_cpu", "runs/gan")
    shutil.copy("image1.jpg", "photo.jpg")


BEFORE = {  # page -> what it takes for granted
    "README": pack_sample,
    "first-run": None,
    "your-data": write_tables,
    "recipes": lambda: pack("photos", "train.lmdb"),
    "lmdb": None,
    "classifier": before_classifier,
    "evaluation": before_evaluation,
    "audit": before_audit,
    "gan": before_gan,
}
PYTHON: dict[str, dict[str, Any]] = {  # page -> names that its Python code takes for granted; it runs at the end
    "README": {},
    "lmdb": {"images": np.zeros((4, 1, 8, 8), np.uint8), "labels": [0, 1, 0, 1]},
}
RUN_FOR_REAL = [page for page in BEFORE if page != "recipes"]


def make_room(arguments: Sequence[str]) -> None:
    """Remove the files that a `duet pack` will write."""
    file = Path(arguments[1])
    file.unlink(missing_ok=True)
    if "--val-share" in arguments:
        file.with_stem(f"{file.stem}-val").unlink(missing_ok=True)


def made_small(module: str, arguments: Sequence[str]) -> list[str]:
    """A command that takes seconds, with the page's own options."""
    if module == "quickstart":
        return [*arguments, "--quick", f"--dir={Path.cwd()}/quickstart"]  # its own is in the repository
    short = [option for word, options in SHORT.items() if word in arguments for option in options]
    if "--seeds" in arguments:  # instead of --n
        short = [option for option in short if not option.startswith("--n=")]
    if module != "train" or "--config" not in arguments:
        return [*arguments, *short]
    own = list(arguments)
    place = own.index("--config") + 1
    own[place] = recipe_file(own[place])
    tree = read_yaml(own[place])
    scaled = ["--model.input_size=32"] if tree.get("model", {}).get("input_size") else []
    steps = short or ["--max-steps=2"]
    return [*own, *SMALL[tree["task"]], *scaled, *EVERY, *steps]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute or two, more on a busy machine
@pytest.mark.parametrize("page", RUN_FOR_REAL)
def test_a_pages_commands_run_in_its_order(page, folder, monkeypatch):
    if page in ("evaluation", "gan"):
        save_file(resnet50().state_dict(), WEIGHTS, metadata={"stride": "conv2"})
        monkeypatch.setenv("DUET_WEIGHTS", WEIGHTS)
    prepare = BEFORE[page]
    if prepare is not None:
        prepare()
    shown = [(module, shlex.split(rest.partition(" #")[0])) for module, rest in commands(here(fenced(file_of(page))))]
    assert len(shown) >= 2
    for module, arguments in shown:
        assert not SHORTENED.search(" ".join(arguments)), arguments
        if module == "pack":  # another way to the same files: a reader takes one of them
            make_room(arguments)
        # on noise the loss may fall at no rate, which --lr-find says: test_lr_find.py has images to learn from
        codes = (0, 2) if "--lr-find" in arguments else (0,)
        assert run(module, made_small(module, arguments)) in codes, (module, arguments)
    if page in PYTHON:
        run_python(page, dict(PYTHON[page]))


def file_of(page: str) -> Path:
    return next(path for path in PAGES if path.stem == page)


def here(lines: Sequence[str]) -> list[str]:
    """The lines that any machine can run."""
    return [line for line in lines if not ELSEWHERE.search(line)]


def run_python(page: str, names: dict[str, Any]) -> None:
    """Run a page's Python code; `names`: what it takes for granted."""
    sources = [block.content for block in tokens(file_of(page)) if block.type == "fence" and block.info == "python"]
    assert sources
    for source in sources:
        exec(compile(source, page, "exec"), names)


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
OF_DOCKER = {"build", "run", "compose", "stop"}


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
        check_docker(words[1:], dict(re.findall(r"([A-Z_]+)=(?:'([^']*)'|\S+)", command)))
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
    small = SMALL["gan"] if tree["task"] == "gan" and tree.get("architecture", "stylegan2") == "stylegan2" else []
    return [*own, *small, *[word for word in EVERY if not word.startswith("--batch")], "--threads=1"]


def without_processes(arguments: list[str]) -> list[str]:
    """Return a training's options without those that start processes."""
    own = list(arguments)
    for option in ("--gpus", "--procs"):
        if option in own:
            place = own.index(option)
            del own[place : place + 2]
    return own


def check_docker(words: list[str], variables: dict[str, str]) -> None:
    """Check the names that a command of Docker uses, and run the command of the image that it holds."""
    kind, *rest = words
    services = yaml.safe_load(Path("compose.yaml").read_text())["services"]
    assert kind in OF_DOCKER, words
    if kind == "compose":
        assert rest[0] == "--profile"
        profile, action, *names = rest[1:]
        named = [name for name in names if not name.startswith("-")]
        assert action in ("up", "run", "logs", "stop")
        assert all(profile in services[name]["profiles"] for name in named[:1])
        inner = named[1:] if action == "run" else shlex.split(variables.get("DUET", ""))
        inner = rest[rest.index(named[0]) + 1 :] if action == "run" else inner
    elif kind == "run":
        assert "duet" in rest
        inner = rest[rest.index("duet") + 1 :]
    else:
        arguments = [rest[place + 1].partition("=")[0] for place, word in enumerate(rest) if word == "--build-arg"]
        assert all(f"\nARG {name}=" in (REPOSITORY / "Dockerfile").read_text() for name in arguments)
        inner = []
    if inner:
        mounted = [re.sub("^/data/", "datasets/", re.sub("^/runs/", "runs/", word)) for word in inner]
        check_module(mounted[0], mounted[1:])


def test_every_command_is_found_and_the_comments_of_compose_are_right(checkout):
    assert sum(map(len, pages().values())) > 130
    checkout("docker")
    text = (REPOSITORY / "compose.yaml").read_text().partition("x-duet")[0].replace("\\\n#", "")
    found = [line.lstrip("# ").partition("  #")[0] for line in text.splitlines() if "docker compose" in line]
    assert len(found) == 3
    for command in found:
        check(command)


def test_recipes_for_ones_own_images_name_no_file_of_the_quickstart():
    own = [file for file in (REPOSITORY / "configs").glob("*.yaml") if "our own" in file.read_text().split("task:")[0]]
    assert len(own) > 10
    named = {file.stem for file in own if "runs/" in str(read_yaml(file).get("data"))}
    assert named <= {"quickstart_gan", "quickstart_classifier"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard imports
def test_tensorboard_takes_the_options_of_the_pages():
    from tensorboard.plugins.core.core_plugin import CorePluginLoader
    from tensorboard.program import TensorBoard

    shown = {line.partition(" #")[0] for page in PAGES for line in fenced(page) if line.startswith("tensorboard ")}
    assert shown
    for line in shown:
        TensorBoard(plugins=[CorePluginLoader()]).configure(shlex.split(line))


def run(module: str, arguments: list[str]) -> int:
    return run_cli(main_of(module), arguments)
