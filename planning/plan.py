"""What the quickstart knows of the images and what it has decided: plain data, quick to import."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of a source of images."""

    source: str  # as the user named it
    count: int  # images for training, the held-out ones included where they are not apart
    held_out: int  # images of the source's own held-out part; 0: it has none
    classes: int  # 0: unlabelled
    smallest_class: int  # images
    largest_class: int
    side: int  # px: median of the shorter sides of the images looked at
    channels: int  # 1: all of those are grey
    transparent: bool  # whether some have an alpha channel
    unreadable: str  # the first that cannot be read, or empty
    seconds: float  # reading and decoding one image

    def text(self) -> str:
        """For a person, in one line."""
        kind = f"{self.classes} classes of {self.smallest_class:,} to {self.largest_class:,}"
        if self.classes < 2:
            kind = "one class" if self.classes else "no labels"
        apart = f", and {self.held_out:,} held out" if self.held_out else ""
        alpha = ", some transparent (put on white)" if self.transparent else ""
        return (
            f"{self.count:,} images{apart}, {kind}, about {self.side} px, "
            f"{'grey' if self.channels == 1 else 'colour'}{alpha}"
        )


class Speed(NamedTuple):
    """How fast a recipe trains here."""

    precision: str
    images_per_second: float
    ratio: float | None  # over the slower precision; None: not compared


@dataclass
class Training:
    """A training of the plan."""

    config: str
    overrides: list[str]
    steps: int
    batch_size: int
    resolution: int  # px
    precision: str
    images_per_second: float  # measured
    seconds: float  # expected
    why: str
    most: int | None = None  # steps after which more no longer shows


@dataclass
class Plan:
    """What the quickstart does; kept in plan.json, so that a resume does the same."""

    survey: Survey
    minutes: float
    quick: bool
    size: int  # px the images are packed with
    smallest: int  # px: also packed with, for the GAN
    val_share: float | None  # None: the source has a held-out part
    training_images: int
    held_out: int
    classifier: Training | None
    gan: Training
    evaluation: list[str]  # options of the GAN's
    seconds: dict[str, float] = field(default_factory=dict)  # expected, by step
    notes: list[str] = field(default_factory=list)  # what was chosen and why
    replanned: dict[str, float] | None = None  # the first plan's `gan_steps` and `seconds`, if changed

    @property
    def total(self) -> float:
        """Expected seconds of all steps."""
        return sum(self.seconds.values())

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def from_tree(tree: dict[str, Any]) -> Plan:
    """The plan of `Plan.tree`. Raises TypeError, KeyError for what is none."""
    parts = {"survey": Survey(**tree["survey"]), "gan": Training(**tree["gan"])}
    classifier = tree["classifier"] and Training(**tree["classifier"])
    return Plan(**{**tree, **parts, "classifier": classifier})
