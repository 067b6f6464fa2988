"""Which test executes which line: recorded anew when a commit has changed any Python file."""

import gzip
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
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

    sources: str = ""  # a hash of all Python files
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))  # file -> test -> mask
    imported: dict[str, int] = field(default_factory=dict)  # file -> mask of the lines run on import

    @classmethod
    def load(cls, path: Path) -> "Recording":
        with gzip.open(path, "rt") as file:
            recording = cls(**json.load(file))
        recording.lines = defaultdict(dict, recording.lines)
        return recording

    def save(self, path: Path) -> None:
        with gzip.open(path, "wt", compresslevel=3) as file:
            json.dump(vars(self), file)

    def tests_of(self, path: str, first_line: int, last_line: int) -> list[str]:
        """Return the tests that execute these lines.

        For lines that are run on import, they are those that execute the file at all, and those of the same top folder,
        because a table or a default may be used without executing a line of its file.
        """
        statement = ((1 << (last_line - first_line + 1)) - 1) << first_line
        tests = self.lines.get(path, {})
        imported = self.imported.get(path, 0)
        if imported & statement:
            top = path.removeprefix("duetgan/").split("/")[0]
            return [t for t in self.seconds if tests.get(t) or t.split("/")[1] == top]
        return [t for t in self.seconds if tests.get(t, 0) & statement]


def product_files(root: Path) -> list[str]:
    """Return the product's Python files, relative to the checkout."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    outside = ("tests/", "benchmarks/", "docs/", "examples/")
    return [name for name in listed.stdout.splitlines() if not name.startswith(outside)]


def update(root: Path, folder: Path, processes: int) -> Recording:
    """Return the recording of the checkout `root`, kept in `folder`; run the tests if there is none of these files."""
    listed = subprocess.run(["git", "ls-files", "-s", "*.py"], cwd=root, capture_output=True, check=True)
    sources = hashlib.sha256(listed.stdout).hexdigest()
    path = folder / "recording.json.gz"
    recording = Recording.load(path) if path.is_file() else Recording()
    if recording.sources != sources:
        recording = Recording(sources)
        with tempfile.TemporaryDirectory() as scratch:
            _run(root, Path(scratch), folder / "recording.log", processes)
            _read(root, Path(scratch), recording)
        recording.save(path)
    return recording


def _run(root: Path, scratch: Path, log_file: Path, processes: int) -> None:
    settings = scratch / "settings.ini"
    settings.write_text(SETTINGS.format(scratch=scratch, root=root, context=CONTEXT))
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings), OUTPUT: str(scratch)}
    environment |= {
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(root / "build" / "pycache"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "tests.mutation.plugin"]
    command += ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    with open(log_file, "w") as log:
        subprocess.run(command, cwd=root, env=environment, stdout=log, stderr=log, check=False)


def _read(root: Path, scratch: Path, recording: Recording) -> None:
    """Add what a run wrote to the recording."""
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
            while "|" in context and context not in tests and context not in users:
                context = context.partition("|")[2]  # a fork has the context of its parent's start, too
            for test in users.get(context, [context]):
                if test in recording.seconds:
                    masks = recording.lines[name]
                    masks[test] = masks.get(test, 0) | mask


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
