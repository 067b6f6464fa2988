"""An evaluation's images among the run's TensorBoard events."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from utils.errors import UserError
from utils.runlog.run_folder import RunFolder
from utils.runlog.run_log import Events


def show_images(run: Path, step: int, files: Iterable[Path]) -> None:
    """Add image files to the events of a run that has any. Not while it trains: TensorBoard follows the newest file of
    a folder, and would no longer see what the training writes.
    """
    folder = RunFolder(run)
    if not (run / "tensorboard").is_dir():
        return
    try:
        folder.open()
    except UserError:  # it trains, or cannot be written
        return
    try:
        events = Events(run / "tensorboard")
        for file in files:
            with Image.open(file) as image:
                events.image(step, f"evaluation/{file.stem}", np.asarray(image.convert("RGB")))
        events.close()
    finally:
        folder.close()
