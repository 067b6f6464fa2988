"""How fast a folder is packed.

Measured in a process of its own, `python -m benchmarks.loading.packing FOLDER DEST.lmdb SIZE WORKERS`, because the
worker processes of packing import the main module of whoever packs; it prints one line of JSON.
"""

import json
import subprocess
import sys
from pathlib import Path

from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source

ROOT = Path(__file__).resolve().parents[2]


def measure(folder: Path, path: Path, size: int, workers: int | None) -> dict[str, float]:
    """Pack a folder to raw images of size x size px in a fresh process.

    `workers` is the number of processes besides the one that writes, None for the default. Returns `rate`, images
    per second from opening the folder to the finished file. Raises RuntimeError if it fails.
    """
    command = [sys.executable, "-m", "benchmarks.loading.packing", str(folder), str(path), str(size), str(workers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: str, path: str, size: str, workers: str) -> None:
    """Pack and report."""
    with open_source(folder, split="train", root=None) as source:
        summary = pack(
            source, path, size=int(size), workers=None if workers == "None" else int(workers), overwrite=True
        )
    print(json.dumps({"rate": summary.meta.count / summary.seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
