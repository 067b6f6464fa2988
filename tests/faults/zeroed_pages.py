"""Zero every page of a packed file in turn and read it: `python -m tests.faults.zeroed_pages FILE SCRATCH`.

Each page is tried in a fork, since a read that goes wrong may end the process. Prints a JSON list with, for each page,
its kind and what reading and `verify` made of it: "the same" images and labels as before, "refused" with a UserError,
"other" images or labels, "raised" another error, or the name of a signal.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import stored_image
from duetgan.data.packing.inspect import verify
from duetgan.utils.errors import UserError

PAGE = 4096  # bytes
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8  # LMDB's flags of a page, 10 bytes into it
NAMES = {BRANCH: "branch", LEAF: "leaf", OVERFLOW: "overflow head", META: "meta"}
OUTCOMES = ("the same", "refused", "other", "raised")


def kinds(content: bytes) -> list[str]:
    """What LMDB keeps in each page; what was freed holds an old page of any kind."""
    names, data = [], 0
    for start in range(0, len(content), PAGE):
        flags = int.from_bytes(content[start + 10 : start + 12], "little")
        names.append("overflow" if data else NAMES.get(flags, "unused"))
        data = data - 1 if data else 0
        if names[-1] == "overflow head":
            data = int.from_bytes(content[start + 12 : start + 16], "little") - 1
    return names


def contents(path: Path) -> list[bytes]:
    """Everything that can be read, at every resolution."""
    found = []
    with LMDBReader(path) as reader:
        sides = reader.meta.resolutions
        found += [reader.meta.to_json(), reader.signatures().tobytes()]
    for side in sides:
        with LMDBReader(path, resolution=side) as reader:
            found.append(reader.labels().tobytes())
            found += [np.ascontiguousarray(stored_image(reader, index)[0]).tobytes() for index in range(len(reader))]
    return found


def outcome(path: Path, expected: list[bytes], check: str) -> int:
    """Place in OUTCOMES of what became of reading (`check` "read") or of the full check ("verify")."""
    try:
        if check == "read":
            return 0 if contents(path) == expected else 2
        with LMDBReader(path) as reader:
            return 1 if verify(reader, 1) else 0
    except UserError:
        return 1
    except Exception:
        return 3


def forked(path: Path, expected: list[bytes], check: str) -> str:
    """`outcome` in a process of its own."""
    pid = os.fork()
    if pid == 0:
        os._exit(outcome(path, expected, check))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return OUTCOMES[code] if code >= 0 else signal.Signals(-code).name


def main(path: Path, scratch: Path) -> list[dict[str, str]]:
    """Try every page."""
    content, expected = path.read_bytes(), contents(path)
    found = []
    for number, kind in enumerate(kinds(content)):
        damaged = bytearray(content)
        damaged[number * PAGE : (number + 1) * PAGE] = bytes(PAGE)
        scratch.write_bytes(damaged)
        found.append({"kind": kind} | {check: forked(scratch, expected, check) for check in ("read", "verify")})
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
