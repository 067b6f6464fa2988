"""LMDB's own pages, looked at before the library follows them: it trusts them, and a page that was
zeroed or holds a wrong number ends the process (SIGABRT, SIGBUS).

The format is that of lmdb 0.9 (`mdb.c`: MDB_page, MDB_node, MDB_meta) on machines with 64 bits,
little-endian. A page begins with its number (u64), u16, flags (u16), and where its free room begins
and ends (u16 each); then come the places of its nodes (u16 each). A node begins with the size of
its value or the number of the page below, 6 bytes with the flags of the node; then the size of its
key (u16) and the key.
"""

import os

import numpy as np

HEAD, NODE = 16, 8  # bytes of the head of a page and of a node
BRANCH, LEAF, KIND = 0x01, 0x02, 0x2F  # flags of a page, and those that tell its kind
BIG = 0x01  # of a node: the value lies in pages of its own
NONE = 2**64 - 1  # page number of the root of an empty tree
AT_ONCE = 256  # pages
META = np.dtype(
    [("depth", "<u2"), ("_", "V32"), ("root", "<u8"), ("last", "<u8"), ("transaction", "<u8")]
)
# bytes into the first two pages; before: magic to map size, the tree of free pages
META_AT = HEAD + 24 + 48 + 6


def check_tree(descriptor: int, page_size: int, size: int) -> None:
    """Look at every page by which records are found; not at records. Raises ValueError for what is
    damaged.

    A page of the tree is looked at once, 4 KiB for about a hundred records.
    """
    metas = [
        np.frombuffer(os.pread(descriptor, META.itemsize, n * page_size + META_AT), META)[0]
        for n in (0, 1)
    ]
    meta = max(metas, key=lambda meta: int(meta["transaction"]))
    if int(meta["root"]) == NONE:
        return
    pages = size // page_size
    level = np.array([meta["root"]], np.uint64)
    for depth in range(int(meta["depth"]), 0, -1):
        if len(level) > pages or int(level.max()) >= pages or int(level.min()) < 2:
            raise ValueError("a page of its tree lies beyond its end")
        for number in level.tolist():  # the system reads ahead, side by side
            os.posix_fadvise(descriptor, number * page_size, page_size, os.POSIX_FADV_WILLNEED)
        parts = [level[start : start + AT_ONCE] for start in range(0, len(level), AT_ONCE)]
        below = [
            _check_pages(_read(descriptor, page_size, part), part, depth > 1, size)
            for part in parts
        ]
        level = np.concatenate(below)


def _read(descriptor: int, page_size: int, numbers: np.ndarray) -> np.ndarray:
    """Pages: uint8 [n, page_size]. Raises ValueError for one that is cut off."""
    content = b"".join(
        os.pread(descriptor, page_size, number * page_size) for number in numbers.tolist()
    )
    if len(content) != len(numbers) * page_size:
        raise ValueError("it was cut off")
    return np.frombuffer(content, np.uint8).reshape(len(numbers), page_size)


def _check_pages(pages: np.ndarray, numbers: np.ndarray, branch: bool, size: int) -> np.ndarray:
    """The numbers of the pages below pages of one level: uint64 [n]. Raises ValueError."""
    count, end = pages.shape
    words = np.ndarray((pages.size - 1,), "<u2", pages, strides=(1,))  # that begin at each byte
    heads = pages[:, :HEAD].copy().view("<u2").astype(np.int64)
    flags, lower, upper = heads[:, 5], heads[:, 6], heads[:, 7]
    wrong = (pages[:, :8].copy().view("<u8")[:, 0] != numbers) | (
        flags & KIND != (BRANCH if branch else LEAF)
    )
    wrong |= (lower < HEAD + 2 * (1 + branch)) | (upper < lower) | (upper > end)
    _refuse(wrong, numbers)
    lengths = (lower - HEAD) // 2  # nodes of each page
    owner = np.repeat(np.arange(count), lengths)  # each node's page
    slot = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    nodes = words[owner * end + HEAD + 2 * slot].astype(np.int64)
    _refuse((nodes < upper[owner]) | (nodes > end - NODE), numbers[owner])
    places = owner * end + nodes
    low, high, above, key = (words[places + place].astype(np.int64) for place in (0, 2, 4, 6))
    value, values = low | high << 16, nodes + NODE + key
    if branch:
        _refuse(values > end, numbers[owner])
        return (value | above << 32).astype(np.uint64)
    big = (above & BIG) > 0
    _refuse(values + np.where(big, 8, value) > end, numbers[owner])
    starts = np.ndarray((pages.size - 7,), "<u8", pages, strides=(1,))[(owner * end + values)[big]]
    # As floats: a number of 64 bits times the length of a page does not fit.
    _refuse(starts.astype(np.float64) * end + HEAD + value[big] > size, numbers[owner][big])
    return np.empty(0, np.uint64)


def _refuse(wrong: np.ndarray, numbers: np.ndarray) -> None:
    if wrong.any():
        raise ValueError(f"page {int(numbers[wrong.argmax()]):,} of its tree is damaged")
