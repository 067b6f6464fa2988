"""What is frozen is computed once: features of every image, and training behind what is cached."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils._pytree import tree_leaves

from duetgan.data.augment.transforms import AUGMENTATIONS, to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.training.base.data import open_training
from duetgan.training.classifier import frozen
from duetgan.training.classifier.finetune import FineTuneConfig, FineTuning
from duetgan.training.classifier.network import PLACEMENTS
from duetgan.training.classifier.replica import ClassifierFromStage
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.run import prepare
from duetgan.training.engine.speed import Trial
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.optim.ema import EMA
from duetgan.utils.checkpoint import load
from duetgan.utils.config.build import to_tree
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.seeding import forked
from tests.end_to_end.helpers import differing, state_of
from tests.end_to_end.ranks import run
from tests.metrics.conftest import gan_run
from tests.models.helpers import draw

pytestmark = pytest.mark.usefixtures("slim")


def network(name: str = "resnet18", side: int = 32, **config: Any) -> Classifier:
    with forked(0, "init", "test frozen"):
        return Classifier(ModelConfig(name=name, **config), channels=1, classes=10, resolution=side)


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "efficientnet_b0", "airbench", "timm:test_resnet"])
def test_a_network_cut_after_any_stage_is_the_whole_one(name):
    model, images = network(name).eval(), draw(4, 1, 32, 32).float()
    expected = model(images)
    last = len(model.stages) - 1
    for end in range(1, last + 1) if model.backbone.in_turn else [last]:
        between = model.features(images, end)
        assert between.ndim == (2 if end == last else 4)
        assert torch.equal(ClassifierFromStage(model)(between, end), expected)


def test_features_of_every_image_and_its_mirror(packed, monkeypatch, capfd):
    dataset, model = Dataset(packed / "train.lmdb"), network(side=24, stem="small-stride2")  # images of 16 px
    monkeypatch.setattr(frozen, "PIXELS", 24 * 24 * 48)  # four blocks of 48 and one of 8
    features, labels = frozen.image_features(model, dataset, mirror=True)
    assert model.training
    images = to_float(torch.from_numpy(dataset.read(np.arange(200))[0]))
    large = torch.nn.functional.interpolate(images, size=(24, 24), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = torch.stack([model.eval().features(x) for x in (large, large.flip(3))], 1)
    assert labels.tolist() == dataset.labels().tolist()
    assert torch.allclose(features, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(features[:, 0], features[:, 1], rtol=1e-2)
    again, _ = frozen.image_features(model, dataset, mirror=True)
    alone, _ = frozen.image_features(model, dataset, mirror=False)
    assert torch.equal(again, features)
    assert torch.equal(alone, features[:, :1])
    some, named = frozen.image_features(model, dataset, records=np.array([7, 3, 190]), mirror=True)
    assert torch.allclose(some, features[[7, 3, 190]], rtol=1e-4, atol=1e-5)
    assert named.tolist() == dataset.labels()[[7, 3, 190]].tolist()
    assert capfd.readouterr().err == ""  # no progress bar


TREE: dict[str, Any] = {
    "task": "classifier",
    "steps": 12,
    "batch_size": 48,  # five of them are more than an epoch of 200
    "model": {"stem": "small-stride2"},
    "finetune": {"unfreeze": {"head": 0}},
    "optimizer": {"name": "sgd", "lr": 0.05, "schedule": "constant"},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 100},
    "log": {"every": 4, "tensorboard": False, "samples_every": 0},
}
READ: dict[str, Any] = {"stem": "small-stride2", "head": "readout", "readout_parts": 1}
LAST = {"freeze": ["stem", "layer1", "layer2", "layer3"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flip": {"augment": {"flip": True}},
    "alternating": {"augment": {"flip": "alternating"}, "micro_batch": 20, "ema": {"decay": 0.5}},
    "maps": {"finetune": {"freeze": ["stem", "layer1", "layer2"]}, "augment": {"flip": True}},
    "bf16": {"precision": "bf16", "finetune": {"freeze": ["stem"]}, "micro_batch": "auto"},
    "statistics": {"finetune": {"freeze": ["stem", "layer1"], "freeze_bn": True}, "precision": "fp16"},
    "one stage": {"model": {"name": "timm:test_resnet"}},
    "readout of two": {"model": READ | {"readout_stages": 2}, "finetune": LAST, "augment": {"flip": True}},
    "readout of all": {"model": READ, "finetune": LAST},
}
LONG = ("bf16",)
BORDERS = {"maps": 3, "bf16": 1, "statistics": 2, "readout of two": 4, "readout of all": 1}


def config_of(packed: Path, **more: Any) -> Any:
    data = {"path": str(packed / "train.lmdb"), "val_path": str(packed / "test.lmdb")} | more.pop("data", {})
    return build_run_config(TREE | more | {"data": data}, [], "x")


def train(config: Any, folder: Path, max_steps: int | None = None) -> tuple[Any, dict[str, Any]]:
    """As train.py does: resume if there is something, and go on. The task and the last checkpoint's state."""
    run = RunFolder(folder)
    loop = prepare(config, run, torch.device("cpu"))
    run.open()
    loop.resume()
    run.save_config(to_tree(config), data=None)
    loop.run(max_steps)
    run.close()
    return loop.task, load(folder / "checkpoints" / f"step-{loop.step:08d}.pt")["state"]


