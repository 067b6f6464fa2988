"""What stands for a broken file is broken, a tone lies where its frequency is, a run has a row however it ends."""

import io
import wave

import numpy as np
import pytest

from benchmarks.folders.kinds import KINDS, commands
from benchmarks.folders.make import broken, png, power
from benchmarks.folders.run import HEADER, cells, table
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


@pytest.mark.parametrize("frequency", [500, 3000])
def test_a_tone_is_a_line_at_its_frequency(frequency):
    rate, content = 8000, io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        sound = 20000 * np.sin(2 * np.pi * frequency * np.arange(2 * rate) / rate)
        file.writeframes(np.concatenate([np.zeros(rate), sound]).astype(np.int16).tobytes())
    picture = power(content.getvalue())
    brightest = picture.mean(axis=1).argmax()
    assert picture.shape == (128, 128)
    assert abs(brightest - 128 * (1 - frequency / (rate / 2))) <= 1.5


def test_a_run_has_a_row_however_it_ends():
    sure = {"accuracy": 0.5, "interval": [0.25, 0.75]}
    survey = {"count": 1000, "classes": 4}
    summary = {"classifier": sure, "gan": {"recognised": 0.4}}
    whole = {"name": "emoji", "exit": 0, "seconds": 90.0, "survey": survey, "summary": summary, "script": sure}
    whole |= {"gan": {"memorisation": {"copies": True}}}
    refused = {"name": "flags", "exit": 2, "seconds": 3.0, "survey": None, "summary": None, "gan": None}
    accuracy = "0.500 (0.25 to 0.75)"
    assert cells(whole) == ["emoji", "1,000 of 4", "0", "1.5", accuracy, "-", accuracy, "0.40", "-", "copies"]
    assert cells(refused) == ["flags", "-", "2", "0.1", *["-"] * 6]
    assert [line.count("|") for line in table([whole, refused]).splitlines()] == [len(HEADER) + 1] * 4


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
