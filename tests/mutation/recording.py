"""Which test executes which line: recorded once, then renewed for the test files that changed."""

import gzip
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation.plugin import CONTEXT, OUTPUT

SETTINGS = """[run]
data_file = {scratch}/coverage
parallel = true
context = ${{{context}-}}
include = {root}/*
omit = {root}/tests/*
patch = _exit, fork
disable_warnings = no-data-collected, module-not-measured, trace-changed, module-not-imported
"""


@dataclass
class Recording:
    """Seconds of each passed test, and the lines that it executes: a bit mask for each product file."""

    product: str  # a hash of the product's sources
    test_files: dict[str, str] = field(default_factory=dict)  # file -> git's hash of its content
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))  # file -> test -> mask
    imported: dict[str, int] = field(default_factory=dict)  # file -> mask of the lines run on import

    @classmethod
    def load(cls, path: Path) -> "Recording":
        with gzip.open(path, "rt") as file:
            content = json.load(file)
        lines = {name: {t: int(mask, 16) for t, mask in tests.items()} for name, tests in content["lines"].items()}
        imported = {name: int(mask, 16) for name, mask in content["imported"].items()}
        return cls(content["product"], content["test_files"], content["seconds"], defaultdict(dict, lines), imported)

    def save(self, path: Path) -> None:
        lines = {name: {t: f"{mask:x}" for t, mask in tests.items()} for name, tests in self.lines.items()}
        content = {
            "product": self.product,
            "test_files": self.test_files,
            "seconds": self.seconds,
            "lines": lines,
            "imported": {name: f"{mask:x}" for name, mask in self.imported.items()},
        }
        with gzip.open(path, "wt", compresslevel=3) as file:
            json.dump(content, file)

    def drop(self, test_files: Sequence[str]) -> None:
        """Forget the tests of these files."""
        removed = set(test_files)
        self.seconds = {t: s for t, s in self.seconds.items() if t.split("::")[0] not in removed}
        for name, tests in self.lines.items():
            self.lines[name] = {t: mask for t, mask in tests.items() if t in self.seconds}
        self.test_files = {name: blob for name, blob in self.test_files.items() if name not in removed}

    def tests_of(self, path: str, first_line: int, last_line: int) -> list[str]:
        """Return the tests that execute these lines; for lines run on import, those that execute the file at all."""
        statement = ((1 << (last_line - first_line + 1)) - 1) << first_line
        tests = self.lines.get(path, {})
        imported = self.imported.get(path, 0)
        chosen = [t for t, mask in tests.items() if mask & statement]
        if imported & statement:
            chosen = [t for t, mask in tests.items() if mask & ~imported or mask & statement]
        return [t for t in chosen if t in self.seconds]


def product_files(root: Path) -> list[str]:
    """Return the product's Python files, relative to the checkout."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    outside = ("tests/", "benchmarks/", "docs/", "examples/")
    return [name for name in listed.stdout.splitlines() if not name.startswith(outside)]


def hashes(root: Path) -> tuple[str, dict[str, str]]:
    """Return one hash of the product's sources, and one of each test file."""
    listed = subprocess.run(["git", "ls-files", "-s", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    blobs = {line.split("\t")[1]: line.split()[1] for line in listed.stdout.splitlines()}
    product = "".join(name + blobs[name] for name in product_files(root))
    tests = {n: b for n, b in blobs.items() if n.startswith("tests/") and Path(n).name.startswith("test_")}
    return hashlib.sha256(product.encode()).hexdigest(), tests


def update(root: Path, folder: Path, processes: int) -> Recording:
    """Return the recording of the checkout `root`, kept in `folder`; run what is new or changed."""
    product, test_files = hashes(root)
    path = folder / "recording.json.gz"
    recording = Recording.load(path) if path.is_file() else Recording(product)
    if recording.product != product:
        recording = Recording(product)
    changed = [name for name, blob in test_files.items() if recording.test_files.get(name) != blob]
    deleted = [name for name in recording.test_files if name not in test_files]
    recording.drop([*changed, *deleted])
    if changed:
        everything = not recording.test_files
        with tempfile.TemporaryDirectory() as scratch:  # where tests/watch lets children write
            log = folder / "recording.log"
            _run(root, Path(scratch), log, [] if everything else changed, processes)
            finished = _read(root, Path(scratch), recording)  # not those of a process that was killed
        recording.test_files.update({name: test_files[name] for name in changed if name in finished})
    recording.save(path)
    return recording


def _run(root: Path, scratch: Path, log_file: Path, test_files: Sequence[str], processes: int) -> None:
    settings = scratch / "settings.ini"
    settings.write_text(SETTINGS.format(scratch=scratch, root=root, context=CONTEXT))
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings), OUTPUT: str(scratch)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(root / "build" / "pycache")}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "tests.mutation.plugin"]
    command += ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder", *test_files]
    with open(log_file, "w") as log:
        subprocess.run(command, cwd=root, env=environment, stdout=log, stderr=log, check=False)


def _read(root: Path, scratch: Path, recording: Recording) -> set[str]:
    """Add what a run wrote to the recording; return the test files whose results were written."""
    tests: dict[str, dict[str, Any]] = {}
    for path in scratch.glob("tests-*.json"):
        tests |= json.loads(path.read_text())
    users: dict[str, list[str]] = defaultdict(list)
    for test, result in tests.items():
        if result["passed"] and not result.get("skipped"):
            recording.seconds[test] = result["seconds"]
            for fixture in result["fixtures"]:
                users[fixture].append(test)
    for path in scratch.glob("coverage.*"):
        for name, context, mask in _masks(path, root):
            if not context:
                recording.imported[name] = recording.imported.get(name, 0) | mask
                continue
            for test in users.get(context, [context]):
                if test in recording.seconds:
                    masks = recording.lines[name]
                    masks[test] = masks.get(test, 0) | mask
    return {test.split("::")[0] for test in tests}


def _masks(path: Path, root: Path) -> list[tuple[str, str, int]]:
    query = "select file.path, context.context, numbits from line_bits join file on file.id = file_id "
    query += "join context on context.id = context_id"
    try:
        with sqlite3.connect(path) as connection:
            rows = connection.execute(query).fetchall()
    except sqlite3.DatabaseError:  # a process that was killed while it wrote
        return []
    prefix = f"{root}/"
    return [
        (name.removeprefix(prefix), context, int.from_bytes(bits, "little"))
        for name, context, bits in rows
        if name.startswith(prefix)
    ]
