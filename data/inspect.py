"""Show what a packed file holds: `python -m data.inspect X.lmdb [--verify] [--json] [--out grid.png]`.

The image grid goes beside the file as `X.grid.png`, or to `--out`; with `--json` or `--verify` it is drawn only if
`--out` is given. With `--json` stdout is one document.
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import numpy as np

from data.decode import decode, stored_image
from data.errors import DamageError, ImageError
from data.images import thumbnail
from data.lmdb.format import Meta, content_hash
from data.lmdb.reader import LMDBReader
from utils.config.cli import Parser
from utils.errors import UserError
from utils.images import save_table
from utils.memory import cores
from utils.runlog.progress import Bar
from utils.script import run_cli
from utils.text import columns

COLUMNS = 10
MAX_ROWS = 20
CELL = 64  # px; smaller images are enlarged by a whole factor, those above twice this are scaled down to it
TOLD = 2  # lines on damaged records
BAR = 40  # characters of the longest bar of the histogram


def description(reader: LMDBReader) -> dict[str, object]:
    """The metadata and the file as one flat document."""
    return {"file": str(reader.path), "bytes": reader.path.stat().st_size, **reader.meta.model_dump()}


def lines(document: dict[str, object], meta: Meta) -> list[str]:
    """The description for people, with a bar per class."""
    skipped = ("classes", "histogram")
    told = document | ({} if meta.passport else {"passport": "none, real images"})
    rows = [(key, _text(value)) for key, value in told.items() if key not in skipped]
    text = columns([*rows, ("classes", str(len(meta.classes) or "none, unlabelled"))], "<").splitlines()
    largest = max([1, *meta.histogram])
    bars = [
        (f"  {label}", name, f"{count:,}", "#" * round(BAR * count / largest))
        for label, (name, count) in enumerate(zip(meta.classes, meta.histogram, strict=True))
    ]
    return text + columns(bars, "><><").splitlines()


def _text(value: object) -> str:
    if isinstance(value, list):
        return "none" if not value else " ".join(_text(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if value is None:
        return "none"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def save_grid(reader: LMDBReader, path: Path) -> None:
    """Draw a row of images per class with its name (the first MAX_ROWS classes), or the first images if unlabelled."""
    side = min(reader.resolution or 2 * CELL, 2 * CELL)
    cell = side * max(1, -(-CELL // side))
    rows = [[thumbnail(stored_image(reader, index)[0], cell) for index in row] for row in _grid_rows(reader)]
    save_table(rows, path, row_heads=reader.classes[:MAX_ROWS], cell=cell, gap=2)


def _grid_rows(reader: LMDBReader) -> list[list[int]]:
    """Records, spread evenly over each class."""
    if not reader.classes:
        chosen = list(range(min(len(reader), COLUMNS * 8)))
        return [chosen[start : start + COLUMNS] for start in range(0, len(chosen), COLUMNS)]
    rows = []
    for label in range(min(len(reader.classes), MAX_ROWS)):
        members = np.flatnonzero(reader.labels() == label)
        places = np.unique(np.linspace(0, len(members) - 1, COLUMNS).astype(np.int64))
        rows.append(members[places].tolist())
    return rows


@dataclass
class Damage:
    """Damaged records and why; `content` says what contradicts the metadata although every record is intact."""

    records: dict[int, str] = field(default_factory=dict)
    content: str = ""

    def __bool__(self) -> bool:
        return bool(self.records or self.content)


@dataclass
class Block:
    """What one block turned out to be."""

    labels: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # empty if its index is damaged
    digest: bytes = b""  # SHA-256 of payloads and entries
    damaged: dict[int, str] = field(default_factory=dict)  # record -> reason


def verify(reader: LMDBReader, workers: int | None = None) -> Damage:
    """Check every index, block and record at every resolution, decode encoded images, compare labels and hash with
    the metadata. `workers`: threads, default one per core.
    """
    meta, damage = reader.meta, Damage()
    levels = [LMDBReader(reader.path, resolution=side or None) for side in meta.resolutions]
    jobs = [(number, block) for number, level in enumerate(levels) for block in range(level.blocks)]
    labels: list[list[np.ndarray]] = [[] for _ in levels]
    digests: dict[int, list[bytes]] = {side: [] for side in meta.resolutions}
    with ThreadPoolExecutor(workers or cores()) as pool:
        found = pool.map(lambda job: check_block(levels[job[0]], job[1]), jobs)
        progress = Bar(found, "verifying", len(jobs), unit="block")
        for (number, _), block in zip(jobs, progress, strict=True):
            damage.records |= block.damaged
            labels[number].append(block.labels)
            digests[meta.resolutions[number]].append(block.digest)
    try:
        reader.signatures()
        reader.names()
    except DamageError as error:
        damage.records |= dict.fromkeys(error.records, error.reason)
    if not damage.records:
        content = content_hash(meta.classes, meta.channels, meta.encoding, digests)
        damage.content = _contradiction(reader, [np.concatenate(parts) for parts in labels], content)
    return damage


def _contradiction(reader: LMDBReader, labels: list[np.ndarray], content: str) -> str:
    """What does not fit the metadata, if anything."""
    meta = reader.meta
    if any((part != labels[0]).any() for part in labels):
        return "the labels differ between the resolutions"
    known = (labels[0] >= 0) & (labels[0] < len(meta.classes))
    counts = np.bincount(labels[0][known], minlength=len(meta.classes)).tolist()
    if meta.classes and counts != meta.histogram:
        return "the labels do not give the histogram in the metadata"
    if content != meta.content_hash:
        return "the content hash does not match"
    return ""


def check_block(reader: LMDBReader, block: int) -> Block:
    """Check one block at the reader's resolution."""
    found, digest = Block(), hashlib.sha256()
    with reader.handle().environment.begin(buffers=True) as transaction:
        try:
            head, entries = reader.index_record(transaction, block)
            found.labels = entries["label"].astype(np.int64)
            if reader.meta.encoding == "raw":
                pixels = reader.raw_block(transaction, block)
                damaged = reader.damaged_in_raw_block(transaction, block)
                found.damaged |= dict.fromkeys(damaged, "its checksum does not match")
                if not found.damaged and zlib.crc32(pixels.data) != head["block_checksum"]:
                    raise reader.damage(reader.block_range(block), "the checksum of its block does not match")
                digest.update(pixels.data)
            else:
                for record, expected in zip(reader.block_range(block), entries, strict=True):
                    try:
                        digest.update(_checked_payload(reader, transaction, record, expected))
                    except DamageError as error:
                        found.damaged[record] = error.reason
            digest.update(entries.tobytes())
            found.digest = digest.digest()
        except DamageError as error:
            found.damaged |= dict.fromkeys(error.records, error.reason)
    return found


