"""What the pages of a Parquet file say of themselves: their heads, which stand between the pages.

A head is Thrift's struct PageHeader in its compact protocol (parquet.thrift; thrift-compact-protocol.md): the first
three fields are the kind of page, its bytes when unpacked, and its bytes in the file.
"""

import os
from collections.abc import Iterator

READ = 8 << 10  # bytes; a head has a few dozen, and more where it holds the smallest and the largest value
MOST = 1 << 20  # bytes of a head
DEPTH = 8  # of structs in structs: a head has three


def page_sizes(descriptor: int, start: int, length: int) -> Iterator[int]:
    """The bytes of each page when unpacked, of a part of a column. It ends before a head that is damaged, as reading
    does.
    """
    place, end = start, start + length
    while place < end:
        read = READ
        while True:
            try:
                head, unpacked, packed = _head(os.pread(descriptor, read, place))
                break
            except IndexError:  # it is longer
                read *= 16
                if read > MOST:
                    return
            except ValueError:
                return
        if unpacked < 0 or packed < 0:
            return
        yield unpacked
        place += head + packed


def _head(content: bytes) -> tuple[int, int, int]:
    """The length of a head, and bytes unpacked and in the file. Raises IndexError if it goes on beyond `content`."""
    numbers = {2: -1, 3: -1}
    length = _struct(content, 0, numbers, 0)
    return length, numbers[2], numbers[3]


def _struct(content: bytes, at: int, numbers: dict[int, int], depth: int) -> int:
    """The place behind a struct; numbers of its fields that are asked for are noted."""
    if depth > DEPTH:
        raise ValueError("too deep")
    field = 0
    while kind := content[at]:
        at += 1
        if kind >> 4:
            field += kind >> 4
        else:
            number, at = _varint(content, at)
            field = number >> 1 ^ -(number & 1)
        if kind & 15 in (4, 5, 6):  # whole numbers
            number, at = _varint(content, at)
            if field in numbers:
                numbers[field] = number >> 1 ^ -(number & 1)
        else:
            at = _skip(content, at, kind & 15, depth)
    return at + 1


def _skip(content: bytes, at: int, kind: int, depth: int) -> int:
    """The place behind a value. Raises ValueError for a kind that a head does not have."""
    if kind in (1, 2):  # true and false: they lie in the kind
        return at
    if kind == 3:
        return at + 1
    if kind == 7:
        return at + 8
    if kind == 8:
        length, at = _varint(content, at)
        return at + length
    if kind == 12:
        return _struct(content, at, {}, depth + 1)
    raise ValueError(f"kind {kind}")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the place behind it."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 70:
            raise ValueError("a number is too long")
