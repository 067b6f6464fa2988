"""Strips: an image on its way from one class to another, with the classifier's probabilities under each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from inference.edit.editor import Direction, Editor
from inference.edit.spaces import Start
from inference.perceptual import Distance, at_hand, build_features
from inference.projection import Projector
from inference.samples import Sampler, with_styles
from inference.settings import ProjectionConfig
from metrics.precision import full_float32
from models.classifier import Classifier
from utils.images import save_captioned
from utils.runlog.progress import Bar

BEYOND = 1.25  # of the step at which an image arrives: where its strip ends


@dataclass(frozen=True)
class Strip:
    """One image on its way, in words and numbers."""

    images: list[Tensor]  # uint8 [C, H, H]; the first is as it was, or the given image that was projected
    captions: list[str]
    arrived: bool  # whether the classifier's probability of the target rose to what is wanted
    step: float  # at which it did; else where it came nearest
    probability: float  # of the target there
    change: float  # mean absolute change of the pixels there, 0 to 1


def strips(
    editor: Editor,
    start: Start,
    direction: Direction,
    *,
    columns: int,
    judge: Classifier | None = None,
    given: Tensor | None = None,  # uint8 [1, C, H, H], the image that `start` was projected from; shown first
) -> list[Strip]:
    """A strip for each image: `columns` equal steps from 0 to a quarter beyond where it arrives."""
    steps, arrived = editor.reach(start, direction)
    rows: Any = []
    for share in [0.0, 1.0, *[BEYOND * column / (columns - 1) for column in range(1, columns)]]:
        rows.append(editor.images(start, direction, steps * share))
    before, there, *moved = rows
    shown = [*([] if given is None else [given.expand(len(start), -1, -1, -1)]), before, *moved]
    texts = [_captions(editor, images, direction, judge) for images in shown]
    if given is not None:
        texts[0] = [f"given\n{text.splitlines()[0]}" for text in texts[0]]
    there_shares = editor.probabilities(there)[:, direction.target].tolist()
    change = (there.double() - before.double()).abs().mean((1, 2, 3)) / 255
    return [
        Strip(
            images=[images[row] for images in shown],
            captions=[column[row] for column in texts],
            arrived=bool(arrived[row]),
            step=float(steps[row]),
            probability=there_shares[row],
            change=float(change[row]),
        )
        for row in range(len(start))
    ]


def save_strips(found: Sequence[Strip], path: Path) -> None:
    """Write strips below one another to a PNG file."""
    images = [image for strip in found for image in strip.images]
    captions = [text for strip in found for text in strip.captions]
    save_captioned(images, captions, path, columns=len(found[0].images))


def told(found: Sequence[Strip], names: Sequence[str], direction: Direction) -> list[str]:
    """What strips show, in lines."""
    source, target = names[direction.source], names[direction.target]
    arrived = [strip for strip in found if strip.arrived]
    lines = [f"{source} to {target}: {len(arrived)} of {len(found)} images arrive"]
    if arrived:
        change = sum(strip.change for strip in arrived) / len(arrived)
        step = sum(strip.step for strip in arrived) / len(arrived)
        lines[0] += f", at a mean step of {step:.2f} and a mean change of pixels of {change:.3f} (0 to 1)"
    return lines


def projected(sampler: Sampler, target: Tensor, label: int, config: ProjectionConfig) -> Start:
    """Where an image uint8 [1, C, H, H] lies, as a start: w+ that begins at the best w, from the mean of class `label`.

    Features as `generate.py project` takes them unasked. Raises UserError for a generator without w.
    """
    generator = with_styles(sampler.generator, "editing a given image")
    network = build_features(at_hand(None), None, sampler.device)
    wanted = target.to(sampler.device, generator.w_avg.dtype) / 127.5 - 1
    with full_float32(sampler.device):
        distance = Distance(wanted, features=network, pixel_weight=config.pixel_weight)
    projector = Projector(generator, distance, config, seed=sampler.seed)
    with Bar(total=2 * config.steps, desc="projecting", unit="step") as bar:
        found = projector.search("w", projector.start([label] if generator.classes else []), tick=bar.update)
        found = projector.search("w+", found, refine=True, tick=bar.update)
    return Start(found.ws[None], None, found.noise)


def _captions(editor: Editor, images: Tensor, direction: Direction, judge: Classifier | None) -> list[str]:
    """Two lines for each image: source and target with their probabilities, the judge's after a stroke."""
    answers = [editor.probabilities(images)]
    answers += [] if judge is None else [editor.probabilities(images, judge)]
    labels = (direction.source, direction.target)
    return [
        "\n".join(f"{editor.names[k]} " + " / ".join(f"{shares[row, k]:.2f}" for shares in answers) for k in labels)
        for row in range(len(images))
    ]


def counterfactual(
    editor: Editor,
    image: Tensor,  # uint8 [1, C, H, H] as the generator's training images
    source: int,
    target: int,
    config: ProjectionConfig,
    *,
    columns: int,
    judge: Classifier | None = None,
) -> tuple[Strip, Direction]:
    """The strip of a given image: it is projected and moved from class `source` to `target`."""
    start = projected(editor.sampler, image, source, config)
    direction = editor.direction(source, target)
    return strips(editor, start, direction, columns=columns, judge=judge, given=image)[0], direction
