"""The data of a run as its config says: opened, checked, sampled, read."""

import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.augment.transforms import MixingAugment
from duetgan.data.images import encode
from duetgan.data.images.decode import RandomCrop
from duetgan.data.lmdb.format import Split
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image, pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import alternating_flip_
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.data.reading.weighted_sampling import class_weights
from duetgan.training.base import data
from duetgan.training.base.config import DataConfig, RunConfig
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.gan import task as gan
from duetgan.training.gan.config import GanConfig
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import numpy_generator
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, change, sample_images
from tests.data.packing.test_inspect import change_entry

LABELS = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2]


@pytest.fixture
def folder(tmp_path):
    """train.lmdb: 10 raw RGB images of 8 px; test.lmdb: four others; own.lmdb: sizes of their own."""
    pack_arrays(tmp_path / "train.lmdb", sample_images(10), LABELS, CLASSES)
    pack_arrays(tmp_path / "test.lmdb", sample_images(4, seed=1), [0, 1, 2, 0], CLASSES)
    with LMDBWriter(tmp_path / "own.lmdb", Layout.of(ImageSpec(3, 0, 0), "source"), classes=CLASSES) as writer:
        for number in range(6):
            image = sample_images(1, side=8 + number, seed=9)[0].transpose(1, 2, 0)[:8]
            add_image(writer, image, number % 3, payload=encode(image, "png"))
        writer.finish()
    return tmp_path


def config_of(folder: Path, **options: Any) -> RunConfig:
    path = folder / options.pop("name", "train.lmdb")
    return RunConfig(task="x", batch_size=4, seed=5, data=DataConfig(path=str(path), **options))


def opened(config: RunConfig) -> Any:
    """Training and held-out images, checked."""
    training = data.open_training(config.data)
    held_out = data.open_held_out(config.data, training)
    data.check_data(config, training, held_out)
    return training, held_out


# --- opening


def test_held_out_images_are_whole_and_at_the_same_size(folder):
    assert data.open_held_out(config_of(folder).data, Dataset(folder / "train.lmdb")) is None
    crop: dict[str, Any] = {"crop": "random", "crop_area": (0.3, 0.5), "crop_aspect": (0.9, 1.2)}
    config = config_of(folder, val_path=str(folder / "own.lmdb"), resolution=6, **crop)
    training, held_out = opened(config)
    assert training.crop == RandomCrop(area=(0.3, 0.5), aspect=(0.9, 1.2))
    assert (held_out.resolution, held_out.crop) == (6, None)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": "trian.lmdb"}, r"trian\.lmdb: no such file.*did you mean 'train\.lmdb'"),
        ({"name": "shard-*.lmdb"}, r"shard-\*\.lmdb: no file matches"),
        (
            {"val_path": "tset.lmdb"},
            r"^data\.val_path .*tset\.lmdb: no such file.*did you mean 'test\.lmdb'.*--data\.val_path null$",
        ),
        (  # a recipe's own (U21)
            {"val_path": "none/x.lmdb"},
            r"none/x\.lmdb: no such file; give images held out from .*train\.lmdb with "
            r"--data\.val_path FILE .*--val-share 0\.1",
        ),
        (
            {"name": "own.lmdb", "val_path": "test.lmdb"},
            r"own\.lmdb: its images have sizes of their own; set data\.resolution N",
        ),
        ({"resolution": 16}, r"train\.lmdb: its images have 8 px, less than the 16 px asked for"),
        *(({"val_path": f"{kind}.lmdb"}, rf"{kind}\.lmdb: .*pack") for kind in ("grey", "large", "small")),
    ],
)
def test_files_that_are_missing_or_do_not_fit_are_named(folder, options, problem):
    """Held-out images of another size were scaled in silence."""
    for name, channels, side in (("grey", 1, 8), ("large", 3, 16), ("small", 3, 4)):
        pack_arrays(folder / f"{name}.lmdb", sample_images(4, channels, side), [0, 1, 2, 0], CLASSES)
    if "val_path" in options:
        options = options | {"val_path": str(folder / options["val_path"])}
    with pytest.raises(UserError, match=problem):
        opened(config_of(folder, **options))
    with pytest.raises(UserError, match=r"data\.path is not set; pack images with .*--data\.path FILE"):
        data.open_training(DataConfig())


