"""Reading a network's weights file without running anything in it."""

import pickle
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from utils.errors import UserError

REMEDY = "fetch the file again, or give another with --weights"


def read_state_dict(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """State dict on the CPU and metadata of a `.safetensors` file, or of any file that torch saved (no metadata).

    Raises:
        UserError: the file is missing, damaged, or holds anything but names and tensors.
    """
    if not path.is_file():
        raise UserError(f"--weights {path}: no such file")
    if path.suffix == ".safetensors":
        try:
            with safe_open(str(path), framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a whole safetensors file ({error}); {REMEDY}") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        # torch's own message advises to read the file unsafely, so it is not passed on
        raise UserError(f"{path} is damaged or no plain state dict; {REMEDY}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} is no plain state dict (name -> tensor); {REMEDY}")
    return state, {}