def uncached(variant: dict[str, Any]) -> dict[str, Any]:
    return variant | {"finetune": variant.get("finetune", TREE["finetune"]) | {"cache": 0}}


def leaves(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in VARIANTS])
def test_cached_is_uncached_within_rounding_and_resumes_to_the_bit(packed, tmp_path, name, capsys, monkeypatch):
    """Also where the bits depend on what is computed together, which the CPU's here do not."""
    variant, together = VARIANTS[name], list[list[int]]()
    original = frozen.outputs

    def outputs(model: Any, dataset: Any, records: np.ndarray, *more: Any) -> torch.Tensor:
        together.append(records.tolist())
        return original(model, dataset, records, *more)

    monkeypatch.setattr(frozen, "outputs", outputs)
    monkeypatch.setattr(frozen, "BLOCK", 48)
    task, straight = train(config_of(packed, **variant), tmp_path / "straight")
    assert task.frozen.begin == (len(task.model.stages) - 1 if "finetune" not in variant else BORDERS[name])
    assert "computed once, outputs of 200 images" in capsys.readouterr().err
    other, expected = train(config_of(packed, **uncached(variant)), tmp_path / "uncached")
    assert (other.frozen.begin, "computed once" in capsys.readouterr().err) == (0, False)
    tolerance = 2e-2 if variant.get("precision") else 1e-4
    for found, wanted in zip(leaves(straight), leaves(expected), strict=True):
        assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * 0.1)
    _, before = train(config_of(packed, **variant), tmp_path / "resumed", max_steps=7)
    assert not torch.equal(*(list(state["model"].values())[-1] for state in (before, straight)))
    _, resumed = train(config_of(packed, **variant), tmp_path / "resumed")
    assert differing(straight, resumed) == []
    assert [len(records) for records in together] == 3 * [48, 48, 48, 48, 8]
    assert together[:5] == together[5:10] == together[10:]


def test_speed_is_measured_behind_what_is_kept(packed):
    config = config_of(packed, **VARIANTS["maps"], channels_last=True)
    trial = Trial(config, 8, Dataset(packed / "train.lmdb"), torch.device("cpu"))
    assert trial.batch.features is not None
    assert trial.seconds("fp32") > 0
    assert trial.task.frozen.begin == BORDERS["maps"]  # type: ignore[attr-defined]
    config = config_of(packed, **VARIANTS["maps"], resizing={"initial_scale": 0.5}, steps=100)
    task = ClassifierTask(config, Dataset(packed / "train.lmdb"), None, torch.device("cpu"))
    for step, side in ((0, 8), (99, 16)):
        assert task.as_read(read_batch(task.dataset, np.arange(4)), step).features is not None
        assert task.model.side == side
    whole = config_of(packed, **uncached(VARIANTS["maps"]))
    assert not Trial(whole, 8, Dataset(packed / "train.lmdb"), torch.device("cpu")).batch.images.is_floating_point()