# --- checks


@pytest.mark.parametrize("label", [-1, 3, 1 << 40])
@pytest.mark.parametrize("name", ["train.lmdb", "test.lmdb"])
def test_labels_without_a_class(folder, name, label):
    """Also for a GAN, whose task does not look at them."""
    change_entry(folder / name, label=label)
    told = rf"{name}: record 0 is damaged: label {label} has no class, the file has 3 classes; copy or pack"
    with pytest.raises(UserError, match=told):
        opened(config_of(folder, val_path=str(folder / "test.lmdb")))


def test_leaks_are_counted(folder, capsys, monkeypatch):
    mixed = np.concatenate([sample_images(4, seed=1), sample_images(10)[[3, 3, 7]]])
    pack_arrays(folder / "mixed.lmdb", mixed, [0] * 7, CLASSES)
    opened(config_of(folder, val_path=str(folder / "test.lmdb")))
    assert capsys.readouterr().err == ""
    opened(config_of(folder, val_path=str(folder / "mixed.lmdb")))
    error = capsys.readouterr().err
    assert error.startswith("warning: 3 of the 7 images of ")
    assert error.count("\n") == 1
    assert f"`duet duplicates {folder}/train.lmdb {folder}/mixed.lmdb`" in error
    pack_arrays(folder / "larger.lmdb", sample_images(4, side=16), [0, 1, 2, 0], CLASSES)
    opened(config_of(folder, val_path=str(folder / "larger.lmdb"), resolution=8))
    assert "are not checked: they have other sizes" in capsys.readouterr().err
    monkeypatch.setattr("duetgan.utils.distributed.collectives.is_main", lambda: False)
    opened(config_of(folder, val_path=str(folder / "mixed.lmdb")))
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    change(folder / "mixed.lmdb", b"hash/00000000", None)
    opened(config_of(folder, val_path=str(folder / "mixed.lmdb")))
    told = r"warning: .*mixed\.lmdb: record 0 to 6 is damaged: .*; whether held-out images are training images too is"
    assert re.match(told, capsys.readouterr().err)


def test_held_out_rectangles_fit_those_of_training(folder):
    for name, images in (("wide", sample_images(6)[:, :, :6]), ("held-out", sample_images(4, seed=1)[:, :, :6])):
        pack_arrays(folder / f"{name}.lmdb", images, np.arange(len(images)) % 3, CLASSES)
    found = opened(config_of(folder, name="wide.lmdb", val_path=str(folder / "held-out.lmdb")))
    assert [dataset.spec.size for dataset in found] == [(6, 8), (6, 8)]


def test_nodes_with_other_files_are_named(folder, monkeypatch):
    config = config_of(folder, val_path=str(folder / "test.lmdb")).data
    training, held_out = (Dataset(folder / name) for name in ("train.lmdb", "test.lmdb"))
    training.synthetic = Dataset(folder / "own.lmdb")
    data.check_same_images(config, training, held_out)
    for name, dataset in (("train", training), ("test", held_out), ("own", training.synthetic)):

        def gathered(content: str | None, *, own: str = dataset.meta.content_hash) -> list[str | None]:
            return [content, content, "other" if content == own else content]

        monkeypatch.setattr("duetgan.utils.distributed.collectives.gather_objects", gathered)
        told = rf"{name}\.lmdb: rank 2 has other images than rank 0"
        assert_raises(UserError, told, data.check_same_images, config, training, held_out)


def test_as_many_files_may_be_open_as_the_system_allows(monkeypatch, folder):
    limits: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    data.open_training(config_of(folder).data)
    assert limits == [(4096, 4096)]


# --- sampling and loading


