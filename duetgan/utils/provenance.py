"""What generated images say of where they come from, and what a checkpoint says of all that its
weights have seen.

A packed file of samples has its provenance (key `passport`); one without holds real images.
Lineages are frozen and joined, never changed; those of the checkpoint that weights started from are
part of theirs.
"""

from collections.abc import Collection, Mapping
from typing import Any, Self

from duetgan.utils.config.model import Count, Stored, Whole

Provenance = dict[str, Any]
"""A `Generated` as a packed file holds it."""


class Generated(Stored):
    generator: str  # fingerprint of its weights (metrics.features.extractors.fingerprint)
    step: Count  # of its checkpoint
    seed: Whole  # of the draws
    truncation_psi: float
    selection: str | None  # the rule by which samples were chosen; None: all that were drawn
    trained_on: str | None  # content hash of the images it was trained on; None: not known
    classes: list[str]  # names of their classes


class Lineage(Stored):
    """Which images and which networks weights have learnt from, themselves or those that they
    started from.
    """

    # content hashes, and fingerprints where there are any, of files of images
    trained_on: list[str]
    synthetic: list[Generated]  # those of them that hold samples
    # fingerprints of classifiers whose answers were in the loss, or that they began as
    teachers: list[str] = []
    # hashes of others' weights files that they, or their teachers, began with
    pretrained: list[str] = []

    @classmethod
    def of(cls, **parts: Any) -> Self:
        """A lineage of the given parts alone."""
        return cls(**{"trained_on": [], "synthetic": [], **parts})

    def document(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return self.model_dump(exclude_defaults=True)

    def may_not_judge(self, generator: "Lineage", weights: str, images: Collection[str]) -> str:
        """Why a network of this lineage and fingerprint `weights` cannot judge beside these images;
        empty if it can.
        """
        if weights in generator.teachers:
            return "supplied a loss to this generator, so it cannot judge it; give another"
        if not set(self.teachers).isdisjoint(generator.teachers):
            return "learnt from a classifier, or began as one, that supplied a loss to this generator; give another"
        if self.synthetic:
            whose = ", ".join(dict.fromkeys(each.generator for each in self.synthetic))[:200]
            return (
                f"was trained on samples (of {whose}), so it would recognise them too well; give one that has seen "
                "real images only"
            )
        return "" if set(self.trained_on).isdisjoint(images) else "was trained on the test images"

    def related(self, other: "Lineage") -> bool:
        """Whether both began with the same weights file: what one finds alike the other may."""
        return not set(self.pretrained).isdisjoint(other.pretrained)


def join(*lineages: Lineage) -> Lineage:
    """Everything that several lineages hold, each part once, in order."""
    joined: dict[str, list[Any]] = {key: [] for key in Lineage.model_fields}
    for lineage in lineages:
        for key, parts in joined.items():
            parts += [part for part in getattr(lineage, key) if part not in parts]
    return Lineage(**joined)


def recorded(checkpoint: Mapping[str, Any]) -> Lineage:
    """A checkpoint's lineage; those of before had none and say only which file they were trained
    on.
    """
    content = (checkpoint.get("data") or {}).get("content_hash")
    own = Lineage.of(
        trained_on=[content] if content else [], teachers=list(checkpoint.get("teachers", []))
    )
    return join(own, Lineage.read(checkpoint["lineage"])) if checkpoint.get("lineage") else own
