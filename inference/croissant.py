"""A Croissant card (mlcommons.org/croissant/1.0) of a packed data set of samples: what it is, as JSON-LD beside it."""

import json
from pathlib import Path
from typing import Any

from data.lmdb.format import Meta
from utils.checkpoint import file_sha256
from utils.files import write_atomic

CONFORMS = "http://mlcommons.org/croissant/1.0"
TERMS = (
    *("citeAs", "column", "equivalentProperty", "extract", "field", "fileObject", "fileProperty", "fileSet", "format"),
    *("includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex"),
    *("repeated", "replace", "samplingRate", "separator", "source", "subField", "transform"),
)
CONTEXT: dict[str, Any] = {  # the one that the format prescribes
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in TERMS},
}


def card_path(data: Path) -> Path:
    """Where the card of a packed file is: fake.lmdb has fake.croissant.json."""
    return data.with_suffix(".croissant.json")


def write_card(data: Path, meta: Meta, *, licence: str) -> Path:
    """Write the card of a file with a passport, whole or not at all; returns its path. Raises UserError."""
    path = card_path(data)
    content = {"@context": CONTEXT, **described(data, meta, licence=licence)}
    write_atomic(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def described(data: Path, meta: Meta, *, licence: str) -> dict[str, Any]:
    """The card's content. LMDB is no format that Croissant's readers take apart, so there are no record sets."""
    assert meta.passport is not None
    side, colours = meta.resolutions[-1], "RGB" if meta.channels == 3 else "grey"
    classes = f", {len(meta.classes)} classes ({', '.join(meta.classes)})" if meta.classes else ""
    learnt = meta.passport["trained_on"] or "unknown"
    description = (
        f"{meta.count} generated images, {side}x{side} px, {colours}{classes}. None is real: {meta.source}. Content "
        f"hash of the images that the generator was trained on: {learnt}; of these: {meta.content_hash}. A packed file "
        "of Duet, which its data.inspect describes."
    )
    file = {
        "@type": "cr:FileObject",
        "@id": data.name,
        "name": data.name,
        "contentUrl": data.name,
        "encodingFormat": "application/x-lmdb",
        "sha256": file_sha256(data),
    }
    return {
        "@type": "sc:Dataset",
        "name": data.stem,
        "description": description,
        "conformsTo": CONFORMS,
        "license": licence,
        "url": data.name,
        "version": "1.0.0",
        "keywords": ["synthetic", "generated", "images"],
        "distribution": [file],
    }
