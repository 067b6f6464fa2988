"""What stands for a broken file is broken, and the commands are those that train.py takes."""

import numpy as np
import pytest

from benchmarks.folders.kinds import KINDS, commands
from benchmarks.folders.make import broken, png
from duetgan.data.errors import ImageError
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.cli import normalise
from duetgan.utils.config.yaml_files import read_yaml
from tests.data.conftest import decode_file


@pytest.mark.parametrize("kind", range(5))
def test_each_kind_of_broken_file_is_refused(kind):
    whole = png(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    assert decode_file(whole, 3).shape == (32, 32, 3)
    with pytest.raises(ImageError):
        decode_file(broken(whole, kind), 3)


@pytest.mark.parametrize("name", KINDS)
def test_the_commands_of_a_kind_of_images_are_those_that_train_takes(name):
    lines = [command[1:] for command in commands(KINDS[name], "x")]
    assert [line[0] for line in lines] == ["train.py", "evaluate.py"] * (len(lines) // 2)
    for _, _, recipe, *given, run, place in lines[::2]:
        options = dict(zip(given[::2], given[1::2], strict=True)) | {run: place}
        del options["--run-dir"]
        overrides = normalise([f"{key}={value}" for key, value in options.items()])
        config = build_run_config(read_yaml(recipe), overrides, recipe)
        assert (config.data.path, config.precision, config.threads) == ("x.lmdb", "bf16", 1)
