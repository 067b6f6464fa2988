"""Decoded images kept in memory (`data.cache: ram`)."""

import weakref
from collections.abc import Callable

import numpy as np

from data.decode import Box, crop_into
from utils.memory import available_bytes, local_processes
from utils.runlog.run_log import say

SHARE = 0.6  # of the memory that is available at the start, for all processes of this machine together
_promised: "weakref.WeakKeyDictionary[ImageCache, int]" = weakref.WeakKeyDictionary()  # bytes, for this process
BoxOf = Callable[[int, int, np.random.Generator | None], Box]


class ImageCache:
    """Images by record: `whole` ones where the crop is random, else as they are handed out.

    It fills while the images are read for the first time. Where they do not fit into memory nothing is kept, and one
    line says so. A copy in another process starts empty.
    """

    def __init__(self, path: str, size: int, *, whole: bool) -> None:
        """`size`: bytes of all images of the data set `path`."""
        self.whole = whole
        self._images: dict[int, np.ndarray] = {}
        needed = size * local_processes()
        available = available_bytes()
        # They fill together: what was promised to the caches before is not there any more.
        self.enabled = needed <= SHARE * available - sum(_promised.values())
        if self.enabled:
            _promised[self] = needed
        else:
            say(
                f"warning: {path}: its decoded images take {needed / 2**30:.1f} GiB, more than "
                f"{SHARE:.0%} of the {available / 2**30:.1f} GiB available; data.cache: ram is left off"
            )

    def put(self, record: int, image: np.ndarray) -> None:
        """Keep an image: uint8 [H, W, C] if `whole`, else [C, R, R]."""
        if self.enabled:
            self._images[record] = image

    def copy(self, record: int, out: np.ndarray, box: BoxOf, draws: np.random.Generator | None) -> bool:
        """Fill `out`, uint8 [C, R, R], if the image is kept."""
        image = self._images.get(record)
        if image is None:
            return False
        if self.whole:
            crop_into(image, box(image.shape[0], image.shape[1], draws), out)
        else:
            np.copyto(out, image)
        return True

    def __len__(self) -> int:
        return len(self._images)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_images": {}}
