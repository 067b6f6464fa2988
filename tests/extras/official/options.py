"""Files of other programs for the table of options."""

from pathlib import Path

from tests.extras.official.layouts import nvidia_generator, write_nvidia


def write(folder: Path) -> None:
    write_nvidia(folder / "nvidia.pkl")
    write_nvidia(folder / "nvidia2.pkl", average=nvidia_generator())
