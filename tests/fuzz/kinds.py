"""The kinds of input: each writes a mutated file into a folder and returns the command that is given it.

`KINDS[kind](draw, corpus, folder)`: all draws come from `draw`, the files from `corpus` (tests/fuzz/corpus.py).
"""

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import lmdb
import numpy as np
import torch
import yaml

from duetgan.data.lmdb.format import COMPLETE_KEY, ENTRY, INDEX_HEAD, META_KEY
from tests.fuzz import sources
from tests.fuzz.corpus import CLASSES, TASKS, copy
from tests.fuzz.mutate import INTEGERS, SCALARS, mutated_bytes, mutated_text, mutated_tree


def planning(config: str | Path, *more: str) -> list[str]:
    """Everything of a training up to its first step."""
    return ["train.py", "--config", str(config), "--run-dir", "run", "--device", "cpu", "--dry-run", *more]


def evaluating(checkpoint: str | Path, data: str | Path, *more: str) -> list[str]:
    common = ["--checkpoint", str(checkpoint), "--data", str(data), "--n", "8", "--out", "eval", "--device", "cpu"]
    return ["evaluate.py", *common, *more]


def lmdb_file(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """A packed file: metadata that lies under a right checksum, entries and payloads likewise, or damaged bytes."""
    name = draw.choice(("train", "pyramid", "source", "png"))
    path = copy(corpus, f"{name}.lmdb", folder)
    how = draw.randrange(10)
    if how == 0:
        path.write_bytes(mutated_bytes(draw, path.read_bytes()))
    else:
        with (
            lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 26) as environment,
            environment.begin(write=True) as records,
        ):
            (lie if how < 7 else forge)(draw, records)
    data, task = f"{name}.lmdb", draw.choice(list(TASKS))
    uses = [["data.inspect", data, "--verify"], ["data.inspect", data, "--out", "grid.png"]]
    uses += [planning(corpus / f"{task}.yaml", f"--data.{key}", data) for key in ("path", "val-path")]
    return draw.choice([*uses, evaluating(corpus / task, data)])


def lie(draw: random.Random, records: lmdb.Transaction) -> None:
    """Mutate the metadata, and let the completion record agree with them."""
    meta = mutated_tree(draw, json.loads(bytes(records.get(META_KEY, b""))))
    record = json.dumps(meta).encode()
    complete: Any = json.loads(bytes(records.get(COMPLETE_KEY, b"")))
    for key in ("count", "content_hash"):
        if isinstance(meta, dict) and key in meta:
            complete[key] = meta[key]
    if draw.random() < 0.15:
        complete = mutated_tree(draw, complete)
    if isinstance(complete, dict):
        complete["meta_checksum"] = zlib.crc32(record)
    records.put(META_KEY, record)
    records.put(COMPLETE_KEY, json.dumps(complete).encode())


def forge(draw: random.Random, records: lmdb.Transaction) -> None:
    """Mutate an entry of an index or an image's file, under right checksums; or any record at all."""
    key = draw.choice([bytes(key) for key, _ in records.cursor()])
    value = bytes(records.get(key, b""))
    if key.startswith(b"index/") and len(value) > INDEX_HEAD.itemsize:
        entries = np.frombuffer(value[INDEX_HEAD.itemsize :], ENTRY).copy()
        field = draw.choice(("size", "label", "height", "width", "codec"))
        entries[draw.randrange(len(entries))][field] = draw.choice(INTEGERS[:10]) % 2**31
        head = np.frombuffer(value[: INDEX_HEAD.itemsize], INDEX_HEAD).copy()
        head[0]["checksum"] = zlib.crc32(entries.tobytes())
        value = head.tobytes() + entries.tobytes()
    elif key.startswith(b"picture/"):
        entry = np.frombuffer(value[: ENTRY.itemsize], ENTRY).copy()
        payload = mutated_bytes(draw, value[ENTRY.itemsize :])
        if draw.random() < 0.5:
            entry["size"] = len(payload)
        else:
            entry[draw.choice(("height", "width", "codec"))] = draw.choice(INTEGERS[:10]) % 2**31
        entry["checksum"] = zlib.crc32(payload, zlib.crc32(entry.tobytes()[4:]))
        value = entry.tobytes() + payload
    elif key.startswith((b"hash/", b"name/")):
        rest = mutated_bytes(draw, value[4:])
        value = zlib.crc32(rest).to_bytes(4, "little") + rest
    else:
        value = mutated_bytes(draw, value)
    records.put(key, value)