def borders(packed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[int]:
    """Behind how many stages each step of a run begins."""
    found: list[int] = []
    step = ClassifierTask.step

    def note(self: ClassifierTask, batches: Any, number: int) -> Any:
        figures = step(self, batches, number)
        found.append(self.frozen.begin)
        return figures

    monkeypatch.setattr(ClassifierTask, "step", note)
    train(config_of(packed, **more), folder)
    return found


def test_the_border_moves_with_what_trains_and_with_the_size(packed, tmp_path, monkeypatch, capsys):
    unfreeze = {"finetune": {"unfreeze": {"head": 0, "layer4": 5, "layer3": 11}, "freeze_at": {"head": 14}}}
    found = borders(packed, tmp_path / "one", monkeypatch, **unfreeze, steps=15)
    assert found == [5] * 5 + [4] * 6 + [0] * 4  # layer3's last steps are fewer than the images
    assert capsys.readouterr().err.count("computed once") == 2
    grown = {"resizing": {"initial_scale": 0.5, "delay_fraction": 0.5, "finetune_fraction": 0.5}}
    found = borders(packed, tmp_path / "two", monkeypatch, **grown)
    assert found == [5] * 12
    assert capsys.readouterr().err.count("computed once") == 2  # at 8 px and at 16 px


NEVER: dict[str, dict[str, Any]] = {
    "off": {"finetune": {"unfreeze": {"head": 0}, "cache": 0}},
    "shifted": {"augment": {"shift": 1}},
    "erased": {"augment": {"erase": 0.1, "flip": True}},
    "mixed": {"augment": {"mixup": 0.2}},
    "cut": {"augment": {"cutmix": 0.2}},
    "trivial": {"augment": {"trivial_augment": True}},
    "cropped": {"data": {"crop": "random"}},
    "watched": {"log": TREE["log"] | {"layers": ["conv1"], "tensorboard": True}},
    "all trains": {"finetune": {}},
    "statistics train": {"finetune": {"freeze_at": {"head": 9}}},
    "own": {"augment": {"own": ["fade"]}},
    "short": {"steps": 4, "batch_size": 50},  # as many samples as images
    "short for both views": {"steps": 8, "batch_size": 50, "augment": {"flip": True}},
    "taught": {"loss": {"teacher": "a run"}},
    "on several devices": {"model": TREE["model"] | {"split": "auto"}},
}


@pytest.mark.parametrize("name", NEVER)
def test_nothing_is_kept_where_images_never_come_again(packed, name, monkeypatch):
    monkeypatch.setitem(AUGMENTATIONS, "fade", lambda images, draws: images)
    monkeypatch.setattr("duetgan.training.classifier.loss.Teacher", lambda *_: None)
    monkeypatch.setitem(PLACEMENTS, "split", lambda *_: None)
    config = config_of(packed, **NEVER[name])
    task = ClassifierTask(config, open_training(config.data), None, torch.device("cpu"))
    assert task.frozen.spans == []
    assert task.source(0) is None


def test_features_are_computed_in_the_runs_precision(packed):
    """Both of images and of the outputs that are kept."""
    config = config_of(packed, precision="bf16", finetune={"freeze": ["stem", "layer1"]})
    task = ClassifierTask(config, open_training(config.data), None, torch.device("cpu"))
    source: Any = task.source(0)
    assert (task.frozen.begin, source.dtype) == (2, torch.bfloat16)
    for features, _ in (task.frozen.features(None), task.frozen.features(source)):
        assert torch.equal(features, features.bfloat16().float())


@pytest.mark.parametrize(("freeze", "is_cached"), [("backbone", True), ("stem", False)])
def test_accelerators_compute_maps_that_have_more_bytes_than_images(packed, monkeypatch, freeze, is_cached):
    """Features have more bytes too, but they save the whole network."""
    config = config_of(packed, finetune={"freeze": [freeze]}, augment={"flip": True})
    task = ClassifierTask(config, open_training(config.data), None, torch.device("cpu"))
    source: Any = task.source(0)
    assert source.rows.shape[1] > task.dataset.spec.values
    monkeypatch.setattr(frozen, "device_of", lambda _: torch.device("cuda"))
    task.frozen._span = None
    assert (task.source(0) is not None) == is_cached
    monkeypatch.setattr("duetgan.utils.distributed.collectives.all_reduce_max", lambda _: 1)  # another has no memory
    task.frozen._span = None
    assert task.source(0) is None


def test_processes_compute_the_blocks_in_turn(packed, monkeypatch):
    """Of five blocks, the second of two processes has nothing to do in the last round."""
    monkeypatch.setattr(frozen, "BLOCK", 48)
    config = config_of(packed)
    task = ClassifierTask(config, open_training(config.data), None, torch.device("cpu"))
    expected = list(task.frozen._parts(5))
    monkeypatch.setattr("duetgan.utils.distributed.collectives.world_size", lambda: 2)
    monkeypatch.setattr("duetgan.utils.distributed.collectives.gather_objects", lambda value, **_: [value])
    for rank, count in ((0, 3), (1, 2)):
        monkeypatch.setattr("duetgan.utils.distributed.collectives.rank", lambda rank=rank: rank)
        computed = list(task.frozen._parts(5))
        assert len(computed) == count
        assert all(map(torch.equal, computed, expected[rank::2]))


@pytest.mark.parametrize("is_main", [True, False])
def test_one_process_shows_a_bar_of_all_images(packed, monkeypatch, is_main):
    shown: list[dict[str, Any]] = []

    class Bar(frozen.Bar):
        def __init__(self, **how: Any) -> None:
            shown.append(how)
            super().__init__(**how | {"disable": True})

    config = config_of(packed)
    task = ClassifierTask(config, open_training(config.data), None, torch.device("cpu"))
    monkeypatch.setattr(frozen, "Bar", Bar)
    monkeypatch.setattr("duetgan.utils.distributed.collectives.is_main", lambda: is_main)
    task.source(0)
    task.frozen.features(None)
    assert shown == [
        {"total": 200, "desc": "frozen stages of", "unit": "image", "disable": not is_main},
        {"total": 200, "desc": "features of", "unit": "image", "disable": False},
    ]


def test_a_network_that_draws_or_looks_at_the_batch_has_no_border(packed):
    model = network()
    assert FineTuning(model, FineTuneConfig(freeze=["stem"]), steps_per_epoch=1.0).border(0) == 1
    for option in ("p", "drop_prob"):  # of torch's dropout, and of timm's stochastic depth
        model.network.relu = torch.nn.Identity()
        setattr(model.network.relu, option, 0.1)
        assert FineTuning(model, FineTuneConfig(freeze=["stem"]), steps_per_epoch=1.0).border(0) == 0
    model.network.relu = torch.nn.BatchNorm2d(64, affine=False)  # goes on counting: it has nothing to freeze
    assert FineTuning(model, FineTuneConfig(freeze=["stem"]), steps_per_epoch=1.0).border(0) == 0
    assert FineTuning(model, FineTuneConfig(freeze=["stem"], freeze_bn=True), steps_per_epoch=1.0).border(0) == 1
    inseparable = FineTuning(
        network("timm:test_resnet"), FineTuneConfig(unfreeze={"head": 0, "stage4": 1}), steps_per_epoch=1.0
    )
    assert (inseparable.border(0), inseparable.border(1)) == (len(inseparable.model.stages) - 1, 0)


def test_beyond_the_memory_or_the_limit_nothing_is_kept(packed, tmp_path, monkeypatch, capsys):
    variant = VARIANTS["maps"] | {"data": {"sampling": "balanced"}}
    task, expected = train(config_of(packed, **variant), tmp_path / "memory")
    size = 200 * 2 * 4 * np.prod(task.frozen.shape)
    images = "outputs of 200 images and their mirror images"
    line = f"frozen: stem to layer2 computed once, {images}: {size / 2**20:,.3g} MiB, kept in memory\n"
    assert line in capsys.readouterr().err
    less = variant | {"finetune": variant["finetune"] | {"cache": size / 2**30 - 1e-9}}
    assert train(config_of(packed, **less), tmp_path / "bounded")[0].frozen.begin == 0
    monkeypatch.setattr(frozen, "available_bytes", lambda: 8 * size - 1)
    monkeypatch.setattr(frozen, "local_processes", lambda: 2)  # each keeps all
    task, found = train(config_of(packed, **variant), tmp_path / "nowhere")
    line = f"computed in every step, {images}: {2 * size / 2**20:,.3g} MiB, too much to keep\n"
    assert f"frozen: stem to layer2 are {line}" in capsys.readouterr().err
    assert task.frozen.begin == 0
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_synthetic_images_are_read_by_their_own_numbers(packed, tmp_path):
    synthetic = {"path": str(packed / "test.lmdb"), "share": 0.25, "weight": 0.3}
    variant: dict[str, Any] = {"data": {"synthetic": synthetic}, "augment": {"flip": True}, "steps": 14}
    task, found = train(config_of(packed, **variant), tmp_path / "cached")
    assert (task.frozen.begin, task.frozen.count) == (5, 300)
    _, expected = train(config_of(packed, **uncached(variant)), tmp_path / "uncached")
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_samples_that_a_generator_draws_anew_in_each_epoch_are_not_kept(packed, tmp_path):
    with Dataset(packed / "train.lmdb") as dataset:
        generator = gan_run(tmp_path / "gan", classes=list(dataset.classes), side=16)
    config = config_of(packed, data={"synthetic": {"checkpoint": str(generator), "share": 0.25}})
    task = ClassifierTask(config, open_training(config.data), None, torch.device("cpu"))
    assert task.frozen.count == 400
    assert task.frozen.spans == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux")
def test_two_processes_share_the_work_and_read_the_same_bits(packed, tmp_path):
    """At 128 px inside the network there are two blocks, one for each. Killed, they read the same again."""
    model = {"name": "resnet18", "input_size": 128}
    tree = TREE | {"data": {"path": str(packed / "train.lmdb")}, "model": model, "augment": {"flip": "alternating"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree | {"checkpoint": {"every": 5}}))

    def trained(name: str, **how: Any) -> Any:
        argv = ["--config", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / name)]
        return run(argv, tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}", **how)

    one, two = trained("one"), trained("two", world=2)
    assert len({sample for _, samples in one for sample in samples}) == 400  # each image and its mirror image
    assert one == two
    killed = trained("killed", world=2, kill_at=7 * 48, saved=5)
    resumed = trained("killed", world=2)
    assert (killed, resumed) == (two[: len(killed)], two[5:])
    assert differing(state_of(tmp_path / "two", 12), state_of(tmp_path / "killed", 12)) == []
    for one_process, other in zip(*(leaves(state_of(tmp_path / name, 12)) for name in ("one", "two")), strict=True):
        assert torch.allclose(one_process, other, rtol=1e-4, atol=1e-5)


def test_an_average_leaves_out_what_stands_still_and_nothing_else():
    """To the bit as if it looked at all: frozen, trained, frozen for good, and loaded in between."""

    def averaged(skipping: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        model[2].requires_grad_(False)  # it stands still until the average is loaded
        ema, touched = EMA(model, buffers="average"), []
        for step in range(12):
            model[0].requires_grad_(4 <= step < 8)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn(parameter.shape))
            if step == 10:
                ema.load_state_dict({name: value + 1 for name, value in ema.state_dict().items()})
            ema._frozen = ema._frozen if skipping else set()
            ema.update(model, 0.9)
            touched.append(torch.cat([values.flatten() for values in ema.model.parameters()][::4]))  # two weights
        return touched

    found, expected = averaged(True), averaged(False)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(found[0], found[3])
    for step in (3, 8, 9, 10):  # it trains from step 4 to 7, then the average goes on towards it, and is loaded
        assert not torch.equal(found[step], found[step + 1])
