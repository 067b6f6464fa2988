"""The fuzzers: mutated files for every command that reads files, each case in a fork with limits.

- `python -m tests.fuzz KIND SEED` repeats one case.
- `python -m tests.fuzz --minutes 60 [--first 1000]` tries seeds from the first on, kinds in turn.

A case that breaks the promise of tests/fuzz/sandbox.py is kept, with its command, in build/fuzz; exit code 1.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fuzz import corpus, sandbox
from tests.fuzz.kinds import KINDS
from tests.slim import slim_down


class Fuzzer:
    """Tries cases in a scratch folder. Make one in a process without threads, after `sandbox.warm_up`."""

    def __init__(self, scratch: Path, keep: Path) -> None:
        self.scratch, self.keep = scratch, keep
        self.corpus = scratch / "corpus"
        self.corpus.mkdir()
        slim_down()
        pid = os.fork()  # what makes them may start threads, which a later fork could not bear
        if pid == 0:
            sandbox.ended_by(lambda: corpus.make(self.corpus), scratch / "corpus.log")
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise RuntimeError((scratch / "corpus.log").read_text()[-2000:])

    def attempt(self, kind: str, seed: int) -> dict[str, Any] | None:
        """None if the promise is kept; otherwise what was wrong and where the case is kept."""
        draw, folder = random.Random(f"{kind} {seed}"), self.scratch / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        argv, outcome = sandbox.run(lambda: KINDS[kind](draw, self.corpus, folder), folder)
        faults = outcome.faults()
        if not faults:
            return None
        kept = self.keep / f"{kind}-{seed}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept, symlinks=True)
        head = asdict(outcome) | {"argv": argv, "faults": faults, "out": "", "err": ""}
        (kept / "case.txt").write_text(f"{json.dumps(head, indent=1)}\n{outcome.err[-20_000:]}")
        return {"kind": kind, "seed": seed, "faults": faults, "kept": str(kept)}


def search(fuzzer: Fuzzer, cases: Iterable[tuple[str, int]], seconds: float) -> dict[str, Any]:
    """Try cases until the time is over."""
    started = time.monotonic()
    tried: Counter[str] = Counter()
    found = []
    for kind, seed in cases:
        if time.monotonic() - started > seconds:
            break
        finding = fuzzer.attempt(kind, seed)
        tried[kind] += 1
        if finding:
            found.append(finding)
            print(f"{kind} {seed}: {'; '.join(finding['faults'])}\n  kept in {finding['kept']}", flush=True)
    return {"cases": dict(tried), "findings": found}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Try mutated files.")
    add = parser.add_argument
    add("kind", nargs="?", choices=tuple(KINDS), help="repeat a case of this kind")
    add("seed", nargs="?", type=int)
    add("--minutes", type=float, default=1.0, help="default: 1")
    add("--first", type=int, default=1000, help="seed to begin with (default: 1000)")
    add("--count", type=int, help="seeds of each kind at most (default: as many as the minutes allow)")
    add("--json", type=Path, help="write what was found to this file")
    options = parser.parse_args()
    sandbox.warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        fuzzer = Fuzzer(Path(scratch), Path("build/fuzz").absolute())
        if options.kind:
            if options.seed is None:
                parser.error("give the seed too")
            finding = fuzzer.attempt(options.kind, options.seed)
            print("the promise is kept" if finding is None else (Path(finding["kept"]) / "case.txt").read_text())
            return int(finding is not None)
        seeds = itertools.islice(itertools.count(options.first), options.count)
        in_turn = ((kind, seed) for seed in seeds for kind in KINDS)
        result = search(fuzzer, in_turn, 60 * options.minutes)
    if options.json:
        options.json.write_text(json.dumps(result))
    print(", ".join(f"{kind} {number}" for kind, number in result["cases"].items()))
    print(f"{len(result['findings'])} broke the promise")
    return int(bool(result["findings"]))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # taking the interpreter apart would take two seconds
