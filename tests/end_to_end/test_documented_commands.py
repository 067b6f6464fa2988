"""The commands of README and docs, page by page, one after another, as they are written.

tests/test_docs.py parses all of them, on every page; here they run, on a few images and for two steps.
"""

import importlib
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from safetensors.torch import save_file
from torchvision.models import resnet50

from duetgan.utils.config.recipes import recipe_file
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.script import run_cli
from tests.conftest import REPOSITORY
from tests.test_docs import PAGES, SHORTENED, commands, fenced, tokens

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
    r"--gpus|torchrun|s3://|docker|sbatch|/local/|\bFILE\b|my_gan|fake\.lmdb|shards|\.tar\b|ffhq|[-.]compare|runs/judge|"
    r"rest\.lmdb|more\.lmdb|"  # of few labels: tests/inference/test_dataset.py
    r"study\.py|explore\.py|generate\.py edit|--import|--counterfactual|--format folder"  # have tests of their own
)
# all commands do
ELSEWHERE_PAGES = {
    *("data-at-scale", "docker", "editing", "explorer", "export", "extending", "scaling", "study", "training"),
}


@pytest.fixture(autouse=True)
def runs_here(monkeypatch):
    """Put runs/ where commands are typed."""
    monkeypatch.delenv("DUET_RUNS", raising=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the pages say is there: recipes, class folders of photos, images to predict."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    rng = np.random.default_rng(0)
    for part, count in (("photos", 12), ("parts/train", 12), ("parts/val", 12)):
        for name in ("cats", "dogs"):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(count):
                write_photo(tmp_path / part / name / f"{index}.png", rng)
    for name in ("image1.jpg", "image2.png", "a.jpg", "b.jpg"):
        write_photo(tmp_path / name, rng)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_photo(path: Path, rng: np.random.Generator) -> None:
    assert cv2.imwrite(str(path), rng.integers(0, 256, (80, 100, 3), dtype=np.uint8))


def pack(source: str, *names: str, options: Sequence[str] = ("--size", "64")) -> None:
    for name in names:
        assert run("data.pack", [source, name, *options]) == 0


def train(name: str, folder: str) -> None:
    data = ["--data.path", "train.lmdb", "--data.val-path", "val.lmdb", "--run-dir", folder]
    assert run("train", made_small("train", ["--config", f"configs/{name}.yaml", *data])) == 0


def pack_sample() -> None:
    """What `make quickstart` has packed."""
    for part in ("train", "test"):
        pack("sample", f"runs/quickstart/data/{part}.lmdb", options=["--size", "32", "--split", part])


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
    train("gan_64_cpu", "RUN")
    shutil.copy("image1.jpg", "PHOTO")


BEFORE = {  # page -> what it takes for granted
    "README": pack_sample,
    "first-run": None,
    "your-data": None,
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
SLOW = [page for page in BEFORE if page != "recipes"]


def made_small(module: str, arguments: Sequence[str]) -> list[str]:
    """A command that takes seconds, with the page's own options."""
    if module == "quickstart":
        return [*arguments, "--quick", f"--dir={Path.cwd()}/quickstart"]  # its own is in the repository
    short = [option for word, options in SHORT.items() if word in arguments for option in options]
    if module != "train" or "--config" not in arguments:
        return [*arguments, *short]
    own = list(arguments)
    place = own.index("--config") + 1
    own[place] = recipe_file(own[place])
    tree = read_yaml(own[place])
    scaled = ["--model.input_size=32"] if tree.get("model", {}).get("input_size") else []
    steps = short or ["--max-steps=2"]
    return [*own, *SMALL[tree["task"]], *scaled, *EVERY, *steps]


@pytest.mark.timeout(1800)  # a minute or two, more on a busy machine
@pytest.mark.parametrize("page", [pytest.param(name, marks=pytest.mark.slow) for name in SLOW] + ["recipes"])
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
        if module == "data.pack":  # another way to the same files: a reader takes one of them
            for file in Path.cwd().glob(f"{Path(arguments[1]).stem}*.lmdb"):
                file.unlink()
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


def test_no_page_with_commands_is_left_out():
    shown = {page.stem: fenced(page) for page in PAGES if list(commands(fenced(page)))}
    assert set(shown) == set(BEFORE) | ELSEWHERE_PAGES
    assert {page for page, lines in shown.items() if not list(commands(here(lines)))} == ELSEWHERE_PAGES


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard imports
def test_tensorboard_takes_the_options_of_the_pages():
    from tensorboard.plugins.core.core_plugin import CorePluginLoader
    from tensorboard.program import TensorBoard

    shown = {line.partition(" #")[0] for page in PAGES for line in fenced(page) if line.startswith("tensorboard ")}
    assert shown
    for line in shown:
        TensorBoard(plugins=[CorePluginLoader()]).configure(shlex.split(line))


def run(module: str, arguments: list[str]) -> int:
    return run_cli(importlib.import_module(module).main, arguments)