def _checked_payload(reader: LMDBReader, transaction: lmdb.Transaction, record: int, expected: np.void) -> memoryview:
    """An encoded image's file. Raises DamageError if it differs from its entry in the index, or cannot be decoded."""
    entry, payload = reader.encoded_record(transaction, record)
    if entry != expected:
        raise reader.damage(record, "it differs from its index")
    try:
        size = (int(entry["height"]), int(entry["width"]))
        height, width = decode(payload, int(entry["codec"]), reader.meta.channels, size).shape[:2]
    except ImageError as error:
        raise reader.damage(record, str(error)) from None
    if (height, width) != (entry["height"], entry["width"]):
        raise reader.damage(record, f"it is {width}x{height} px when decoded")
    return payload


def report(damage: Damage, reader: LMDBReader) -> None:
    """Raise UserError if there is damage, naming the first record; two lines on stderr say more, `--json` all."""
    if not damage:
        return
    runs = _runs(damage.records)
    told = [f"record {first}{f' to {last}' * (last > first)}: {reason}" for first, last, reason in runs]
    if len(told) > TOLD:
        rest = len(damage.records) - sum(last - first + 1 for first, last, _ in runs[: TOLD - 1])
        told[TOLD - 1 :] = [f"and {rest:,} more records; --json lists all"]
    print("".join(f"{line}\n" for line in told), end="", file=sys.stderr)
    if damage.records:
        first = min(damage.records)
        raise UserError(
            f"{reader.path}: {len(damage.records):,} of {len(reader):,} records are damaged, the first is"
            f" record {first} ({damage.records[first]}): copy or pack the file again"
        )
    raise UserError(f"{reader.path}: {damage.content}, although every record is whole: pack the file again")


def _runs(records: Mapping[int, str]) -> list[tuple[int, int, str]]:
    """First and last of consecutive records with the same reason."""
    runs: list[tuple[int, int, str]] = []
    for record, reason in sorted(records.items()):
        if runs and runs[-1][1:] == (record - 1, reason):
            runs[-1] = (runs[-1][0], record, reason)
        else:
            runs.append((record, record, reason))
    return runs


def main(argv: list[str]) -> None:
    """The command line."""
    parser = Parser(prog="python -m data.inspect", description="Show what a packed file holds.")
    parser.add_argument("path", type=Path, metavar="X.lmdb")
    parser.add_argument("--verify", action="store_true", help="check every record; exit code 2 if one is damaged")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--out", type=Path, metavar="PNG", help="the grid of images to write; default: X.grid.png")
    args = parser.parse_args(argv)
    if args.out and args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out}: its name must end in .png")
    with LMDBReader(args.path) as reader:
        damage = verify(reader) if args.verify else None
        document = description(reader)
        if damage is not None:
            document["damaged"] = sorted(damage.records)
        print(json.dumps(document, indent=2) if args.json else "\n".join(lines(document, reader.meta)))
        if damage is not None:
            report(damage, reader)
        if args.out or not (args.json or args.verify):
            out = args.out or args.path.with_name(f"{args.path.stem}.grid.png")
            save_grid(reader, out)
            print(f"image grid: {out}", file=sys.stderr if args.json else sys.stdout)


if __name__ == "__main__":
    sys.exit(run_cli(main))
