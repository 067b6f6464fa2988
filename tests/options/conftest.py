"""Tiny runs and files that every option is tried on."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from duetgan.commands import evaluate
from duetgan.data.packing.records import pack_arrays
from duetgan.inference.samples import Sampler
from duetgan.models.backbones.torchvision import RESNET
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.registry import architecture_of
from duetgan.utils.checkpoint import load, point, resolve, save
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.seeding import forked
from tests.conftest import REPOSITORY
from tests.data.packing.sources.test_named import write_idx
from tests.end_to_end.helpers import write_config
from tests.inference.conftest import sampler_of, styled
from tests.metrics.conftest import CLASSES, SIDE, TINY, make_run, pack
from tests.slim import make

SIZES: dict[str, Any] = {"channel_base": 64, "channel_max": 8, "minibatch_std_group": 1}


def classifier_of(sampler: Sampler, seed: int) -> dict[str, Any]:
    """Return weights of a classifier that names each class for some of the sampler's images."""
    with forked(seed, "init", "options classifier"):
        classifier = Classifier(ModelConfig(stem="small-stride2"), channels=1, classes=3, resolution=SIDE).eval()
    with torch.no_grad():
        logits, head = classifier(sampler.images(range(90)).float() / 127.5 - 1), classifier.network.fc
        scale = 2 / logits.std(0)
        head.bias.copy_((head.bias - logits.mean(0)) * scale)
        head.weight.mul_(scale[:, None])
    return {"model_ema": classifier.state_dict()}


def add_last(folder: Path, state: dict[str, Any]) -> None:
    """A later checkpoint of other weights, which becomes the run's last; the earlier one stays its best."""
    content = load(resolve(folder))
    path = save(folder / "checkpoints", content | {"step": 9, "state": content["state"] | state})
    point(folder / "checkpoints", "last", path)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Name -> place of what the commands of the table name."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duetgan.models.backbones.base.make", make)
        patch.setattr("duetgan.metrics.images.save_figure", lambda figure, path: None)
        write_runs(folder)
        for number, name in enumerate(("classifier", "judge", "other")):
            command = ["--checkpoint", str(folder / name), "--n", "12", "--device", "cpu"]
            assert run_cli(evaluate.main, [*command, "--out", str(folder / f"evaluated{number}")]) == 0
        for name in ("resnet50", "weights"):
            with forked(0, "init", name):
                save_file(RESNET.build("resnet50").state_dict(), folder / f"{name}.safetensors")
    write_images(folder)
    for file in sorted((REPOSITORY / "tests/extras").glob("*/options.py")):
        importlib.import_module(f"tests.extras.{file.parent.name}.options").write(folder)
    for name in ("gan", "classifier"):
        write_config(folder / f"{name}_recipe.yaml", name, folder)
    (folder / "plugin.py").write_text("")
    return {path.stem: path for path in folder.iterdir()} | {"world": folder}


def write_runs(folder: Path) -> None:
    """Packed images; a GAN's and a classifier's run with two checkpoints; two further classifiers."""
    shape: dict[str, Any] = {"channels": 1, "classes": 3, "resolution": SIDE}
    data = {"path": str(pack(folder / "train.lmdb", seed=1, count=75))}
    data["val_path"] = str(pack(folder / "test.lmdb", seed=2, count=72))
    pack(folder / "few.lmdb", seed=3, count=18)
    pack(folder / "unlabelled.lmdb", seed=4, count=20, classes=[])
    first, second = styled(), styled()
    with torch.no_grad():
        for parameter in second.mapping.parameters():
            parameter.mul_(1.5)
    with forked(0, "init", "options discriminator"):
        discriminator = architecture_of("stylegan2").build("discriminator", SIZES, **shape)
    config = {"generator": TINY, "discriminator": SIZES, "data": data}
    state = {"generator_ema": first.state_dict(), "discriminator": discriminator.state_dict()}
    make_run(folder / "gan", task="gan", config=config, shape=shape, state=state)
    add_last(folder / "gan", {"generator_ema": second.state_dict()})
    config = {"model": {"stem": "small-stride2"}, "data": data}
    for number, name in enumerate(("classifier", "judge", "other")):
        state = classifier_of(sampler_of(second), number)
        make_run(folder / name, task="classifier", config=config, shape=shape, state=state)
    add_last(folder / "classifier", classifier_of(sampler_of(second), 3))
    for row, image in enumerate(sampler_of(second).images(range(3)).numpy()):
        Image.fromarray(image[0]).save(folder / f"photo{row}.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 14), np.uint8)).save(folder / "wide.png")


def write_images(folder: Path) -> None:
    """Sources of `duet pack`: folders of classes, a table, idx files, channels in files of their own, 16 bits."""
    draws = np.random.default_rng(0)
    table = ["path,label,another"]
    for row, name in enumerate(CLASSES * 5):
        (folder / "images" / name).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(row % 12).integers(0, 256, (9 + row % 2, 12, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / name / f"{row}.png")
        table.append(f"images/{name}/{row}.png,{name},{row % 2}")
    (folder / "table.csv").write_text("\n".join(table))
    columns = ["first,second,bare,label,both,part"]
    for row in range(4):
        dark, light = (len(CLASSES) * row + CLASSES.index(name) for name in ("dark", "light"))
        names = f"images/dark/{dark}.png,images/light/{light}.png,{dark}"
        columns.append(f"{names},{'xy'[row % 2]},{('x', 'x|y')[row % 2]},{'ab'[row == 3]}")
    (folder / "columns.csv").write_text("\n".join(columns))
    shutil.copytree(folder / "images", folder / "damaged")
    (folder / "damaged" / "dark" / "broken.png").write_bytes(b"no image")
    (folder / "deep").mkdir()
    smooth: Any = cv2.resize(draws.integers(0, 256, (6, 2, 2), np.uint8).transpose(1, 2, 0), (8, 8)).transpose(2, 0, 1)
    several = np.concatenate([smooth, smooth[:3], smooth[3:] ^ 1])[:, None]
    pack_arrays(folder / "same.lmdb", several, labels=np.arange(12) % 3, classes=CLASSES)
    for row in range(4):
        grey = draws.integers(0, 3000, (8, 8), np.uint16)
        Image.fromarray(grey).save(folder / "deep" / f"{row}.png")
    for number in range(2):
        (folder / f"idx{number}").mkdir()
        for _split, prefix in (("train", "train"), ("test", "t10k")):
            images = draws.integers(0, 256, (12, 28, 28), np.uint8)
            write_idx(folder / f"idx{number}", prefix, images, np.arange(12) % 10)
