"""Surroundings that are not as they should be, by number in the project's table of faults (26, 27): refused before the
first step, or no hindrance.
"""

import hashlib
import io
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from duetgan.commands import train
from duetgan.data.lmdb.record import Layout
from duetgan.data.lmdb.writer import LMDBWriter
from duetgan.data.packing.records import add_image, pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.utils.checkpoint import resolve
from duetgan.utils.config import plugins
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.image_spec import ImageSpec
from tests.data.conftest import sample_images, save
from tests.end_to_end.helpers import last
from tests.end_to_end.ranks import start, wait
from tests.faults.conftest import own_process, with_mounts

SHARDS = 40
ONE_STEP = ["--max-steps", "1", "--evaluation.every", "0", "--log.samples-every", "0"]


def commands_that_write(recipe: list[str], trained: Path, packed: Path, photos: Path, place: Path) -> list[list[str]]:
    """Each writes into the folder `place`."""
    commands: list[list[str | Path]] = [
        [place / "run" if part.endswith("/run") else part for part in recipe],
        ["data.pack", photos, place / "x.lmdb"],
        ["data.inspect", packed / "test.lmdb", "--out", place / "grid.png"],
        ["evaluate.py", "--checkpoint", trained, "--data", packed / "test.lmdb", "--out", place / "eval"],
    ]
    return [list(map(str, command)) for command in commands]


def test_fault_26_a_file_in_the_way_of_the_output_folder(command, recipe, trained, packed, tmp_path):
    """Who is root may write into every folder, but not into a file."""
    save(tmp_path / "photos" / "a.png")
    place = tmp_path / "place"
    place.write_text("years of work")
    for arguments in commands_that_write(recipe, trained, packed, tmp_path / "photos", place):
        command(*arguments).refusal(str(place), "choose")
    assert place.read_text() == "years of work"


def test_fault_26_missing_data(command, recipe, trained, packed, tmp_path):
    key = "--data.val-path"
    typo, nowhere = packed / "tarin.lmdb", tmp_path / "nowhere" / "train.lmdb"
    commands: list[Callable[[Path], list[str | Path]]] = [
        lambda path: [*recipe, key, path],
        lambda path: ["evaluate.py", "--checkpoint", trained, "--data", path],
        lambda path: ["data.inspect", path],
    ]
    for arguments in commands:
        command(*arguments(typo)).refusal("tarin.lmdb: no such file", "did you mean 'train.lmdb'?")
        command(*arguments(nowhere)).refusal(str(nowhere), "no such file")
    command("data.pack", packed / "tarin.lmdb", tmp_path / "x.lmdb").refusal("did you mean 'train.lmdb'?")
    command(*recipe, key, tmp_path / "train-*.lmdb").refusal("train-*.lmdb: no file matches this pattern")
    assert [item.name for item in tmp_path.iterdir()] == ["recipe.yaml"]


def train_with(argv: list[str], of_rank_1: list[str]) -> int:
    """A rank of a training, the second one with options of its own."""
    return run_cli(train.main, argv + (of_rank_1 if os.environ["RANK"] == "1" else []))


def test_fault_26_missing_data_on_one_node(recipe, packed, tmp_path):
    """Found by review: nobody printed what was wrong. Nor may the nodes' files differ."""
    argv = [*recipe[1:], "--device", "cpu"]
    pack_arrays(tmp_path / "other.lmdb", sample_images(200, 1, 16), np.arange(200) % 10, [str(i) for i in range(10)])
    bad = {packed / "tarin.lmdb": "tarin.lmdb: no such file", tmp_path / "other.lmdb": "rank 1 has other images"}
    for path, told in bad.items():
        out = tmp_path / path.stem
        codes = wait(start(train_with, argv, ["--data.path", str(path)], world=2, output=out))
        assert codes == [2, 2]
        lines = [line for rank in (0, 1) for line in Path(f"{out}.{rank}").read_text().splitlines()]
        assert [told in line for line in lines if line.startswith("error")] == [True]
        assert not (tmp_path / "run").exists()


@pytest.fixture
def own_sizes(packed, tmp_path):
    """The training images as JPEGs of 80 px and more: a pattern of SHARDS files, each of which stays open."""
    with Dataset(packed / "train.lmdb") as reader:
        images, labels = reader.read(range(len(reader)))
        layout = Layout.of(ImageSpec(1, 0, 0), "source")
        for shard in range(SHARDS):
            with LMDBWriter(tmp_path / f"own-{shard}.lmdb", layout, classes=reader.classes) as writer:
                for number in range(shard, len(images), SHARDS):
                    image = np.asarray(Image.fromarray(images[number, 0]).resize((80 + number % 9, 80)))
                    buffer = io.BytesIO()
                    Image.fromarray(image).save(buffer, format="JPEG")
                    add_image(writer, image[:, :, None], int(labels[number]), payload=buffer.getvalue())
                writer.finish()
    return tmp_path / "own-*.lmdb"


