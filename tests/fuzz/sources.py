"""Kinds of input that can be packed, and single images. See tests/fuzz/kinds.py."""

import gzip
import io
import json
import random
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

from tests.fuzz.corpus import CLASSES, FORMATS, SIDE, copy
from tests.fuzz.mutate import TEXTS, mutated_bytes, mutated_json, mutated_text


def packing(source: str, *more: str) -> list[str]:
    """Pack `source`, all in this process."""
    return ["data.pack", source, "out.lmdb", "--size", str(SIDE), "--workers", "0", *more]


def cells(corpus: Path) -> list[dict[str, Any]]:
    """The images as Hugging Face's library writes them into a column."""
    return [{"bytes": path.read_bytes(), "path": path.name} for path in sorted((corpus / "images").rglob("*.*"))]


def archive(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """A zip file: damaged bytes, or members under other names, twice, encrypted by their flag, of other lengths."""
    path = folder / "images.zip"
    if draw.random() < 0.5:
        path.write_bytes(mutated_bytes(draw, (corpus / "images.zip").read_bytes()))
        return packing("images.zip")
    with zipfile.ZipFile(corpus / "images.zip") as source:
        members = [(info.filename, source.read(info)) for info in source.infolist()]
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(members))
        name, content = members[at]
        odd = (name, name.replace("/", "\\"), f"../{name}", f"/{name}", f"{name}/", f"{draw.choice(TEXTS)}/{name}")
        members[at] = (draw.choice(odd), draw.choice((content, b"", mutated_bytes(draw, content))))
        if draw.random() < 0.3:
            members.append(draw.choice(members))
        if draw.random() < 0.2:
            members.append(("dataset.json", mutated_json(draw, json.loads((corpus / "dataset.json").read_text()))))
        if draw.random() < 0.1:
            members.append((f"{CLASSES[0]}/zeros.png", bytes(64 << 20)))
    with zipfile.ZipFile(path, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))) as file:
        for name, content in members:
            file.writestr(zipfile.ZipInfo(name[:60_000]), content, file.compression)
    return packing("images.zip", *(["--on-error", "skip"] if draw.random() < 0.3 else []))


def parquet(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """A Parquet file: damaged bytes, or columns of other names, types, values and metadata."""
    import pyarrow
    from pyarrow.parquet import write_table

    rows: list[dict[str, Any]] = [{"image": cell, "label": n % 3} for n, cell in enumerate(cells(corpus))]
    features = {"info": {"features": {"label": {"names": list(CLASSES), "_type": "ClassLabel"}}}}
    how = draw.randrange(4)
    metadata = mutated_json(draw, features) if how == 1 else json.dumps(features).encode()
    if how == 2:
        for _ in range(draw.randint(1, 3)):
            row = draw.choice(rows)
            row["label"] = draw.choice((None, -1, 10**9, 2**62, row["label"]))
            other = mutated_bytes(draw, cells(corpus)[0]["bytes"])
            row["image"]["bytes"] = draw.choice((None, b"", bytes(1 << 26), other))
    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in ("image", "label")}
    if how == 3:
        for _ in range(draw.randint(1, 2)):
            name = draw.choice(list(columns))
            value = draw.choice((b"x", "x", 1.5, True, None, [1], {"bytes": "x"}, {"bytes": None}, 2**60, {"a": 1}))
            columns[draw.choice((name, "class", "x", "", "image"))] = [value] * len(rows)
    table = pyarrow.table(columns).replace_schema_metadata({b"huggingface": metadata})
    write_table(table, folder / "data.parquet", row_group_size=draw.choice((1, 4, 100)))
    if how == 0:
        path = folder / "data.parquet"
        path.write_bytes(mutated_bytes(draw, path.read_bytes()))
    return packing("data.parquet")


