"""The quickstart on each of the ten folders of make.py, on one core, beside the script of an expert.

`python benchmarks/folders/run.py FOLDERS OUT [NAME ...] [--minutes 10] [--weights FILE]`: FOLDERS is what make.py made.
Each folder's results are OUT/NAME, with what was printed in OUT/NAME/printed.txt, and OUT/NAME/row.json holds its
figures; one that has a row is not run again. OUT/table.md is the table of docs/measurements/folders.md.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.folders.make import FOLDERS
from duetgan.utils.config.cli import Parser, number
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.files import as_json, write_atomic

ROOT = Path(__file__).resolve().parents[2]
HEADER = ["folder", "images", "exit", "minutes", "classifier", "floor", "script", "recognised", "diversity", "copies"]
WARNING = re.compile(r"warning:|error:|skipped +\d|left out|Traceback")


def run(name: str, folder: Path, out: Path, minutes: float, weights: list[str]) -> dict[str, Any]:
    """The figures of one folder: the quickstart's own, and the script's on its split."""
    command = [sys.executable, "quickstart.py", str(folder), "--dir", str(out), "--minutes", f"{minutes:g}", *weights]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    row: dict[str, Any] = {"name": name, "exit": done.returncode, "seconds": time.monotonic() - started}
    out.mkdir(parents=True, exist_ok=True)
    (out / "printed.txt").write_text(done.stdout)
    row["warnings"] = list(dict.fromkeys(line for line in done.stdout.splitlines() if WARNING.search(line)))
    row["survey"] = (_read(out / "plan.json") or {}).get("survey")
    row["summary"], row["gan"] = _read(out / "summary.json"), _read(out / "gan" / "eval" / "metrics.json")
    if (row["survey"] or {}).get("classes", 0) > 1 and (out / "data" / "test.lmdb").exists():
        script = [sys.executable, "benchmarks/folders/sklearn_script.py", str(out), str(folder), *weights]
        theirs = subprocess.run(script, cwd=ROOT, text=True, capture_output=True, check=False)
        row["script"] = json.loads(theirs.stdout) if theirs.returncode == 0 else {"error": theirs.stderr[-500:]}
    return row


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.is_file() else None


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table, by HEADER."""
    survey, summary = row["survey"] or {}, row["summary"] or {}
    classifier, gan = summary.get("classifier") or {}, summary.get("gan") or {}
    classes = f"{survey['count']:,} of {survey['classes']}" if survey else "-"
    copies = (row["gan"] or {}).get("memorisation") or {}
    verdict = ("copies" if copies["copies"] else "no sign") if "copies" in copies else "-"
    floor = classifier.get("floor")
    return [
        *(row["name"], classes, str(row["exit"]), f"{row['seconds'] / 60:.1f}"),
        *(_sure(each) for each in (classifier, floor if isinstance(floor, dict) else {"accuracy": floor})),
        _sure(row.get("script") or {}),
        *("-" if gan.get(key) is None else f"{gan[key]:.2f}" for key in ("recognised", "diversity_ratio")),
        verdict,
    ]


def _sure(figures: Mapping[str, Any]) -> str:
    if figures.get("accuracy") is None:
        return "-"
    interval = figures.get("interval")
    return f"{figures['accuracy']:.3f}" + (" ({:.2f} to {:.2f})".format(*interval) if interval else "")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main(argv: list[str]) -> None:
    parser = Parser(prog="run.py", description="Run the quickstart on ten folders and gather what came out.")
    parser.add_argument("folders", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of make.py's folders (default: all)")
    parser.add_argument("--minutes", type=number(float, 1), default=10.0)
    parser.add_argument("--weights", metavar="FILE", type=Path)
    options = parser.parse_args(argv)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, for what is started too
    weights = ["--weights", str(options.weights.resolve())] if options.weights else []
    for name in options.names or FOLDERS:
        out = options.out.resolve() / name
        if not (out / "row.json").is_file():
            row = run(name, options.folders.resolve() / name, out, options.minutes, weights)
            write_atomic(out / "row.json", as_json(row))
        print(" | ".join(cells(json.loads((out / "row.json").read_text()))), flush=True)
    rows = [json.loads(file.read_text()) for each in FOLDERS if (file := options.out / each / "row.json").is_file()]
    (options.out / "table.md").write_text(table(rows))


if __name__ == "__main__":
    sys.exit(run_cli(main))
