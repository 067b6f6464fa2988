"""`train.py --new-data`: a run goes on with other images, to the bit the same whether it is interrupted or not."""

import json
import re
import shutil
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from duetgan.commands import evaluate, export, train
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.models.by_class import class_parts
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.registry import ARCHITECTURES
from duetgan.training.engine import preflight
from duetgan.training.engine.run import prepare
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.engine.transfer import NewImages
from duetgan.training.gan.config import config_of
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Updater
from duetgan.utils.checkpoint import load, newest_first
from duetgan.utils.checkpoint.provenance import data_history, recorded
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import RunFolder
from tests.conftest import assert_raises
from tests.end_to_end.helpers import check_same, differing, train_in_process, write_config
from tests.training.engine.test_checkpoints import META, Weights, keeper_of, save

# what depends on the class in all ways
OPTIONS = {"gan": ["--ada.mode=fixed", "--ada.p=0.25", "--loss.auxiliary-weight=0.5"], "classifier": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, packed):
    """Other images: half of the classes, in reverse, and a new one."""
    folder = tmp_path_factory.mktemp("other")
    for split in ("train", "test"):
        with Dataset(packed / f"{split}.lmdb") as dataset:
            rows = np.flatnonzero(dataset.labels() < 5)
            images = np.stack([dataset.image(int(row))[0] for row in rows]).reshape(-1, 1, 16, 16)
            labels = 5 - dataset.labels()[rows]
            classes = ["star", *reversed(dataset.classes[:5])]
        images = np.concatenate([images, 255 - images[:7]])
        labels = np.concatenate([labels, np.zeros(7, int)])
        pack_arrays(folder / f"{split}.lmdb", images, labels=labels, classes=classes)
    return folder


@pytest.fixture(scope="module", params=["gan", "classifier"])
def begun(request, tmp_path_factory, packed, folder, slim_module):
    """A run of two steps, its recipe, and the options that continue it with other images."""
    home = tmp_path_factory.mktemp(request.param)
    config = write_config(home / "recipe.yaml", request.param, packed)
    options = ["--evaluation.every=0", *OPTIONS[request.param]]
    assert train_in_process(config, home / "run", "--max-steps=2", *options) == 0
    paths = [f"--data.path={folder}/train.lmdb", f"--data.val-path={folder}/test.lmdb"]
    return home / "run", config, [*paths, *options]


def continued(begun, target, *more):
    run, config, options = begun
    shutil.copytree(run, target)
    assert train_in_process(config, target, "--new-data", *options, *more) == 0
    return target


def test_resumed_equals_straight_and_says_from_which_step_on_which_images(begun, tmp_path, packed, folder, capsys):
    _, config, options = begun
    straight = continued(begun, tmp_path / "straight", "--max-steps=5")
    said = capsys.readouterr().err
    names = Dataset(packed / "train.lmdb").classes
    taken, dropped = ", ".join(names[4::-1]), ", ".join(names[5:])
    match = f"5 of 6 classes taken by name: {taken}; new: star; dropped: {dropped}"
    assert f"step 2: continuing with other images, those of {folder}/train.lmdb; {match}" in said
    resumed = continued(begun, tmp_path / "resumed", "--max-steps=3")
    assert train_in_process(config, resumed, *options, "--max-steps=5") == 0  # the flag has done its work
    check_same(straight, resumed, 5)

    content = load(newest_first(straight / "checkpoints")[0])
    files = [Dataset(path / "train.lmdb") for path in (packed, folder)]
    found = [(images.step, images.content_hash, images.count, images.path) for images in data_history(content)]
    assert found == [
        (step, dataset.meta.content_hash, len(dataset), str(dataset.path))
        for step, dataset in zip((0, 2), files, strict=True)
    ]
    assert {dataset.meta.content_hash for dataset in files} <= set(recorded(content).trained_on)
    line = f"training images: 200 of {packed}/train.lmdb from step 0, 107 of {folder}/train.lmdb from step 2"
    capsys.readouterr()
    history = json.loads((straight / "data.json").read_text())["history"]
    assert history == {"step 0": f"{packed}/train.lmdb", "step 2": f"{folder}/train.lmdb"}
    small = ["--n=20", "--extractor=pixels"] if content["task"] == "gan" else []
    assert run_cli(evaluate.main, ["--checkpoint", str(straight), *small]) == 0
    assert line in capsys.readouterr().err.splitlines()
    assert json.loads((straight / "eval" / "metrics.json").read_text())["history"] == line
    file = tmp_path / "x.safetensors"
    arguments = ["--format=safetensors", f"--out={file}", "--n=4"]
    assert run_cli(export.main, ["--checkpoint", str(straight), *arguments]) == 0
    assert line in capsys.readouterr().err.splitlines()
    assert "<th>training images</th>" in (straight / "report.html").read_text()