def limited(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_fault_27_small_shared_memory_and_a_low_soft_limit(recipe, own_sizes, tmp_path):
    """Decoding is done by threads: batches do not go through /dev/shm. A soft limit of open files is raised."""
    prefix = with_mounts("mount -t tmpfs -o size=1m tmpfs /dev/shm", 'test "$(stat -f -c %b*%S /dev/shm)" = 256*4096')
    options = ["--data.resolution", "64", "--data.workers", "2", "--data.crop", "random", "--data.val-path=null"]
    low = limited(40, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    own_process(*recipe, *ONE_STEP, "--data.path", own_sizes, *options, prefix=prefix, preexec_fn=low).success()
    assert last(tmp_path / "run") == 1


OWN = """
from pathlib import Path
from dataclasses import replace
from duetgan.models.registry import BACKBONES
from duetgan.training.optim.config import DECAYS
Path(__file__).with_name("imported").touch()
resnet = BACKBONES["resnet18"]
BACKBONES["mine"] = replace(resnet, names=("mine",), network=lambda *_: resnet.build("resnet18"))
DECAYS["mine"] = lambda progress: 1 - progress
"""
NAMES = ["--model.name", "mine", "--optimizer.schedule", "mine"]
QUIET = ["--evaluation.every", "0", "--log.samples-every", "0"]


def test_a_run_keeps_what_it_imports_and_a_checkpoint_imports_nothing(command, recipe, tmp_path):
    own, run, mark = tmp_path / "own.py", tmp_path / "run", tmp_path / "imported"
    own.write_text(OWN)
    imports = ["--import", str(own)]
    command(*recipe, *imports, *NAMES, *QUIET, "--max-steps", "1").success()
    digest = {str(own): hashlib.sha256(OWN.encode()).hexdigest()}
    assert read_yaml(run / "config.yaml")["imports"] == digest
    assert torch.load(resolve(run), weights_only=True)["config"]["imports"] == digest
    mark.unlink()

    command(*recipe, *NAMES, *QUIET).refusal("is unknown")
    photo = tmp_path / "photo.ppm"
    photo.write_bytes(b"P6 16 16 255\n" + bytes(768))
    predict = ["predict.py", "--checkpoint", str(run), str(photo)]
    command(*predict).refusal("model 'mine' is unknown")
    assert not mark.exists()
    command(*predict, *imports).success()
    assert mark.exists()

    own.write_text(f"{OWN}# changed\n")
    told = command(*recipe, *imports, *NAMES, *QUIET, "--max-steps", "2").success().err
    assert f"config changed since the last start: imports.{own} was '{digest[str(own)]}'" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read (No such file or directory); give a .py file, or the name of an installed module"),
        ("x = (", "SyntaxError"),
        ("\n1 / 0", "ZeroDivisionError: division by zero; --debug prints the traceback"),
        ("from duetgan import UserError\nraise UserError('no such thing')", "own.py: no such thing"),
    ],
)
def test_code_that_cannot_be_imported_is_refused(command, recipe, tmp_path, text, told):
    own = tmp_path / "own.py"
    if text is not None:
        own.write_text(text)
    command(*recipe, "--import", own, "--dry-run").refusal(f"--import {own}: ", told)
    assert not (tmp_path / "run").exists()


def test_installed_plug_ins_are_imported(tmp_path, monkeypatch):
    about = tmp_path / "own-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[duetgan.plugins]\nlosses = installed_plug_in\n")
    module = tmp_path / "installed_plug_in.py"
    module.write_text("from pathlib import Path\nPath(__file__).with_name('imported').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.load()
    assert (tmp_path / "imported").exists()
    own = tmp_path / "own_module.py"
    own.write_text("A = 1\n")
    (tmp_path / "own_folder").mkdir()  # has no file of its own
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    assert plugins.load(["own_module", "own_folder"]) == {"own_module": digest, "own_folder": ""}
    assert plugins.load([str(own)]) == {str(own): digest}
    (tmp_path / "other").mkdir()
    namesake = tmp_path / "other" / own.name
    namesake.write_text(module.read_text())
    plugins.load([str(namesake)])
    assert (tmp_path / "other" / "imported").exists()
    (about / "entry_points.txt").write_text("[duetgan.plugins]\nlosses = missing_plug_in\n")
    with pytest.raises(plugins.UserError, match=r"plug-in losses \(missing_plug_in\): ModuleNotFoundError"):
        plugins.load()
