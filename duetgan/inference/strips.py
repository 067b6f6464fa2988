"""Strips: an image on its way from one class to another, with the classifier's probabilities under
each step. What `generate.py edit` and `predict.py --counterfactual` draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from duetgan.data.errors import ImageError
from duetgan.inference.editing import Direction, Editor
from duetgan.inference.inputs import Transform
from duetgan.inference.projection import find
from duetgan.inference.samples import Sampler, Start, with_styles
from duetgan.inference.settings import ProjectionConfig
from duetgan.metrics.features.precision import device_of
from duetgan.models.classifier import Classifier
from duetgan.models.restore import generator_from, read
from duetgan.utils.checkpoint import resolve_for_people
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.images import save_captioned
from duetgan.utils.runlog.progress import Bar

COLUMNS = 7  # images of a strip, without the one that is given
BEYOND = 1.25  # of the step at which an image arrives: where its strip ends


@dataclass(frozen=True)
class Strip:
    """One image on its way, in words and numbers."""

    # uint8 [C, H, H]; the first is as it was, or the given image that was projected
    images: list[Tensor]
    captions: list[str]
    arrived: bool  # whether the classifier's probability of the target rose to what is wanted
    step: float  # at which it did; else where it came nearest
    probability: float  # of the target there
    change: float  # mean absolute change of the pixels there, 0 to 1


def make_strips(
    editor: Editor,
    start: Start,
    direction: Direction,
    *,
    columns: int,
    judge: Classifier | None = None,
    # uint8 [1, C, H, H], the image that `start` was projected from; shown first
    given: Tensor | None = None,
) -> list[Strip]:
    """A strip for each image: `columns` equal steps from 0 to a quarter beyond where it arrives."""
    steps, arrived = editor.reach(start, direction)
    shares = [0.0, 1.0, *(BEYOND * column / (columns - 1) for column in range(1, columns))]
    before, there, *moved = (editor.images(start, direction, steps * share) for share in shares)
    shown = [*([] if given is None else [given.expand(len(start), -1, -1, -1)]), before, *moved]
    texts = [_captions(editor, images, direction, judge) for images in shown]
    if given is not None:
        texts[0] = [f"given\n{text.splitlines()[0]}" for text in texts[0]]
    probability = editor.probabilities(there)[:, direction.target]
    change = (there.double() - before.double()).abs().mean((1, 2, 3)) / 255
    return [
        Strip([images[row] for images in shown], [column[row] for column in texts], *numbers)
        for row, numbers in enumerate(
            zip(
                arrived.tolist(), steps.tolist(), probability.tolist(), change.tolist(), strict=True
            )
        )
    ]


def _captions(
    editor: Editor, images: Tensor, direction: Direction, judge: Classifier | None
) -> list[str]:
    """Two lines for each image: source and target with their probabilities, the judge's after a
    stroke.
    """
    answers = [
        editor.probabilities(images, each) for each in ([None] if judge is None else [None, judge])
    ]
    labels = (direction.source, direction.target)
    return [
        "\n".join(
            f"{editor.names[k]} " + " / ".join(f"{shares[row, k]:.2f}" for shares in answers)
            for k in labels
        )
        for row in range(len(images))
    ]


def save_strips(strips: Sequence[Strip], path: Path) -> None:
    """Write strips below one another to a PNG file."""
    images = [image for strip in strips for image in strip.images]
    save_captioned(
        images,
        [text for strip in strips for text in strip.captions],
        path,
        columns=len(strips[0].images),
    )


def summary(strips: Sequence[Strip], names: Sequence[str], direction: Direction) -> str:
    arrived = [strip for strip in strips if strip.arrived]
    text = f"{names[direction.source]} to {names[direction.target]}: {len(arrived)} of {len(strips)} images arrive"
    if not arrived:
        return text
    step, change = (
        sum(values) / len(arrived)
        for values in zip(*((s.step, s.change) for s in arrived), strict=True)
    )
    return (
        f"{text}, at a mean step of {step:.2f} and a mean change of pixels of {change:.3f} (0 to 1)"
    )


def counterfactual(
    editor: Editor,
    image: Tensor,  # uint8 [1, C, H, H] as the generator's training images
    source: int,
    target: int,
    *,
    steps: int,  # of each of the projection's two searches
    columns: int = COLUMNS,
    judge: Classifier | None = None,
) -> tuple[Strip, Direction]:
    """The strip of a given image from class `source` to `target`: it is projected first, into w+
    that begins at the best w, from the mean of class `source`. Raises UserError for a generator
    without w.
    """
    with_styles(editor.generator, "editing a given image")
    sampler = replace(editor.sampler, chosen=[source] if editor.generator.classes else [])
    with Bar(total=2 * steps, desc="projecting", unit="step") as bar:
        nearest = find(sampler, image, ProjectionConfig(steps=steps), tick=bar.update).spaces["w+"]
    start, direction = (
        Start(nearest.ws[None], None, nearest.noise),
        editor.direction(source, target),
    )
    return make_strips(editor, start, direction, columns=columns, judge=judge, given=image)[
        0
    ], direction


class Counterfactuals:
    """What would have to change for given images to be of another class; they are read one by one."""

    def __init__(
        self,
        generator: str,  # folder or file of a GAN
        classifier: Classifier,
        names: Sequence[str],  # of its classes
        files: Mapping[str, Path],  # where each image's strip goes
        *,
        target: int | None,  # the class asked for; None: the most probable one but the first
        steps: int,  # of each of the projection's two searches
        batch_size: int,
    ) -> None:
        """Raises UserError where generator and classifier do not fit each other."""
        self.files, self.target, self.steps = files, target, steps
        self.checkpoint = read(resolve_for_people(generator))
        model = with_styles(
            generator_from(self.checkpoint, device_of(classifier)), "--counterfactual"
        )
        if model.classes:
            require_same_classes(
                f"the generator {generator}", self.checkpoint["classes"], "the classifier", names
            )
        sampler = Sampler(
            generator=model, chosen=range(model.classes), noise_mode="const", batch_size=batch_size
        )
        self.editor = Editor(sampler, classifier, names)

    def draw(self, file: str, label: str, *, resize: str | None) -> dict[str, Any]:
        """Write the strip of an image that is named `label`; returns `class`, `image`, `arrived`,
        `probability`, `step` and `pixel_change`, or `class` and `error`.
        """
        names = self.editor.names
        source, target = names.index(label), self.target
        try:
            image = Transform.of(self.checkpoint, resize).read(file)[None]
            if target is None:
                shares = self.editor.probabilities(image)[0]
                shares[source] = -1
                target = int(shares.argmax())
            if source == target:
                raise UserError(f"is named {label} as it is")
            strip, _ = counterfactual(self.editor, image, source, target, steps=self.steps)
        except (ImageError, UserError) as error:
            return {"class": None if target is None else names[target], "error": str(error)}
        save_strips([strip], self.files[file])
        numbers = {"arrived": strip.arrived, "probability": strip.probability, "step": strip.step}
        return {
            "class": names[target],
            "image": str(self.files[file]),
            **numbers,
            "pixel_change": strip.change,
        }
