"""StyleGAN's `dataset.json`, the labels of a folder or an archive: `{"labels": [["name", class],
...]}`.
"""

import json
from typing import TYPE_CHECKING, Any

from duetgan.data.errors import ImageError
from duetgan.data.sources import labels
from duetgan.data.sources.base import SourceOptions, refuse_split, with_slashes
from duetgan.utils.errors import UserError, explained

if TYPE_CHECKING:
    from duetgan.data.sources.files import ListedSource

MANIFEST = "dataset.json"


def take_labels(source: "ListedSource", ignored: list[str], options: SourceOptions) -> bool:
    """Give the source the labels of its `dataset.json`, numbers or names of classes, or lists of
    them; return False if there is none.

    Raises UserError if it is no such document, lies below the top beside images, names an image
    that is not there, leaves one out, and as `Source.take_labels`.
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
    if outside := [name for name in [*manifests, *source.names] if not name.startswith(prefix)]:
        raise UserError(
            f"{where} has no labels for {outside[0]}: give {prefix[:-1]} alone, or pass --classes-from top (folders "
            "are classes) or none"
        )
    with explained(ImageError, lambda why: f"{where} {why}; fix it"):
        content = source.read(manifest)
    faults, form = (
        (ValueError, TypeError, KeyError, RecursionError),
        '{"labels": [["name", class], ...]}',
    )
    with explained(faults, lambda why: f"{where} is not {form} ({why})"):
        pairs = [
            (prefix + with_slashes(str(name)), label)
            for name, label in json.loads(content)["labels"] or []
        ]
    known: dict[str, Any] = {}
    for name, label in pairs:
        if known.setdefault(name, label) != label:
            raise UserError(
                f"{where} gives {name} the labels {known[name]} and {label}: remove one"
            )
        for one in label if isinstance(label, list) else [label]:
            if not isinstance(one, int | str) or isinstance(one, bool):
                raise UserError(
                    f"{where}: the label of {name} is {label!r}; labels are names, or whole numbers from 0, or lists"
                )
    if not known:
        return True
    if odd := sorted(set(known) ^ set(source.names)):
        what = "names {}, which is not there" if odd[0] in known else "has no label for {}"
        raise UserError(f"{where} {what.format(odd[0])}: they must name the same images")
    texts = [labels.as_text(known[name]) for name in source.names]
    given, how = labels.split_labels(where, texts, options.label_separator)
    source.remarks += [f"{where}: labels, {how}"] if how != labels.ONE else []
    source.take_labels(where, given, [f"{where}: {name}" for name in source.names])
    return True
