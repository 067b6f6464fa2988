"""Records of the origin of samples (`Generated`) and of what weights learnt from (`Lineage`).

A packed file of samples holds a `Generated` under the key `passport`; a file without this key holds
real images. A `Lineage` names the data and the networks that a checkpoint's weights learnt from,
and includes the lineage of the checkpoint from which they started. It never changes; `join` makes a
new one.
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
    """The images that a run was trained on from a certain step on.

    A run has several such entries if its images were replaced (`train.py --new-data`).
    """

    step: Count  # number of updates before the first one on these images
    content_hash: str
    count: Count  # images
    path: str = ""  # empty in exported files


class Lineage(Stored):
    """The images and networks from which a network's weights have learnt.

    These include the images and networks from which its initial weights had learnt.
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
        """Return a lineage whose fields have the given values; the other fields are empty."""
        return cls.model_validate(
            {
                "trained_on": list(trained_on),
                "synthetic": list(synthetic),
                "teachers": list(teachers),
                "pretrained": list(pretrained),
            }
        )

    def document(self) -> Provenance:
        """Return the lineage as a dict for a checkpoint, without fields that have their default."""
        return self.model_dump(exclude_defaults=True)

    def may_not_judge(self, generator: "Lineage", weights: str, images: Collection[str]) -> str:
        """Return the reason why a classifier must not evaluate a generator's samples, or "".

        This object is the lineage of the classifier.

        Args:
            generator: the lineage of the generator.
            weights: the fingerprint of the classifier's weights.
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
        """Return True if this lineage and another one share pretrained weights.

        Evaluations by the two networks are then correlated.
        """
        return not set(self.pretrained).isdisjoint(lineage.pretrained)


def join(*lineages: Lineage) -> Lineage:
    """Return a lineage with all entries of several lineages, in order and without repetitions."""
    joined: dict[str, list[Any]] = {key: [] for key in Lineage.model_fields}
    for lineage in lineages:
        for key, parts in joined.items():
            parts += [part for part in getattr(lineage, key) if part not in parts]
    return Lineage(**joined)


def data_history(checkpoint: Mapping[str, Any]) -> list[TrainedOn]:
    """Return the images that a run was trained on: one entry, or several if they were replaced.

    The entries are in order of training. Older checkpoints name only the last images.
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
    """Return a line of text that lists a run's images in order; "" if they were never replaced."""
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

    It always includes the hash of the checkpoint's data and its `teachers`. Older checkpoints
    record nothing else.
    """
    content = (checkpoint.get("data") or {}).get("content_hash")
    lineage = Lineage.of(
        trained_on=[content] if content else [], teachers=list(checkpoint.get("teachers", []))
    )
    if checkpoint.get("lineage"):
        return join(lineage, Lineage.read(checkpoint["lineage"]))
    return lineage