def checkpoint(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """A checkpoint whose keys, types, numbers or tensors are not what they were; the checksum is absent."""
    task = draw.choice(list(TASKS))
    original = max((corpus / task / "checkpoints").glob("step-*.pt"))
    checkpoints = folder / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    path = checkpoints / original.name
    if draw.random() < 0.1:
        path.write_bytes(mutated_bytes(draw, original.read_bytes()))
    else:
        content = torch.load(original, weights_only=True)
        torch.save(mutated_tree(draw, content, lambda value: odd_tensor(draw, value)), path)
    file, recipe = str(path.relative_to(folder)), corpus / f"{task}.yaml"
    using = {
        "classifier": ["predict.py", str(corpus / "images" / CLASSES[0] / "a.png")],
        "gan": ["generate.py", "grid", "--out", "grid.png", "--n", "4"],
    }[task] + ["--checkpoint", file, "--device", "cpu"]
    begun, resumed = planning(recipe, "--init-from", file, "--run-dir", "other"), planning(recipe)
    return draw.choice((using, using, evaluating(file, corpus / "test.lmdb"), begun, resumed))


def odd_tensor(draw: random.Random, value: Any) -> Any:
    """Another tensor for a tensor, None for what is none."""
    if not isinstance(value, torch.Tensor):
        return None
    return draw.choice(
        (
            lambda: value[None],
            lambda: value.flatten(),
            lambda: value[:1] if value.dim() else value[None],
            lambda: torch.cat([value, value]) if value.dim() else value.repeat(2),
            lambda: value.to(draw.choice((torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64))),
            lambda: torch.full_like(value, draw.choice((0, 1, -1, 127))),
            lambda: torch.full(value.shape, draw.choice((float("nan"), float("inf"), 1e30))),
            lambda: torch.zeros(1).expand(draw.choice(((1 << 20, 1 << 20), (0,), (1 << 33,)))),
            lambda: torch.empty(value.shape, device="meta"),
            lambda: value.to_sparse() if value.dim() else value,
            lambda: torch.zeros(()),
        )
    )()


def config(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """A recipe, or the whole config that a run wrote, with other values, keys, lines or characters."""
    task = draw.choice(list(TASKS))
    text = draw.choice((corpus / f"{task}.yaml", corpus / task / "config.yaml")).read_text()
    path = folder / "recipe.yaml"
    overrides: list[str] = []
    match draw.randrange(5):
        case 0:
            text = mutated_text(draw, text)
        case 1:
            text = yaml.safe_dump(mutated_tree(draw, yaml.safe_load(text)))
        case 2:
            overrides = [f"--{draw.choice(keys_of(yaml.safe_load(text)))}={draw.choice(SCALARS)}"]
        case _:
            text = other_values(draw, text)
    path.write_text(text, errors="surrogatepass")
    return planning("recipe.yaml", *overrides)


def keys_of(config: dict[str, Any], before: str = "") -> list[str]:
    """Dotted names of a config's values."""
    found = []
    for key, value in config.items():
        found += keys_of(value, f"{before}{key}.") if isinstance(value, dict) else [f"{before}{key}"]
    return found


def other_values(draw: random.Random, text: str) -> str:
    """One to three of the values of a YAML text, by SCALARS."""
    lines = text.splitlines()
    rows = [number for number, line in enumerate(lines) if ": " in line and "{" not in line]
    for number in draw.choices(rows, k=draw.choice((1, 1, 2, 3))):
        lines[number] = f"{lines[number].partition(':')[0]}: {draw.choice(SCALARS)}"
    return "\n".join(lines) + "\n"


Make: TypeAlias = Callable[[random.Random, Path, Path], list[str]]
KINDS: dict[str, Make] = {
    "lmdb": lmdb_file,
    "checkpoint": checkpoint,
    "config": config,
    "container": sources.container,
    "manifest": sources.manifest,
    "image": sources.image,
}
