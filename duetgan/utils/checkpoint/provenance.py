"""The origin of generated images, and the data and networks that a checkpoint's weights learnt
from.

A packed file of samples has its provenance under the key `passport`; a file without it holds real
images. Lineages are frozen: they are joined, never changed. A checkpoint's lineage includes that of
the checkpoint from which its weights started.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from duetgan.utils.config.model import Count, Stored, Whole

Provenance = dict[str, Any]
"""The document of a `Generated` in a packed file."""


class Generated(Stored):
    """The generator and the settings that made a file of samples."""

    generator: str  # fingerprint of its weights (models.restore.fingerprint)
    step: Count  # step of its checkpoint
    seed: Whole  # seed of the samples
    truncation_psi: float
    selection: str | None  # the rule by which samples were selected; None: all samples
    trained_on: str | None  # content hash of its training images; None: unknown
    classes: list[str]  # class names


class TrainedOn(Stored):
    """The images that a run was trained on from a step on (`train.py --new-data`)."""

    step: Count  # number of updates before the first one on these images
    content_hash: str
    count: Count  # images
    path: str = ""  # empty in exported files


class Lineage(Stored):
    """The images and networks from which weights have learnt, or from which their initial weights
    had learnt.
    """

    # content hashes of image files, and their fingerprints if present
    trained_on: list[str]
    synthetic: list[Generated]  # the files of `trained_on` that hold samples
    # fingerprints of classifiers that were part of the loss, or the initial weights
    teachers: list[str] = []
    # hashes of pretrained weights files from which the network or its teachers started
    pretrained: list[str] = []

    @classmethod
    def of(
        cls,
        *,
        trained_on: Sequence[str] = (),
        synthetic: Sequence[Generated | Provenance] = (),
        teachers: Sequence[str] = (),
        pretrained: Sequence[str] = (),
    ) -> Self:
        """Return a lineage of the given parts alone."""
        return cls.model_validate(
            {
                "trained_on": list(trained_on),
                "synthetic": list(synthetic),
                "teachers": list(teachers),
                "pretrained": list(pretrained),
            }
        )

    def document(self) -> Provenance:
        """Return the lineage for a checkpoint, without fields that have their default."""
        return self.model_dump(exclude_defaults=True)

    def may_not_judge(self, generator: "Lineage", weights: str, images: Collection[str]) -> str:
        """Return the reason why the network of this lineage must not judge a generator; else "".

        Args:
            generator: the lineage of the generator.
            weights: the fingerprint of the judging network's weights.
            images: content hashes and fingerprints of the test images.
        """
        if weights in generator.teachers:
            return "supplied a loss to this generator, so it cannot judge it; give another"
        if not set(self.teachers).isdisjoint(generator.teachers):
            return "learnt from a classifier, or began as one, that supplied a loss to this generator; give another"
        if self.synthetic:
            generators = ", ".join(dict.fromkeys(item.generator for item in self.synthetic))
            return (
                f"was trained on samples (of {generators[:200]}), so it would recognise them too "
                "well; give one that has seen real images only"
            )
        return "" if set(self.trained_on).isdisjoint(images) else "was trained on the test images"

    def related(self, lineage: "Lineage") -> bool:
        """Return True if both lineages share pretrained weights, so that the judgements of their
        networks correlate.
        """
        return not set(self.pretrained).isdisjoint(lineage.pretrained)


def join(*lineages: Lineage) -> Lineage:
    """Return the union of several lineages, in order and without repetitions."""
    joined: dict[str, list[Any]] = {key: [] for key in Lineage.model_fields}
    for lineage in lineages:
        for key, parts in joined.items():
            parts += [part for part in getattr(lineage, key) if part not in parts]
    return Lineage(**joined)


def data_history(checkpoint: Mapping[str, Any]) -> list[TrainedOn]:
    """Return the images that a run was trained on, in order; at least one entry.

    Older checkpoints only name the last images.
    """
    data = checkpoint.get("data") or {}
    path = (checkpoint["config"].get("data") or {}).get("path")
    last = {
        "step": 0,
        "content_hash": data.get("content_hash") or "",
        "count": data.get("count") or 0,
        "path": str(path or ""),
    }
    return [TrainedOn.read(entry) for entry in data.get("history") or [last]]


def describe_history(checkpoint: Mapping[str, Any]) -> str:
    """Return a line about the images of a run that changed them; empty for other runs."""
    history = data_history(checkpoint)
    if len(history) == 1:
        return ""
    texts = []
    for images in history:
        name = images.path or images.content_hash[:12]
        texts.append(f"{images.count:,} of {name} from step {images.step:,}")
    return f"training images: {', '.join(texts)}"


def recorded(checkpoint: Mapping[str, Any]) -> Lineage:
    """Return a checkpoint's lineage.

    Older checkpoints have none; theirs is made of the hash of their data and their `teachers`.
    """
    content = (checkpoint.get("data") or {}).get("content_hash")
    lineage = Lineage.of(
        trained_on=[content] if content else [], teachers=list(checkpoint.get("teachers", []))
    )
    if checkpoint.get("lineage"):
        return join(lineage, Lineage.read(checkpoint["lineage"]))
    return lineage
