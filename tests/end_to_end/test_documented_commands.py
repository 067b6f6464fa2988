"""The commands of the pages that lead from images to a trained model, one after another, as they are written."""

import importlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.conftest import REPOSITORY
from tests.test_docs import SHORTENED, commands, fenced
from utils.config import read_yaml
from utils.errors import run_cli

# what makes a training last seconds: two steps of small networks
SMALL = {
    "gan": [f"--{net}.channel_{key}" for net in ("generator", "discriminator") for key in ("base=64", "max=8")]
    + ["--evaluation.n=8"],
    "classifier": ["--model.name=resnet18", "--model.weights=null"],
}
EVERY = ["--max-steps=2", "--batch-size=8", "--log.tensorboard=false", "--log.samples_every=0", "--precision=fp32"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages say is there: recipes, class folders of photos, two images to predict."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    rng = np.random.default_rng(0)
    for part, count in (("photos", 12), ("parts/train", 12), ("parts/val", 6)):
        for name in ("cats", "dogs"):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(count):
                write_photo(tmp_path / part / name / f"{index}.png", rng)
    write_photo(tmp_path / "image1.jpg", rng)
    write_photo(tmp_path / "image2.png", rng)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_photo(path: Path, rng: np.random.Generator) -> None:
    assert cv2.imwrite(str(path), rng.integers(0, 256, (80, 100, 3), dtype=np.uint8))


def made_small(module: str, arguments: Sequence[str]) -> list[str]:
    """A command that takes seconds, with the page's own options."""
    if module == "quickstart":
        return [*arguments, "--quick", f"--dir={Path.cwd()}/quickstart"]  # its own is in the repository
    if module == "evaluate" and "--classifier" in arguments:
        return [*arguments, "--n=20", "--per-class=4"]
    if module != "train" or "--config" not in arguments:
        return list(arguments)
    recipe = read_yaml(arguments[list(arguments).index("--config") + 1])
    scaled = ["--model.input_size=32"] if recipe.get("model", {}).get("input_size") else []
    return [*arguments, *SMALL[recipe["task"]], *scaled, *EVERY]


@pytest.mark.timeout(900)  # a minute or two, more on a busy machine
@pytest.mark.parametrize("page", ["first-run", "your-data", "recipes"])
def test_a_pages_commands_run_in_its_order(page: str, folder: Path) -> None:
    if page == "recipes":
        assert run("data.pack", ["photos", "train.lmdb", "--size", "64"]) == 0
    shown = [
        (module, shlex.split(rest.partition(" #")[0]))
        for module, rest in commands(fenced(REPOSITORY / f"docs/{page}.md"))
    ]
    assert len(shown) >= 3
    for module, arguments in shown:
        assert not SHORTENED.search(" ".join(arguments)), arguments
        if module == "data.pack":  # another way to the same files: a reader takes one of them
            Path(arguments[1]).unlink(missing_ok=True)
        assert run(module, made_small(module, arguments)) == 0, (module, arguments)


def run(module: str, arguments: list[str]) -> int:
    return run_cli(importlib.import_module(module).main, arguments)
