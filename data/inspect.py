"""Show what a packed file holds: `python -m data.inspect X.lmdb [--verify] [--json] [--out grid.png]`.

The image grid goes beside the file as `X.grid.png`, or to `--out`; with `--json` or `--verify` it is drawn only if
`--out` is given. With `--json` stdout is one document.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from data.decode import stored_image
from data.images import thumbnail
from data.lmdb.format import Meta
from data.lmdb.reader import LMDBReader
from data.reading.verify import Damage, verify
from utils.config.cli import Parser
from utils.errors import UserError
from utils.files import building
from utils.images import legible
from utils.script import run_cli
from utils.text import columns

COLUMNS = 10
MAX_ROWS = 20
CELL = 64  # px; smaller images are enlarged by a whole factor, those above twice this are scaled down to it
TEXT = 12  # px: height of letters
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


def grid(reader: LMDBReader) -> Image.Image:
    """A row of images per class with its name (the first MAX_ROWS classes), or the first images if unlabelled."""
    rows = _grid_rows(reader)
    side = min(reader.resolution or 2 * CELL, 2 * CELL)
    cell = side * max(1, -(-CELL // side))
    heads = [legible(name, TEXT) for name, _ in rows]
    margin = max([0, *(int(font.getlength(name)) + 12 for name, font in heads if name)])
    image = Image.new("RGB", (margin + COLUMNS * (cell + 2), len(rows) * (cell + 2)), "white")
    draw = ImageDraw.Draw(image)
    for row, ((name, font), (_, indices)) in enumerate(zip(heads, rows, strict=True)):
        draw.text((6, row * (cell + 2) + cell // 2), name, fill="black", font=font, anchor="lm")
        for column, index in enumerate(indices):
            tile = thumbnail(stored_image(reader, index)[0], cell)
            image.paste(tile, (margin + column * (cell + 2), row * (cell + 2)))
    return image


def _grid_rows(reader: LMDBReader) -> list[tuple[str, list[int]]]:
    """Names and records, spread evenly over each class."""
    if not reader.classes:
        chosen = list(range(min(len(reader), COLUMNS * 8)))
        return [("", chosen[start : start + COLUMNS]) for start in range(0, len(chosen), COLUMNS)]
    rows = []
    for label, name in enumerate(reader.classes[:MAX_ROWS]):
        members = np.flatnonzero(reader.labels() == label)
        places = np.unique(np.linspace(0, len(members) - 1, COLUMNS).astype(np.int64))
        rows.append((name, members[places].tolist()))
    return rows


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
            with building(out) as temporary:
                grid(reader).save(temporary, format="PNG")
            print(f"image grid: {out}", file=sys.stderr if args.json else sys.stdout)


if __name__ == "__main__":
    sys.exit(run_cli(main))
