"""Training from tar files, which are packed once, is that on the packed file."""

import io
import tarfile

import pytest

from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from tests.end_to_end.ranks import Notes, run
from tests.end_to_end.recipes import image_folders, write_recipe

STEPS = 6


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


def test_two_processes_on_shards_read_what_one_reads_on_the_packed_file(images, tmp_path):
    """One process packs the shards, the other waits for it."""
    recipe = write_recipe(tmp_path / "recipe.yaml", "gan", images, steps=STEPS + 2, evaluation={"every": 0})
    shards = [f"--data.path={images}/train-*.tar", f"--data.val-path={images}/val-*.tar"]
    read: list[Notes] = []
    for world, options in ((1, []), (2, shards)):
        argv = ["--config", str(recipe), *options, "--run-dir", str(tmp_path / str(world)), "--max-steps", str(STEPS)]
        read.append(run(argv, tmp_path / f"notes-{world}", world=world))
    assert len(read[0]) == STEPS
    assert read[0] == read[1]