def test_weights(folder):
    reader = Dataset(folder / "train.lmdb")
    shares = data.label_frequencies

    def weights(**options: Any) -> Any:
        return data.sampling_weights(config_of(folder, **options).data, reader)

    assert weights() is None
    assert shares(config_of(folder).data, reader) == [6, 3, 1]
    np.testing.assert_allclose(np.bincount(LABELS, weights(sampling="balanced")), 1)
    rates = {"dog": 2.0, "emu": 0.0}
    np.testing.assert_array_equal(weights(class_rates=rates), [1, 1, 1, 1, 1, 1, 2, 2, 2, 0])
    both = {"sampling": "balanced", "class_rates": rates}
    expected = np.array([1 / 6] * 6 + [2 / 3] * 3 + [0])
    np.testing.assert_allclose(weights(**both), expected)
    found = shares(config_of(folder, **both).data, reader)
    np.testing.assert_allclose(found, np.bincount(LABELS, expected))
    assert all(type(share) is float for share in found)


def test_loader_follows_the_config(folder, monkeypatch):
    monkeypatch.setattr("duetgan.utils.distributed.collectives.rank", lambda: 1)
    monkeypatch.setattr("duetgan.utils.distributed.collectives.world_size", lambda: 2)
    section = config_of(folder, sampling="balanced", prefetch=3).data
    config = ClassifierConfig(batch_size=4, seed=5, data=section, augment=MixingAugment(flip="alternating"))
    training, _ = opened(config)
    loader = data.make_loader(config, training, torch.device("cpu"))
    assert loader.prefetch == 0  # the step itself wants the cores
    assert data.make_loader(config, training, torch.device("meta")).prefetch == 3
    weights, groups = data.sampling_weights(config.data, training), training.labels()
    expected = GlobalSampler(10, batch_size=4, seed=5, weights=weights, groups=groups, rank=1, world_size=2)
    assert loader.state_dict() == expected.state_at(loader.position)
    phases = numpy_generator(5, "flip").integers(2, size=10)
    for _ in range(6):
        indices, keys = expected.batch(loader.position)
        images = torch.from_numpy(sample_images(10)[indices])
        alternating_flip_(images, phases[indices], keys)
        assert torch.equal(next(loader).images, images)


# --- what the plan says


def test_threads_are_those_of_the_config_or_one_for_each_core(folder, monkeypatch):
    options: dict[str, Any] = {"name": "own.lmdb", "val_path": str(folder / "test.lmdb"), "resolution": 6}
    for workers, cores, threads in ((3, 2, 3), ("auto", 2, 2), ("auto", 1, 0)):
        monkeypatch.setattr(data, "cores", lambda: cores)  # noqa: B023
        training, held_out = opened(config_of(folder, workers=workers, **options))
        assert (training.workers, held_out.workers) == (threads, threads)


def test_keys_of_older_versions_are_accepted_with_their_defaults_alone():
    old: dict[str, Any] = {"cache": "off", "on_damage": "stop", "sample_weights": None}
    assert DataConfig(path="x", **old) == DataConfig(path="x")
    other: dict[str, Any] = {"cache": "memory", "on_damage": "skip", "sample_weights": "w.txt"}
    for key, value in other.items():
        assert_raises(UserError, f"unknown key '{key}'", DataConfig, path="x", **{key: value})


def test_description(folder):
    assert data.data_text(Dataset(folder / "train.lmdb")) == "10 images, 8 px, RGB, 3 classes, raw"
    pack_arrays(folder / "grey.lmdb", sample_images(1200, 1, 4), encoding="png")
    two = Dataset([folder / "grey.lmdb", folder / "grey.lmdb"])
    assert data.data_text(two) == "2,400 images, 4 px, grey, no labels, png"
    names = ("path", "count", "by_class", "channels", "resolution", "encoding", "content_hash")
    by_class = {"cat": 6, "dog": 3, "emu": 1}
    training = Dataset(folder / "train.lmdb", resolution=6)
    own = (str(folder / "train.lmdb"), 10, by_class, 3, 6, "raw", training.meta.content_hash)
    others: Any = (f"{folder}/grey.lmdb + {folder}/grey.lmdb", 2400, {}, 1, 4, "png", two.meta.content_hash)
    expected = {"training": dict(zip(names, own, strict=True)), "held-out": dict(zip(names, others, strict=True))}
    assert data.facts(training, two) == expected
    split = Split(part="val", share=0.1, seed=0, whole="x", images=12, group_by="--group-by-folder", groups=1234)
    two.meta = two.meta.model_copy(update={"split": split})
    expected["held-out"]["groups"] = "1,234 (--group-by-folder)"
    assert data.facts(training, two) == expected
    sets = [[0, 1], [], [1]]
    pack_arrays(folder / "several.lmdb", sample_images(5), [0, 0, 1, 2, 2], CLASSES[:2], label_sets=sets)
    training.synthetic = Dataset(folder / "several.lmdb")  # an image counts for each of its classes
    assert data.facts(training, None)["synthetic"]["by_class"] == {"cat": 2, "dog": 4}