def by_class(part, state):
    """Tensors of a part's state that have a slice per class: place in the state -> tensor, dimension, exponent."""
    model = part.model if isinstance(part, EMA | Updater) else part
    if not isinstance(model, nn.Module):
        return {}
    parts = class_parts(model)
    if not isinstance(part, Updater):
        return {f".{name}": (state[name], *class_part) for name, class_part in parts.items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for index, parameter in enumerate(part.parameters):
        dimension, exponent = parts.get(names[parameter], (None, 0.0))
        for moment, power in (("momentum_buffer", -1), ("exp_avg", -1), ("exp_avg_sq", -2)):
            if dimension is not None and moment in state["state"][index]:
                place = f".state.{index}.{moment}"
                found[place] = (state["state"][index][moment], dimension, power * exponent)
    return found


def test_all_but_the_classes_the_order_and_the_best_stays(begun, monkeypatch):
    run, config, options = begun
    needed: list[int] = []
    monkeypatch.setattr(preflight, "check_disk", lambda _folder, _task, count: needed.append(count))
    loop = prepare(build_run_config(read_yaml(config), options, "recipe"), RunFolder(run), torch.device("cpu"))
    fresh = deepcopy({name: part.state_dict() for name, part in loop.registry().items()})
    loop.manager.images.new_data = True
    assert loop.resume()
    existing = newest_first(run / "checkpoints")
    saved = load(existing[0])
    assert needed == [loop.config.checkpoint.max_on_disk(loop.config.steps) - len(existing)]
    before, after = saved["state"], {name: part.state_dict() for name, part in loop.registry().items()}
    assert before["loop"]["step"] == after["loop"]["step"] == 2
    assert (before["loader"]["consumed"], after["loader"]["consumed"]) == (2 * loop.config.batch_size, 0)
    changed = dict.fromkeys(differing(before, after))
    assert changed.keys() >= {".loader.consumed", ".loader.count"}
    if "ada" in after:
        assert after["ada"]["p"] == 0.25

    classes, saved_classes = list(loop.loader.dataset.classes), saved["classes"]
    factor = len(classes) / len(saved_classes)
    for name, part in loop.task.registry().items():
        old, new, initial = (by_class(part, state[name]) for state in (before, after, fresh))
        for place, (tensor, dimension, exponent) in new.items():
            changed.pop(f".{name}{place}", None)
            for row, label in enumerate(classes):
                expected = initial[place][0].select(dimension, row)
                if label in saved_classes:
                    source = old[place][0].select(dimension, saved_classes.index(label))
                    expected = source * factor**exponent
                torch.testing.assert_close(tensor.select(dimension, row), expected, rtol=1e-6, atol=0)
    assert all(place.startswith((".loader.", ".loop.best", ".loop.stopping")) for place in changed), changed
    patience = {"best": {"val/accuracy": 0.9}, "stopping": {"best": 0.9, "waited": 3}}
    content = dict(saved, state={**deepcopy(before), "loop": before["loop"] | patience})
    NewImages(loop).adapt(content)
    assert content["state"]["loop"] == before["loop"] | {"best": {}, "stopping": {"best": None, "waited": 0}}


GROWTH = "{start: 8, fade_kimg: 0.016, stable_kimg: 0.016}"
MIXED = "{path: FOLDER/test.lmdb, share: 0.5, until: 2}"


@pytest.mark.parametrize("options", [["--progressive", GROWTH], ["--data.synthetic", MIXED]])
def test_what_depends_on_the_step_goes_on_there(options, tmp_path, packed, folder, slim):
    """The order starts again, but not the stages of growth and the part of the run with synthetic images."""
    config = write_config(tmp_path / "recipe.yaml", "gan", packed)
    options = ["--evaluation.every=0", "--loss.objective=relativistic", *options]  # which reads two batches a step
    first, other = ([word.replace("FOLDER", str(place)) for word in options] for place in (packed, folder))
    assert train_in_process(config, tmp_path / "run", "--max-steps=2", *first) == 0
    other += [f"--data.path={folder}/train.lmdb", f"--data.val-path={folder}/test.lmdb"]
    tree = build_run_config(read_yaml(config), other, "recipe")
    loop = prepare(tree, RunFolder(tmp_path / "run"), torch.device("cpu"))
    loop.manager.images.new_data = True
    assert loop.resume()
    assert (loop.step, loop.loader.step) == (2, 2)
    assert loop.loader.state_dict()["consumed"] == 0
    batch = next(loop.loader)
    assert batch.images.shape[2:] == (16, 16)
    assert batch.synthetic is None or not batch.synthetic.any()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--data.path={folder}/large.lmdb"], "images are of 8 px, grey, the run's networks are for 16 px, grey"),
        (["--steps=2"], "--steps 2: the run has done 2 already; give 3 or more"),
        (["--run-dir={folder}/nothing"], "nothing has no checkpoint to continue; leave --new-data out to start a run"),
    ],
)
def test_what_cannot_go_on_is_refused(begun, folder, tmp_path, refused, options, told):
    run, config, more = begun
    classes = Dataset(folder / "train.lmdb").classes
    pack_arrays(tmp_path / "large.lmdb", np.zeros((12, 1, 8, 8), np.uint8), np.arange(12) % len(classes), classes)
    options = [option.format(folder=tmp_path) for option in [*options, "--data.val-path=null"]]
    assert told in refused(train.main, "--config", config, "--run-dir", run, *more, "--new-data", *options)


