"""An evaluation's images among the run's events."""

import numpy as np
from PIL import Image

from duetgan.reporting.report import show_images
from duetgan.utils.runlog.run_folder import RunFolder
from duetgan.utils.runlog.run_log import Events
from tests.end_to_end.helpers import events_of


def test_images_are_added_at_the_checkpoints_step_unless_the_run_trains(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "confusion.png")
    files = [tmp_path / "confusion.png"]
    show_images(tmp_path, 7, files)
    assert not (tmp_path / "tensorboard").exists()  # nor is a run's folder made into one that logs
    Events(tmp_path / "tensorboard").close()
    training = RunFolder(tmp_path)
    training.open()
    show_images(tmp_path, 7, files)
    assert events_of(tmp_path).Tags()["images"] == []
    training.close()
    show_images(tmp_path, 7, files)
    (image,) = events_of(tmp_path).Images("evaluation/confusion")
    assert (image.step, image.width, image.height) == (7, 6, 4)
    training.open()  # the lock was given back
    training.close()
