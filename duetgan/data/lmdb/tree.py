"""Check the pages of a packed file before the LMDB library reads them.

At a page that was zeroed or has a wrong number, the library would end the process (SIGABRT,
SIGBUS).

The format is that of lmdb 0.9 (`mdb.c`: MDB_page, MDB_node, MDB_meta) on little-endian 64-bit
machines. A page starts with its number (u64), u16, flags (u16), and the start and end of its free
space (u16 each), followed by the offsets of its nodes (u16 each). A node starts with 6 bytes: the
size of its value, or the number of its child page, and the flags of the node. The size of the
node's key (u16) and the key follow.
"""

import os

import numpy as np

HEAD, NODE = 16, 8  # bytes of the header of a page and of a node
BRANCH = 0x01  # flags of a page
LEAF = 0x02
KIND = 0x2F  # mask of the flags for the kind of page
BIG = 0x01  # flag of a node: the value is in overflow pages
NONE = 2**64 - 1  # page number of the root of an empty tree
BATCH = 256  # pages read in one batch
META = np.dtype(
    [("depth", "<u2"), ("_", "V32"), ("root", "<u8"), ("last", "<u8"), ("transaction", "<u8")]
)
# offset of META in the first two pages, after magic, version, map and the tree of free pages
META_AT = HEAD + 24 + 48 + 6


def check_tree(descriptor: int, page_size: int, size: int) -> None:
    """Check the pages of a file's tree, but do not read the values in overflow pages.

    `descriptor` is that of the open file, and `size` is the length of the file in bytes. About one
    page of 4 KiB is read for each hundred records. Raises ValueError for damage.
    """
    metas = []
    for start in (META_AT, page_size + META_AT):
        metas.append(np.frombuffer(os.pread(descriptor, META.itemsize, start), META)[0])
    meta = max(metas, key=lambda meta: int(meta["transaction"]))
    if int(meta["root"]) == NONE:
        return
    pages = size // page_size
    level = np.array([meta["root"]], np.uint64)
    for depth in range(int(meta["depth"]), 0, -1):
        if len(level) > pages or int(level.max()) >= pages or int(level.min()) < 2:
            raise ValueError("a page of its tree lies beyond its end")
        for number in level.tolist():  # The system reads the pages in parallel.
            os.posix_fadvise(descriptor, number * page_size, page_size, os.POSIX_FADV_WILLNEED)
        children = []
        for start in range(0, len(level), BATCH):
            numbers = level[start : start + BATCH]
            batch = _read(descriptor, page_size, numbers)
            children.append(_check_pages(batch, numbers, depth > 1, size))
        level = np.concatenate(children)


def _read(descriptor: int, page_size: int, numbers: np.ndarray) -> np.ndarray:
    """Read the pages with these numbers: uint8 [n, page_size].

    Raises ValueError if the file ends before one of them.
    """
    content = b"".join(
        os.pread(descriptor, page_size, number * page_size) for number in numbers.tolist()
    )
    if len(content) != len(numbers) * page_size:
        raise ValueError("it was cut off")
    return np.frombuffer(content, np.uint8).reshape(len(numbers), page_size)


def _check_pages(pages: np.ndarray, numbers: np.ndarray, branch: bool, size: int) -> np.ndarray:
    """Check the pages of one level of the tree; return the numbers of their children, uint64 [n].

    `pages` are the bytes of the pages, uint8 [pages, bytes], and `numbers` are the numbers that
    they should have. `branch` is True if they should have child pages. `size` is the length of the
    file in bytes. Raises ValueError for damage.
    """
    count, end = pages.shape
    words = np.ndarray((pages.size - 1,), "<u2", pages, strides=(1,))  # a word from each byte
    heads = pages[:, :HEAD].copy().view("<u2").astype(np.int64)
    flags, lower, upper = heads[:, 5:8].T
    wrong = (pages[:, :8].copy().view("<u8")[:, 0] != numbers) | (
        flags & KIND != (BRANCH if branch else LEAF)
    )
    wrong |= (lower < HEAD + 2 * (1 + branch)) | (upper < lower) | (upper > end)
    _refuse(wrong, numbers)
    lengths = (lower - HEAD) // 2  # nodes of each page
    owner = np.repeat(np.arange(count), lengths)  # the page of each node
    slot = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    nodes = words[owner * end + HEAD + 2 * slot].astype(np.int64)
    _refuse((nodes < upper[owner]) | (nodes > end - NODE), numbers[owner])
    starts = owner * end + nodes
    low, high, above, key = (words[starts + offset].astype(np.int64) for offset in (0, 2, 4, 6))
    value, values = low | high << 16, nodes + NODE + key
    if branch:
        _refuse(values > end, numbers[owner])
        return (value | above << 32).astype(np.uint64)
    big = (above & BIG) > 0
    _refuse(values + np.where(big, 8, value) > end, numbers[owner])
    long_words = np.ndarray((pages.size - 7,), "<u8", pages, strides=(1,))
    overflow = long_words[(owner * end + values)[big]]  # first overflow page of each big value
    # As floats: a 64-bit number times the size of a page overflows.
    _refuse(overflow.astype(np.float64) * end + HEAD + value[big] > size, numbers[owner][big])
    return np.empty(0, np.uint64)


def _refuse(wrong: np.ndarray, numbers: np.ndarray) -> None:
    if wrong.any():
        raise ValueError(f"page {int(numbers[wrong.argmax()]):,} of its tree is damaged")
