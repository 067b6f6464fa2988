"""Image files of a user's, as a trained model takes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.images import ImageError, decode_file, fit, trained_mode


def read_image(path: str | Path, checkpoint: Mapping[str, Any], *, resize: str | None = None) -> Tensor:
    """An image file as uint8 [C, H, H], brought to size as the images of the checkpoint's training were.

    Args: `resize` crop or pad instead. Raises ImageError if it cannot be read.
    """
    shape = checkpoint["shape"]
    try:
        pixels = decode_file(Path(path).read_bytes(), shape["channels"])
    except OSError as error:
        raise ImageError(f"cannot be read: {error.strerror}") from error
    pixels = fit(pixels, shape["resolution"], resize or trained_mode(checkpoint))
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())