def test_fault_20_held_out_classes_of_a_gan(tmp_path):
    made = {}
    names = {"train": ["cat", "dog"], "val": ["cat", "emu"], "swapped": ["dog", "cat"], "plain": []}
    for name, classes in names.items():
        pack_arrays(tmp_path / f"{name}.lmdb", sample_images(4), np.arange(4) % max(1, len(classes)), classes)
        made[name] = Dataset(tmp_path / f"{name}.lmdb")
    config = GanConfig(data=DataConfig(path="train.lmdb", val_path="val.lmdb"), batch_size=4)
    swapped, remedy = "class 0 is 'dog' here and 'cat' there", "pack both from the same class folders"
    missing = "cat, dog missing here"
    for other, odd in (("val", "dog missing here; emu only here"), ("swapped", swapped), ("plain", missing)):
        with pytest.raises(UserError, match=rf"val\.lmdb: its classes are not those of train\.lmdb: {odd}; {remedy}$"):
            gan.GanTask(config, made["train"], made[other], torch.device("cpu"))
    gan.GanTask(config, made["train"], None, torch.device("cpu"))
    gan.GanTask(config.changed(conditional=False), made["train"], made["val"], torch.device("cpu"))


@pytest.mark.parametrize("tokens", [[], ["--data.class_rates", "{1: 2.0}"]])
def test_a_class_that_yaml_reads_as_a_number(tmp_path, tokens):
    """J31: it is the class of that name."""
    text = "data: {path: x.lmdb, class_rates: {1: 2.0}}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text if not tokens else "data: {path: x.lmdb}")
    config = build(ClassifierConfig, read_yaml(str(recipe)), tokens)
    found = class_weights(np.array([0, 1]), ["0", "1"], config.data.class_rates)
    np.testing.assert_array_equal(found, [1, 2])
    if tokens:
        with pytest.raises(UserError, match="class_rates false: must be a name; write yes, no"):
            build(ClassifierConfig, {}, ["--data.class_rates", "{no: 2.0}"])


def test_values_of_more_than_8_bits_are_told_and_must_mean_the_same(folder):
    for name, most in (("deep", 4000), ("other", 60_000)):
        images = np.random.default_rng(0).integers(0, most, (4, 3, 8, 8)).astype(np.uint16)
        pack_arrays(folder / f"{name}.lmdb", images, [0, 1, 2, 0], CLASSES)
    section = DataConfig(path=str(folder / "deep.lmdb"), val_path=str(folder / "other.lmdb"))
    config = ClassifierConfig(data=section)
    training = data.open_training(section)
    assert "8 px, RGB, 16 bits (0 to 4095), 3 classes" in data.data_text(training)
    assert config.shape(training)["pixel_format"] == {"depth": "uint16", "high": 4095.0}
    with pytest.raises(UserError, match=r"RGB, 16 bits \(0 to 65535\), those of .* 16 bits \(0 to 4095\); pack both"):
        data.check_data(config, training, data.open_held_out(section, training))
    config.augment.trivial_augment = True
    with pytest.raises(
        UserError, match=r"trivial_augment means 8-bit grey or RGB.* 16 bits \(0 to 4095\): set it false"
    ):
        data.check_data(config, training, None)
