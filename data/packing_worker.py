"""A worker process of packing: images to records, piece by piece, as data/packing_processes.py asks for them."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection

import cv2

from data.packing import Converted, Plan, convert
from data.sources.base import Source
from utils.errors import UserError

KEPT_BYTES = 128 << 20  # of freed memory

Warned = tuple[str, type[Warning], str, int]  # text, category, file, line


@dataclass(frozen=True)
class Failure:
    """What a worker returns where the source raised something else than ImageError."""

    text: str
    user: bool  # a UserError


def serve(pipe: Connection) -> None:
    """Convert the pieces that come over the pipe until the parent closes it or is gone.

    First comes (source, plan, stop), then for each piece (rows, the source of these rows alone or None). Returned is
    for each piece (Converted or Failure, the warnings).
    """
    die_with_parent()
    cv2.setNumThreads(1)
    keep_freed_memory()
    with contextlib.suppress(EOFError, OSError):
        source, plan, stop = pipe.recv()
        with contextlib.nullcontext() if source is None else source:
            while True:
                rows, images = pipe.recv()
                pipe.send(_answer(source, rows, images, plan, stop))


def _answer(
    source: Source | None, rows: range, images: Source | None, plan: Plan, stop: bool
) -> tuple[Converted | Failure, list[Warned]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # what is shown is for the parent to decide
        found: Converted | Failure
        try:
            if images is not None:
                found = convert(images, rows, plan, stop=stop, first=rows.start)
            elif source is not None:
                found = convert(source, rows, plan, stop=stop)
            else:
                raise ValueError("neither a source nor its images")
        except UserError as error:
            found = Failure(str(error), user=True)
        except Exception:  # whatever it is, the parent raises it
            found = Failure(traceback.format_exc(), user=False)
    warned = dict.fromkeys((str(item.message), item.category, item.filename, item.lineno) for item in caught)
    return found, list(warned)


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone, however that ends.

    Where the kernel does not, the closed pipe ends this process after its piece.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it was gone before
        sys.exit()


def keep_freed_memory() -> None:
    """Let the C library keep what this process frees, for the next image.

    glibc gives large blocks back to the system at once, and each page that is touched again is a fault: a quarter of
    the time of decoding and scaling. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 32 << 20)  # the largest that is allowed
        mallopt(m_trim_threshold, KEPT_BYTES)