def tar(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """A tar of samples: damaged bytes, or members of other names, kinds, lengths and labels."""
    members: list[tuple[str, bytes]] = []
    for number, path in enumerate(sorted((corpus / "images").rglob("*.*"))):
        label = draw.choice((str(number % 3), str(number % 3), CLASSES[number % 3], draw.choice(TEXTS), str(10**30)))
        document = {"label": draw.choice((number % 3, CLASSES[number % 3])), "text": "x"}
        told = {"cls": label.encode(errors="surrogatepass"), "json": json.dumps(document).encode(), "txt": b"a"}
        suffix = draw.choice(("cls", "cls", "json", "txt"))
        if suffix == "json" and draw.random() < 0.3:
            told["json"] = mutated_json(draw, document)
        members += [(f"{number:04d}{path.suffix}", path.read_bytes()), (f"{number:04d}.{suffix}", told[suffix])]
    for _ in range(draw.choice((0, 1, 3))):
        at = draw.randrange(len(members))
        name, content = members[at]
        odd = [f"{before}{name}" for before in ("../", "/", "./", f"{draw.choice(TEXTS[4:])}/")]
        members[at] = (draw.choice([*odd, f"{name}/", name[:4], "x" * 300]), mutated_bytes(draw, content))
    how = draw.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(folder / "x.tar", "w", format=how, errors="replace") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name.replace("\0", "")[: 90 if how == tarfile.USTAR_FORMAT else None])
            info.size = len(content)
            if draw.random() < 0.02:
                info.type, info.linkname = draw.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)), "0000.bmp"
            archive.addfile(info, io.BytesIO(content))
    if draw.random() < 0.6:
        path = folder / "x.tar"
        path.write_bytes(mutated_bytes(draw, path.read_bytes()))
    return packing("x.tar", *draw.choice(((), ("--on-error", "skip"), ("--label-column", "label"))))


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


def idx(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """MNIST's files, gzipped or not: the header, the values or the compressed bytes."""
    target = copy(corpus, "idx", folder)
    for path in sorted(target.iterdir()):
        content = path.read_bytes()
        if draw.random() < 0.3:
            content = mutated_bytes(draw, content[:16], most=2) + content[16:]
        if draw.random() < 0.3:
            content = mutated_bytes(draw, content)
        if draw.random() < 0.1:
            content += bytes(draw.choice((1, 1 << 26, 1 << 28)))
        if draw.random() < 0.5:
            path.unlink()
            path = path.with_name(f"{path.name}.gz")
            content = gzip.compress(content, mtime=0)  # the same bytes each time
            content = mutated_bytes(draw, content) if draw.random() < 0.5 else content
        path.write_bytes(content)
    return packing(draw.choice(("idx", "idx/")))


def image(draw: random.Random, corpus: Path, folder: Path) -> list[str]:
    """An image of any format: damaged bytes; a PNG's chunks under right checksums."""
    names = list(FORMATS)
    number = draw.randrange(len(names))
    content = (corpus / "images" / CLASSES[number % 3] / names[number]).read_bytes()
    if names[number].endswith(".png") and draw.random() < 0.7:
        content = forged_png(draw, content)
    else:
        content = mutated_bytes(draw, content)
    name = draw.choice((names[number], names[number], draw.choice(names)))
    (folder / "in").mkdir()
    (folder / "in" / name).write_bytes(content)
    if draw.random() < 0.4:
        return packing("in")
    return ["predict.py", f"in/{name}", "--checkpoint", str(corpus / "classifier"), "--device", "cpu"]


def forged_png(draw: random.Random, content: bytes) -> bytes:
    """A PNG with mutated, repeated or missing chunks, each under a right checksum."""
    chunks, at = [], 8
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    for _ in range(draw.randint(1, 2)):
        number = draw.randrange(len(chunks))
        tag, body = chunks[number]
        match draw.randrange(6):
            case 0:
                del chunks[number : number + len(chunks) // 2]
            case 1:
                chunks.insert(draw.randint(0, len(chunks)), chunks[number])
            case 2:
                chunks.insert(1, (draw.choice((b"iCCP", b"zTXt", b"iTXt", b"eXIf", b"tRNS", b"PLTE", b"acTL")), body))
            case 3 if body:
                sizes = [draw.choice((0, 1, 16, 65_000, 30_000, 2**31 - 1)).to_bytes(4, "big") for _ in range(2)]
                chunks[0] = (chunks[0][0], b"".join(sizes) + chunks[0][1][8:])
            case _:
                chunks[number] = (tag, mutated_bytes(draw, body, most=2))
        if not chunks:
            break
    sums = (zlib.crc32(tag + body).to_bytes(4, "big") for tag, body in chunks)
    parts = (len(body).to_bytes(4, "big") + tag + body for tag, body in chunks)
    return content[:8] + b"".join(part + checksum for part, checksum in zip(parts, sums, strict=True))
