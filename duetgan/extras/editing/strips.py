"""Strips: rows of pictures in which an image moves step by step from one class to another.

The classifier's probabilities are below each picture. `generate.py edit` and `predict.py
--counterfactual` draw strips. An image "arrives" at the first step at which the probability of the
target class reaches `editor.REACH`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from duetgan.data.errors import ImageError
from duetgan.extras.editing.editor import Direction, Editor
from duetgan.inference.inputs import Transform
from duetgan.inference.projection import find
from duetgan.inference.samples import Sampler, Start, with_styles
from duetgan.inference.settings import ProjectionConfig
from duetgan.metrics.features.precision import device_of
from duetgan.models.classifier import Classifier
from duetgan.models.restore import generator_from, read
from duetgan.utils.checkpoint import resolve
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.images import save_captioned
from duetgan.utils.runlog.progress import Bar

COLUMNS = 7  # images of a strip, not counting the original of a projected image
END = 1.25  # last step of a strip, relative to the step at which its image arrives


@dataclass(frozen=True)
class Strip:
    """The edit of one image as a row of pictures."""

    # uint8 [C, H, H]: the original if it was projected, the unedited image, the steps
    images: list[Tensor]
    captions: list[str]
    arrived: bool  # True if the target's probability reached `editor.REACH`
    step: float  # the step at which the image arrived, else the step of the largest probability
    probability: float  # probability of the target at this step
    change: float  # mean absolute change of the pixels at this step, 0 to 1


def make_strips(
    editor: Editor,
    start: Start,
    direction: Direction,
    *,
    # uint8 [1, C, H, H], first image of the strip, from which `start` was projected
    original: Tensor | None = None,
) -> list[Strip]:
    """Return a strip for each image of `start`: `original`, if given, then COLUMNS images.

    The steps of these images grow evenly from 0 to END times the step that `Editor.reach` returns.
    """
    steps, arrived = editor.reach(start, direction)
    unedited = editor.images(start, direction, 0.0 * steps)
    edited = editor.images(start, direction, steps)
    columns_of_images = [unedited]
    for column in range(1, COLUMNS):
        fraction = END * column / (COLUMNS - 1)
        columns_of_images.append(editor.images(start, direction, steps * fraction))
    if original is not None:
        columns_of_images.insert(0, original.expand(len(start), -1, -1, -1))
    texts = [_captions(editor, images, direction) for images in columns_of_images]
    if original is not None:
        texts[0] = [f"original\n{text.splitlines()[0]}" for text in texts[0]]
    probability = editor.probabilities(edited)[:, direction.target]
    change = (edited.double() - unedited.double()).abs().mean((1, 2, 3)) / 255
    strips = []
    for row in range(len(start)):
        strips.append(
            Strip(
                images=[images[row] for images in columns_of_images],
                captions=[column[row] for column in texts],
                arrived=bool(arrived[row]),
                step=float(steps[row]),
                probability=float(probability[row]),
                change=float(change[row]),
            )
        )
    return strips


def _captions(editor: Editor, images: Tensor, direction: Direction) -> list[str]:
    """Return a caption of two lines for each image.

    The lines are the source and the target class, each with its probability.
    """
    captions = []
    for probabilities in editor.probabilities(images).tolist():
        labels = (direction.source, direction.target)
        lines = [f"{editor.names[label]} {probabilities[label]:.2f}" for label in labels]
        captions.append("\n".join(lines))
    return captions


def save_strips(strips: Sequence[Strip], path: Path) -> None:
    """Write strips below one another to a PNG file."""
    images: list[Tensor] = []
    captions: list[str] = []
    for strip in strips:
        images += strip.images
        captions += strip.captions
    save_captioned(images, captions, path, columns=len(strips[0].images))


def summary(strips: Sequence[Strip], names: Sequence[str], direction: Direction) -> str:
    """Return a sentence with the number of images that arrive, their mean step and mean change."""
    arrived = [strip for strip in strips if strip.arrived]
    edit = f"{names[direction.source]} to {names[direction.target]}"
    text = f"{edit}: {len(arrived)} of {len(strips)} images arrive"
    if not arrived:
        return text
    step = sum(strip.step for strip in arrived) / len(arrived)
    change = sum(strip.change for strip in arrived) / len(arrived)
    return (
        f"{text}, at a mean step of {step:.2f} and a mean change of pixels of {change:.3f} (0 to 1)"
    )


def counterfactual(
    editor: Editor,
    image: Tensor,  # uint8 [1, C, H, H], prepared as the generator's training images
    source: int,
    target: int,
    *,
    steps: int,  # steps of the projection in each space
) -> Strip:
    """Return the strip that moves an image from class `source` to class `target`.

    The image is first projected into the latent space: to w, starting at the mean of class
    `source`, and then to w+ (a w for each layer), starting at the result in w.
    """
    sampler = replace(editor.sampler, chosen=[source] if editor.generator.classes else [])
    with Bar(total=2 * steps, desc="projecting", unit="step") as bar:
        nearest = find(sampler, image, ProjectionConfig(steps=steps), tick=bar.update).spaces["w+"]
    start = Start(nearest.ws[None], None, nearest.noise)
    direction = editor.direction(source, target)
    (strip,) = make_strips(editor, start, direction, original=image)
    return strip


class Counterfactuals:
    """A writer of strips that show how images would change if they belonged to another class."""

    def __init__(
        self,
        generator: str,  # run folder or checkpoint of a GAN
        classifier: Classifier,
        names: Sequence[str],  # names of the classifier's classes
        files: Mapping[str, Path],  # image -> file of its strip
        *,
        target: int | None,  # the target class; None: each image's second most probable one
        steps: int,  # steps of the projection in each space
        batch_size: int,
    ) -> None:
        """Load the generator.

        Raises UserError if the generator has no w, or if its classes are not those of the
        classifier.
        """
        self.files = files
        self.target = target
        self.steps = steps
        self.checkpoint = read(resolve(generator))
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
        """Write the strip of the image file `file`, which is predicted as `label`.

        `resize`, "crop" or "pad", is the resize mode of the image; None: that of the training
        images. Returns a dict with `class` (the target class), `image` (the file of the strip),
        `arrived`, `probability`, `step` and `pixel_change` (see `Strip`). If the strip cannot be
        drawn, the dict has only `class` and `error`.
        """
        names = self.editor.names
        source, target = names.index(label), self.target
        try:
            image = Transform.of(self.checkpoint, resize).read(file)[None]
            if target is None:
                probabilities = self.editor.probabilities(image)[0]
                probabilities[source] = -1
                target = int(probabilities.argmax())
            if source == target:
                raise UserError(f"is already predicted as {label}")
            strip = counterfactual(self.editor, image, source, target, steps=self.steps)
        except (ImageError, UserError) as error:
            return {"class": None if target is None else names[target], "error": str(error)}
        save_strips([strip], self.files[file])
        return {
            "class": names[target],
            "image": str(self.files[file]),
            "arrived": strip.arrived,
            "probability": strip.probability,
            "step": strip.step,
            "pixel_change": strip.change,
        }
