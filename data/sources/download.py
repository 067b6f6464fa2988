"""torchvision's downloaders, with their failures in one line."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from utils.errors import UserError

TIMEOUT = 30  # seconds without an answer
CACHE = "DUET_CACHE"  # the environment's variable for the folder of what can be had again


def cache_folder() -> Path:
    """Where downloaded data sets and indices of shards are kept: $DUET_CACHE, else duet/ in the user's cache."""
    told = os.environ.get(CACHE)
    return Path(told) if told else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duet"


@contextlib.contextmanager
def downloading(name: str, remedy: str) -> Iterator[None]:
    """Around a download: output goes to stderr, no endless waiting; a failure is a UserError that ends in `remedy`."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (OSError, RuntimeError) as error:  # URLError is an OSError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{name} was not found here and cannot be downloaded ({reason[-1]}): {remedy}") from None
    finally:
        socket.setdefaulttimeout(before)
