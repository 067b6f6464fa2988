"""One pass over images, shared by all processes: each computes some chunks, rank 0 gets the results in order."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from duetgan.utils.distributed import collectives
from duetgan.utils.runlog.progress import Bar

T = TypeVar("T")

MOST, LEAST = 64, 4  # images of a chunk
PIXELS = 2**20  # of a chunk, between these bounds: what a network needs of memory does not grow with the image size


def chunk_size(side: int) -> int:
    """Images of `side` px that networks compute together: 64 up to 128 px, 16 at 256 px, 4 from 512 px on."""
    return max(LEAST, min(MOST, PIXELS // side**2))


def shared_pass(
    count: int,  # images
    work: Callable[[range], T],  # what is made of the images of a chunk: plain data, and tensors on the CPU
    *,
    side: int,  # of the images, in px
    batch_size: int,  # images that a process takes before the results are sent, in whole chunks and at least one
    multiple: int = 1,  # of which a chunk's size must be one
    what: str = "",  # the images on a progress bar; empty: there is none
) -> Iterator[T]:
    """The results of `work` for every chunk of images: on rank 0 all of them in order, on the others none.

    The chunks begin at fixed images whatever the batch size and the number of processes, and each is computed as a
    whole by one process: the last bits of a network's float32 outputs depend on the images they are computed with. All
    ranks must exhaust it. A UserError of one rank is raised on all of them.
    """
    size = max(1, chunk_size(side) // multiple) * multiple
    chunks = [range(start, min(start + size, count)) for start in range(0, count, size)]
    each = max(1, batch_size // size)
    rank, world = collectives.rank(), collectives.world_size()
    with Bar(total=count, desc=what, unit="image", disable=not (what and rank == 0)) as bar:
        for first in range(0, len(chunks), each * world):
            own = chunks[first + rank * each : first + (rank + 1) * each]
            for results in collectives.gather_to_main(lambda own=own: [work(rows) for rows in own]):  # type: ignore[misc]
                for result in results:
                    yield result
                    bar.update(min(size, count - bar.n))
