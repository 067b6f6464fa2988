"""Labels in StyleGAN's `dataset.json` of a folder or an archive.

The document is `{"labels": [["name", class], ...]}`.
"""

import json
from typing import TYPE_CHECKING

from duetgan.data.errors import ImageError
from duetgan.data.sources import labels
from duetgan.data.sources.base import SourceOptions, refuse_split, with_slashes
from duetgan.utils.errors import UserError, explained

if TYPE_CHECKING:
    from duetgan.data.sources.files import ListedSource

MANIFEST = "dataset.json"


def take_labels(source: "ListedSource", ignored: list[str], options: SourceOptions) -> bool:
    """Set the source's labels from its `dataset.json`; return False if there is none.

    A label is the number or name of a class, or a list of them. Raises UserError if the document
    has another form, does not name exactly the images, or has invalid labels.
    """
    manifests = [name for name in ignored if f"/{name}".endswith(f"/{MANIFEST}")]
    manifest = min(manifests, key=lambda name: name.count("/"), default="")
    prefix, where = manifest.removesuffix(MANIFEST), f"{source.where}: {manifest}"
    if not manifest or (options.classes_from and prefix):
        return False
    refuse_split(source.where, options.split)
    if options.classes_from:
        raise UserError(
            f"{source.where}: its classes are those of {manifest}; leave --classes-from out"
        )
    source.ignored.remove(manifest)
    source.takes = source.takes | {"label_separator"}
    with explained(ImageError, lambda error: f"{where} {error}; fix it"):
        content = source.read(manifest)
    faults = (ValueError, TypeError, KeyError, RecursionError)
    form = '{"labels": [["name", class], ...]}'
    by_name: dict[str, object] = {}
    with explained(faults, lambda error: f"{where} is not {form} ({error})"):
        for name, label in json.loads(content)["labels"] or []:
            by_name[prefix + with_slashes(str(name))] = label
    for name, label in by_name.items():
        for one in label if isinstance(label, list) else [label]:
            if not isinstance(one, int | str) or isinstance(one, bool):
                raise UserError(
                    f"{where}: the label of {name} is {label!r}; labels are names, or whole numbers"
                    " from 0, or lists"
                )
    if not by_name:
        return True
    if odd := sorted(set(by_name) ^ set(source.names)):
        problem = f"has no label for {odd[0]}"
        if odd[0] in by_name:
            problem = f"names {odd[0]}, which is not there"
        raise UserError(f"{where} {problem}: they must name the same images")
    texts = [labels.as_text(by_name[name]) for name in source.names]
    values, form = labels.split_labels(where, texts, options.label_separator)
    if form != labels.ONE:
        source.remarks.append(f"{where}: labels, {form}")
    source.take_labels(where, values, [f"{where}: {name}" for name in source.names])
    return True
