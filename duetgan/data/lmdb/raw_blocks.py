"""Raw images of a mapped file, copied by one gather."""

import ctypes

import numpy as np

# copied at a time: NumPy makes an intermediate copy, which should stay in the CPU's cache
GATHER_BYTES = 512 << 10


class RawBlocks:
    """Addresses, in the mapped file, of the verified raw blocks of one resolution.

    py-lmdb touches every page of a value at each `get`, so a block should be fetched only once.
    """

    def __init__(self, item: np.dtype, count: int) -> None:
        self.item = item  # a whole image is one item, so that NumPy copies it at once
        # address of the first byte of each block; -1: not verified yet
        self.addresses = np.full(count, -1, np.int64)
        # the records of a block that do not match their checksums
        self.damaged: dict[int, frozenset[int]] = {}
        # first address and end of the added blocks, and an image from each byte in between
        self._view: tuple[int, int, np.ndarray] = (0, 0, np.empty(0, item))

    def add(self, block: int, pixels: np.ndarray) -> None:
        """Add a block: `pixels` is a view into the file, uint8 [bytes]."""
        low, high, _ = self._view
        address = pixels.ctypes.data
        first, end = min(low or address, address), max(high, address + pixels.nbytes)
        if (first, end) != (low, high):
            # All blocks are in one mapping. In this view an image starts at each byte, so that a
            # batch from any blocks is a single gather.
            memory = np.frombuffer(
                memoryview((ctypes.c_ubyte * (end - first)).from_address(first)), np.uint8
            )
            images = np.ndarray(
                (end - first - self.item.itemsize + 1,), self.item, memory, strides=(1,)
            )
            images.setflags(write=False)
            self._view = (first, end, images)
        self.addresses[block] = address  # last, because other threads may use it from now on

    def copy(
        self,
        blocks: np.ndarray,
        rows: np.ndarray,
        out: np.ndarray,
        positions: np.ndarray | None = None,
    ) -> None:
        """Copy images of verified blocks into `out`, an array [n] of type `item`.

        Image `rows[i]` of block `blocks[i]` is copied to `out[positions[i]]` (default: `out[i]`).
        """
        offsets = self.addresses[blocks] + rows * self.item.itemsize
        # Read after the addresses: another thread may add a block in between.
        first, _, images = self._view
        offsets -= first
        step = max(1, GATHER_BYTES // self.item.itemsize)
        for start in range(0, len(offsets), step):
            chosen = slice(start, start + step)
            out[chosen if positions is None else positions[chosen]] = images[offsets[chosen]]