@pytest.mark.parametrize(
    ("saved", "classes", "sets", "entries", "problem"),
    [
        ([], [], None, {}, None),
        (["a", "b"], ["b", "c"], None, {}, None),
        (["a", "b"], ["b", "c"], [[0]], {"sets": [[0]]}, None),
        (["a", "b"], ["b", "c"], [[0]], {"state": {"model": {"thresholds": 0}}}, None),
        ([], ["b", "c"], None, {}, "its images have classes, the run has none; set --conditional false"),
        (["a", "b"], ["x", "y"], None, {}, "has none of the run's classes (a, b), its own are x, y;"),
        (["a", "b"], [], None, {}, "has none of the run's classes (a, b), its own are none;"),
        (["a", "b"], ["b", "c"], None, {"sets": [[0]]}, "either its images or the run's earlier ones have several"),
        (["a", "b"], ["b", "c"], [[0]], {}, "either its images or the run's earlier ones have several"),
    ],
)
def test_classes_that_a_run_can_go_on_with(saved, classes, sets, entries, problem):
    dataset = SimpleNamespace(path="new.lmdb", classes=classes, meta=SimpleNamespace(sets=sets))
    shape = {"channels": 1, "classes": len(classes), "resolution": 16}
    loop: Any = SimpleNamespace(
        loader=SimpleNamespace(dataset=dataset), task=SimpleNamespace(shape=shape, registry=dict)
    )
    content = {"shape": shape | {"classes": len(saved)}, "classes": saved, "state": {}} | entries
    if problem is None:
        NewImages(loop)._check(content)
    else:
        assert_raises(UserError, re.escape(f"--new-data: new.lmdb: {problem}"), NewImages(loop)._check, content)


def test_a_roll_back_may_reach_the_earlier_images(tmp_path):
    save(keeper_of(tmp_path), 1)
    others = SimpleNamespace(**vars(META) | {"content_hash": "9", "count": 7})
    keeper = keeper_of(tmp_path, others)
    keeper.images.new_data, keeper.images.adapt = True, lambda content: "adapted"
    keeper.restore({"model": Weights()})
    save(keeper, 3)
    later = keeper_of(tmp_path, others)  # another process, without the option
    later.images.adapt = lambda content: content["state"].update(model={"w": torch.ones(1)}) or "adapted"
    assert later.restore({"model": Weights()})["step"] == 3
    weights = Weights()
    assert later.restore({"model": weights}, up_to=2)["step"] == 1
    assert weights.weights.shape == (1,)
    assert [(images.step, images.content_hash) for images in later.images.periods] == [(0, "1234"), (1, "9")]


def test_no_tensor_with_a_slice_per_class_is_forgotten(slim):
    """Of each GAN and head: what has another shape with other classes is what `class_parts` names."""
    networks = {}
    for name, architecture in ARCHITECTURES.items():
        config = config_of(name)(task="gan")
        for part in ("generator", "discriminator"):
            networks[name, part] = partial(architecture.network, part, getattr(config, part))
    for head in ("linear", "hidden"):
        networks["classifier", head] = partial(Classifier, ModelConfig(stem="small", head=head))
    for key, build in networks.items():
        with torch.device("meta"):
            few, many = (build(classes=classes, channels=1, resolution=32) for classes in (3, 5))
            for network in (few, many):
                if key[1] == "discriminator":
                    network.add_auxiliary()
                elif key[0] == "classifier":
                    network.add_thresholds()
        states = few.state_dict(), many.state_dict()
        assert states[0].keys() == states[1].keys()
        expected = {}
        for name in states[0]:
            small, large = (state[name].shape for state in states)
            if small != large:
                expected[name] = [dimension for dimension, size in enumerate(small) if large[dimension] != size]
        assert {name: [part.dimension] for name, part in class_parts(few).items()} == expected, key
