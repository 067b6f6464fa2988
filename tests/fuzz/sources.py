"""Kinds of input that can be packed, and single images. See tests/fuzz/kinds.py."""

import json
import random
from pathlib import Path

from tests.fuzz.corpus import CLASSES, FORMATS, SIDE, copy
from tests.fuzz.mutate import mutated_bytes, mutated_json, mutated_text


def packing(source: str, *more: str) -> list[str]:
    """Pack `source`, all in this process."""
    return ["data.pack", source, "out.lmdb", "--size", str(SIDE), "--workers", "0", *more]


def container(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """A zip, tar or Parquet file, or MNIST's files: damaged bytes. Members that lie: tests/data/packing/sources/."""
    target = copy(corpus, draw.choice(("images.zip", "images.tar", "images.parquet", "idx")), folder)
    for path in [target] if target.is_file() else sorted(target.iterdir()):
        path.write_bytes(mutated_bytes(draw, path.read_bytes()))
    return packing(target.name, *draw.choice(((), ("--on-error", "skip"))))


def manifest(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """A CSV file that names images, or StyleGAN's `dataset.json` beside them."""
    copy(corpus, "images", folder)
    if draw.random() < 0.5:
        document = json.loads((corpus / "dataset.json").read_text())
        (folder / "images" / "dataset.json").write_bytes(mutated_json(draw, document))
        return packing("images")
    text = mutated_text(draw, (corpus / "list.csv").read_text()).encode(draw.choice(("utf-8", "utf-16", "utf-8-sig")))
    (folder / "list.csv").write_bytes(text if draw.random() < 0.7 else mutated_bytes(draw, text))
    return packing("list.csv", *draw.choice(((), ("--split", "val"), ("--on-error", "skip"))))


def image(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """An image of any format: damaged bytes, now and then under the name of another format."""
    names = list(FORMATS)
    number = draw.randrange(len(names))
    content = mutated_bytes(draw, (corpus / "images" / CLASSES[number % 3] / names[number]).read_bytes())
    name = draw.choice((names[number], names[number], draw.choice(names)))
    (folder / "in").mkdir()
    (folder / "in" / name).write_bytes(content)
    if draw.random() < 0.4:
        return packing("in")
    return ["predict.py", f"in/{name}", "--checkpoint", str(corpus / "classifier"), "--device", "cpu"]
