"""H27: LMDB's own pages are looked at before the library follows them, which ends the process for some damage."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from duetgan.data.errors import ImageError
from duetgan.data.lmdb.environment import acquire
from duetgan.data.sources import open_source
from duetgan.utils.errors import UserError

PAGE = 4096  # bytes
TREE = (1, 2)  # flags of branches and leaves
REPOSITORY = Path(__file__).parents[3]


def rosinality(path: Path) -> None:
    """Two resolutions: small values lie in the leaves, large ones in pages of their own."""
    with lmdb.open(str(path), subdir=False, map_size=1 << 24) as environment, environment.begin(write=True) as txn:
        for side in (64, 128):
            for index in range(100):
                txn.put(f"{side}-{index:05d}".encode(), bytes([index]) * side * (4 if side == 64 else 40))
        txn.put(b"length", b"100")


def read(path: Path) -> str:
    """What becomes of reading everything."""
    try:
        with open_source(str(path)) as source:
            found = [source.item(index).content for index in range(len(source))]
        same = found == [bytes([index]) * 128 * 40 for index in range(100)]
        return "the same" if same else "other"
    except (UserError, ImageError) as error:
        return "told" if "\n" not in str(error) else "lines"


def forked(path: Path) -> str:
    """`read` in a process of its own."""
    outcomes = ("the same", "other", "told", "lines")
    pid = os.fork()
    if pid == 0:
        os._exit(outcomes.index(read(path)))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return outcomes[code] if 0 <= code < 4 else f"ended with {code}"


def big_values(page: bytes, start: int) -> list[int]:
    """Where the lengths of the large values of a leaf lie, which begins at `start`."""
    places = range(16, int.from_bytes(page[12:14], "little") if page[10] == 2 else 0, 2)
    nodes = [int.from_bytes(page[place : place + 2], "little") for place in places]
    return [start + node for node in nodes if page[node + 4] & 1]


def main(folder: Path) -> dict[str, list[str]]:
    """Zero every page in turn; then put wrong numbers into pages of the tree."""
    path, scratch = folder / "x.lmdb", folder / "y.lmdb"
    rosinality(path)
    content = path.read_bytes()
    starts = range(0, len(content), PAGE)
    tree = [at for at in starts if int.from_bytes(content[at + 10 : at + 12], "little") in TREE]

    def with_bytes(at: int, odd: bytes) -> str:
        scratch.write_bytes(content[:at] + odd + content[at + len(odd) :])
        return forked(scratch)

    zeroed, wrong, draw = [with_bytes(at, bytes(PAGE)) for at in tree], [], random.Random(0)
    for _ in range(60):
        at = draw.choice(tree) + draw.choice((0, 8, 10, 12, 14, 16, 18, 20, draw.randrange(64), draw.randrange(4088)))
        length = draw.choice((1, 2, 8))
        wrong.append(with_bytes(at, draw.choice((b"\xff" * 8, draw.randbytes(8)))[:length]))
    large = [node for start in tree for node in big_values(content[start : start + PAGE], start)[:1]]
    return {"zeroed": zeroed, "wrong": wrong + [with_bytes(at, b"\xff\xff\xff\x7f") for at in large]}


def test_h27_no_damaged_page_ends_the_process(tmp_path: Path) -> None:
    """Wrong numbers in the tree ended readers by SIGBUS, with older versions of LMDB also zeroed pages by SIGABRT."""
    command = [sys.executable, "-m", "tests.data.lmdb.test_tree", str(tmp_path)]  # not from a process with threads
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert set(found["zeroed"]) <= {"the same", "told"}  # what was freed holds old pages
    assert found["zeroed"].count("told") >= 5
    assert set(found["wrong"]) <= {"the same", "other", "told"}  # records have no checksums
    assert found["wrong"].count("told") > 20


@pytest.mark.parametrize("count", [0, 1, 3, 2000])
def test_whole_trees_of_any_depth_are_accepted(tmp_path: Path, count: int) -> None:
    path = tmp_path / "x.lmdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 26) as environment:
        for start in range(0, max(1, count), 500):  # several transactions
            with environment.begin(write=True) as txn:
                for index in range(start, min(count, start + 500)):
                    txn.put(b"%0200d" % index, bytes(index % 5000))
        depth = environment.stat()["depth"]
    assert depth == {0: 0, 1: 1, 3: 1, 2000: 4}[count]
    handle = acquire(path)
    with handle.environment.begin() as txn:
        assert all(len(txn.get(b"%0200d" % index, b"")) == index % 5000 for index in range(count))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
