"""Sample mutants, run their tests, and print which of them survived."""

import argparse
import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.mutation.mutants import HAND_OVER, Mutant, mutants_of, sample
from tests.mutation.recording import product_files, update
from tests.mutation.runner import NOTICED, TIMEOUT, Clone, Result, Runner

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "mutation"
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
# The parts whose faults do the most harm; a file counts for the first one that its path begins with.
PARTS = (
    "training", "data/reading", "data/lmdb", "data/augment", "models", "metrics", "inference", "utils/checkpoint",
    "utils/distributed", "library.py", "commands/planning",
)  # fmt: skip


def part_of(path: str, parts: Sequence[str] = PARTS) -> str:
    """Return the part that a path belongs to, or an empty string."""
    path = path.removeprefix("duetgan/")
    return next((part for part in parts if path == part or path.startswith(f"{part}/")), "")


def equivalents() -> dict[str, str]:
    """Return the reason for each mutant that changes nothing that a test should notice, by its key."""
    return {entry["key"]: entry["reason"] for entry in yaml.safe_load(EQUIVALENT.read_text()) or []}


def draw(n: int, seed: int, parts: Sequence[str]) -> list[Mutant]:
    """Draw n mutants of the parts."""
    files = product_files(ROOT)
    candidates = mutants_of(ROOT, [f for f in files if part_of(f, parts)], files)
    skipped = equivalents()

    def is_valid(mutant: Mutant) -> bool:
        return mutant.key not in skipped and mutant.is_valid((ROOT / mutant.path).read_bytes())

    return sample(candidates, n, seed, lambda path: part_of(path, parts), is_valid)


def _of_keys(keys: Sequence[str]) -> list[Mutant]:
    """Return the mutants with these keys, of any part of the product."""
    files = product_files(ROOT)
    return [mutant for mutant in mutants_of(ROOT, files) if mutant.key in keys]


def table(results: Sequence[Result], parts: Sequence[str]) -> str:
    """Return the share of noticed mutants by part."""
    rows = []
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[part_of(result.mutant.path, parts)].append(result)
    for result in results:
        groups["hand-over" if result.mutant.kind in HAND_OVER else "the rest"].append(result)
    groups["all"] = list(results)
    for name, group in groups.items():
        noticed = sum(result.status in (NOTICED, TIMEOUT) for result in group)
        rows.append(f"{name:20} {noticed:4} of {len(group):4}   {noticed / len(group):6.1%}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--n", type=int, default=100, help="mutants to sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=PARTS, metavar="FOLDER", help="folders of the product")
    parser.add_argument("--keys", nargs="*", metavar="KEY", help="run these mutants instead of a sample")
    parser.add_argument("--limit", type=float, default=90, help="seconds of tests for a mutant")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    clones = [Clone(ROOT, FOLDER / f"worker-{index}") for index in range(options.processes)]
    print("recording which test executes which line ...", flush=True)
    recording = update(clones[0].root, FOLDER, options.processes + 1)
    print(f"{len(recording.seconds)} tests", flush=True)
    mutants = _of_keys(options.keys) if options.keys else draw(options.n, options.seed, options.only)
    runner = Runner(clones, recording, options.limit)
    results: dict[str, Result] = {}
    path = FOLDER / ("results-keys.jsonl" if options.keys else f"results-{options.seed}-{options.n}.jsonl")

    def report(result: Result) -> None:
        results[result.mutant.key] = result
        with open(path, "a") as file:
            file.write(json.dumps(result.as_dict()) + "\n")
        mark = "." if result.status in (NOTICED, TIMEOUT) else f"\n{result.status}: {describe(result.mutant)}\n"
        print(mark, end="", flush=True)

    path.unlink(missing_ok=True)
    runner.run(mutants, report, set())
    failing = set(runner.failures_unchanged([r.test for r in results.values() if "::" in r.test]))
    again = [result.mutant for result in results.values() if result.test in failing]
    if again:
        print(f"\n{len(failing)} tests fail without a change; {len(again)} mutants again without them")
        runner.run(again, report, failing)
    print("\n\n" + table(list(results.values()), options.only))
    counts = Counter(result.status for result in results.values())
    print(", ".join(f"{status}: {count}" for status, count in counts.items()))
    print(f"{len(equivalents())} mutants are listed as equivalent; results: {path.relative_to(ROOT)}")


def describe(mutant: Mutant) -> str:
    """Return the mutant in one line."""
    change = f"{mutant.before} -> {mutant.text}".replace("\n", " ")
    return f"{mutant.key} {mutant.path}:{mutant.first_line} ({mutant.function}) {mutant.kind}: {change}"


if __name__ == "__main__":
    main()
