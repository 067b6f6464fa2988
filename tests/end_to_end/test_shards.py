"""Training from tar files as they are: the run, interrupted or on two processes, is that on the packed file."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from duetgan.commands import evaluate
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from duetgan.models.backbones import base
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.ranks import Notes, printed, run
from tests.end_to_end.recipes import image_folders, write_recipe
from tests.end_to_end.test_exact_resume import INTERRUPTED, RESTORED, Trained, differences
from tests.slim import SlimResNet

ELASTIC_STEPS = 6


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with train-0.tar and train-1.tar of 44 images, val-0.tar of 21, and train.lmdb and test.lmdb of them."""
    folder = tmp_path_factory.mktemp("images")
    for split, name, count, shards in (("train", "train", 44, 2), ("val", "test", 21, 1)):
        files = sorted(image_folders(folder / "files" / split, count, shards).rglob("*.*"), key=lambda file: file.name)
        for shard in range(shards):
            with tarfile.open(folder / f"{split}-{shard}.tar", "w") as archive:
                for file in files[shard * 30 : (shard + 1) * 30]:
                    for suffix, content in ((file.suffix, file.read_bytes()), (".cls", file.parent.name.encode())):
                        member = tarfile.TarInfo(f"{file.stem}{suffix}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
        (folder / name).mkdir()
        for tar in folder.glob(f"{split}-*.tar"):
            (folder / name / tar.name).symlink_to(tar)
        with open_source(str(folder / name), split=split) as source:
            pack(source, folder / f"{name}.lmdb", encoding="source", duplicates=False, workers=0)
    return folder


def recipe(path: Path, task: str, images: Path, *, shards: bool, **changes: Any) -> list[str]:
    """Options of a run on the packed files, or on the shards."""
    given = {"path": f"{images}/train-{{0..1}}.tar", "val_path": f"{images}/val-*.tar"}
    options = [] if not shards else [f"--data.{name}={value}" for name, value in given.items()]
    return ["--config", str(write_recipe(path, task, images, **changes)), *options, "--run-dir"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classifier", "gan"])
def test_a_resumed_run_on_shards_equals_one_on_the_packed_file(task, images, tmp_path, capsys, monkeypatch):
    packed = [*recipe(tmp_path / "recipe.yaml", task, images, shards=False), str(tmp_path / "packed")]
    straight = Trained(tmp_path / "packed", run(packed, tmp_path / "notes-0"))
    direct = [*recipe(tmp_path / "recipe.yaml", task, images, shards=True), str(tmp_path / "direct")]
    killed = run(direct, tmp_path / "notes-1", kill_at=8 * INTERRUPTED, saved=RESTORED)
    assert killed == straight.batches[: len(killed)]
    resumed = Trained(tmp_path / "direct", run(direct, tmp_path / "notes-2"))
    assert resumed.batches[0][0] == 8 * RESTORED
    assert differences(straight, resumed) == []
    assert "44 images in 2 tar files, 16 px, RGB, 3 classes" in printed(tmp_path / "notes-1")
    if task == "classifier":
        monkeypatch.setattr(base, "make", lambda name, **options: SlimResNet())
        documents = []
        for data in (str(images / "test.lmdb"), str(images / "test")):  # the second is a folder of tar files
            asked = ["--checkpoint", str(tmp_path / "direct"), "--data", data, "--out", str(tmp_path / "eval")]
            assert run_cli(evaluate.main, [*asked, "--json"]) == 0
            documents.append(json.loads(capsys.readouterr().out))
        told = [{key: document[key] for key in ("accuracy", "ece", "confusion")} for document in documents]
        assert told[0] == told[1]
        assert documents[0]["n"] == 21


@pytest.mark.parametrize("task", [pytest.param("classifier", marks=pytest.mark.slow), "gan"])
def test_two_processes_read_what_one_reads(task, images, tmp_path):
    """From the shards: one process makes the index, the other waits for it. ADA is on."""
    changes = {"steps": ELASTIC_STEPS + 2, "evaluation": {"every": 0}}
    read: list[Notes] = []
    for world, shards in ((1, False), (2, True)):
        options = recipe(tmp_path / "recipe.yaml", task, images, shards=shards, **changes)
        limit = ["--max-steps", str(ELASTIC_STEPS)]
        read.append(run([*options, str(tmp_path / str(world)), *limit], tmp_path / f"notes-{world}", world=world))
    assert len(read[0]) == ELASTIC_STEPS
    assert read[0] == read[1]
