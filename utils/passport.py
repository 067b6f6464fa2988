"""What generated images say of where they come from, and what a checkpoint says of all that it was trained on.

A packed file of samples has a passport; a file without one holds real images. A checkpoint's lineage is the passports
and the hashes of all files that its weights have seen, those of the checkpoint it started from included.
"""

from collections.abc import Mapping
from typing import Any

from utils.schema import items, maybe, number, record, text, whole

Passport = dict[str, Any]
Lineage = dict[str, Any]

check_passport = record(
    {
        "generator": text,  # fingerprint of its weights (metrics.features.extractors.fingerprint)
        "step": whole(),  # of its checkpoint
        "seed": whole(-(2**63)),  # of the draws
        "truncation_psi": number(),
        "selection": maybe(text),  # the rule by which samples were chosen; null: all that were drawn
        "trained_on": maybe(text),  # content hash of the images it was trained on; null: not known
        "classes": items(text),  # names of their classes
    }
)
check_lineage = record(
    {
        "trained_on": items(text),  # content hashes, and fingerprints where there are any, of the files
        "synthetic": items(check_passport),  # the passports of those that hold samples
    }
)


def nothing() -> Lineage:
    """The lineage of weights that were never trained."""
    return {"trained_on": [], "synthetic": []}


def join(*lineages: Lineage) -> Lineage:
    """Everything that several lineages hold, each part once, in order."""
    joined = nothing()
    for lineage in lineages:
        for key, parts in joined.items():
            parts += [part for part in lineage[key] if part not in parts]
    return joined


def recorded(checkpoint: Mapping[str, Any]) -> Lineage:
    """A checkpoint's lineage; those of before had none and say only which file they were trained on."""
    content = (checkpoint.get("data") or {}).get("content_hash")
    own = {"trained_on": [content] if content else [], "synthetic": []}
    return join(own, checkpoint.get("lineage") or nothing())
