"""The table of export formats.

A format is a module with two functions. `write(subject, path)` writes a file. `load(subject, path)`
loads the file for the check, and returns its network as a function.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from duetgan.utils import extras
from duetgan.utils.errors import explained

if TYPE_CHECKING:  # imports of torch take seconds, so the options are checked first
    from duetgan.inference.export.subject import Runner, Subject

ONNX = ("onnx", "onnxruntime", "onnxscript")


@dataclass(frozen=True, kw_only=True)
class Format:
    """An export format and the limits of its check."""

    module: str  # module with `write` and `load`
    help: str  # description in export.py's help
    # allowed difference of outputs, relative to their largest magnitude if that exceeds 1
    limit: float = 1e-4
    quantized: bool = False  # True to allow a loss of accuracy instead, after a calibration
    needs: tuple[str, ...] = ()  # optional packages
    task: str | None = None  # the only supported task
    several_labels: bool = True  # True if images may have several labels
    truncates: bool = False  # True if a generator's truncation can be included
    folder: bool = False  # True if the export is a folder
    suffix: str = ""  # required suffix

    def write(self, subject: "Subject", path: Path) -> None:
        """Export the network of `subject` to `path`."""
        importlib.import_module(self.module).write(subject, path)

    def load(self, subject: "Subject", path: Path) -> "Runner":
        """Load the export at `path` and return its network as a function of the inputs."""
        return importlib.import_module(self.module).load(subject, path)

    def check_packages(self) -> None:
        """Raise UserError if an optional package is missing; the message tells how to install."""
        names = " ".join(self.needs)
        with explained(
            ImportError, lambda error: f"this format needs {names} ({error}); `pip install {names}`"
        ):
            for name in self.needs:
                importlib.import_module(name)


FORMATS = {
    "safetensors": Format(
        module="duetgan.inference.export.weights", help="weights for hubconf.py", limit=0.0
    ),
    "torch-export": Format(
        module="duetgan.inference.export.torch_export", help="a program of PyTorch", truncates=True
    ),
    "onnx": Format(
        module="duetgan.inference.export.onnx", help="an ONNX graph", needs=ONNX, truncates=True
    ),
    "int8": Format(
        module="duetgan.inference.export.int8",
        help="a classifier's ONNX graph with 8-bit integers, which is smaller and faster on CPUs",
        quantized=True,
        needs=ONNX,
        task="classifier",
        several_labels=False,
    ),
}
extras.attach(__name__)
