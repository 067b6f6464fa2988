"""What edits achieve: how often a judge that took no part sees the class that was asked for, and what else changes.

`python benchmarks/edit.py --checkpoint GAN --classifier RUN --judge RUN --pairs A:B,C:D [--n 200] [--seed N] [--json]`.
For each pair of classes the edits start from the first `--n` samples of class A that both classifiers name A. Each
sample goes as far as the guide needs to name it B. A random direction goes equally far, and another one as far as
changes the pixels equally. `class asked` draws the same latents and noise as class B: what the generator's own input
does. Directions are found on other samples.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from duetgan.extras.editing.editor import PATIENCE, Direction, Editor, first_reached, pair_of
from duetgan.inference.samples import Sampler, Start, truncated_styles
from duetgan.metrics.lineage import load_judge
from duetgan.models.classifier import Classifier
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.cli import Parser, add_model_options, positive
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import generator as keyed_generator

GROWTH = 1.2  # of a random direction's step, until the pixels have changed as much
LONGEST = 22  # such steps: at most 9 times as far as the edit's mean
Row = dict[str, Any]


def agreed(editor: Editor, judge: Classifier, label: int, count: int) -> tuple[Start, list[int]]:
    """The first samples that guide and judge name `label`, and their numbers. UserError for too few."""
    sampler = replace(editor.sampler, chosen=[label] if editor.sampler.chosen else [])
    parts: list[Start] = []
    numbers: list[int] = []
    first = 0
    while len(numbers) < count and first < PATIENCE * count:
        drawn = truncated_styles(sampler, range(first, first + sampler.batch_size))
        images = editor.images(drawn)
        named = [editor.probabilities(images, each).argmax(1) == label for each in (None, judge)]
        rows = (named[0] & named[1]).nonzero()[: count - len(numbers), 0]
        parts += [drawn.take(rows.to(editor.device))] if len(rows) else []
        numbers += [first + row for row in rows.tolist()]
        first += sampler.batch_size
    if len(numbers) < count:
        raise UserError(f"only {len(numbers)} samples are named {editor.names[label]} by both; lower --n")
    return Start.join(parts), numbers


def change(after: Tensor, before: Tensor) -> Tensor:
    """The mean absolute change of the pixels, 0 to 1, float64 [n]."""
    return (after.double() - before.double()).abs().mean((1, 2, 3)) / 255


def random_direction(editor: Editor, direction: Direction, seed: int = 0) -> Direction:
    """One as long as `direction` that knows nothing of classes."""
    vector = torch.randn(editor.size, generator=keyed_generator(editor.sampler.seed, "edit", "random", seed))
    return replace(direction, vector=vector * (direction.vector.norm() / vector.norm()))


def row_of(editor: Editor, judge: Classifier, before: Tensor, after: Tensor, source: int, target: int) -> Row:
    """What guide and judge say of edited images, as shares, and the mean change of pixels."""
    named = editor.probabilities(after, judge).argmax(1)
    return {
        "asked": float((named == target).double().mean()),
        "third": float(((named != target) & (named != source)).double().mean()),
        "guide": float((editor.probabilities(after).argmax(1) == target).double().mean()),
        "pixel_change": float(change(after, before).mean()),
    }


def as_visible(editor: Editor, start: Start, direction: Direction, wanted: Tensor, first: float) -> Tensor:
    """Steps float64 [n] at which a direction has changed each image's pixels by `wanted` [n] (or no more comes)."""
    before = editor.images(start)

    def changed(rows: Tensor, step: float) -> Tensor:
        return change(editor.images(start.take(rows.to(editor.device)), direction, step), before[rows])

    return first_reached(changed, wanted, [first * GROWTH**number for number in range(LONGEST)])[0]


def measure(editor: Editor, judge: Classifier, source: int, target: int, count: int) -> dict[str, Row]:
    """A pair of classes: the edit, both random directions, and the class asked for."""
    start, numbers = agreed(editor, judge, source, count)
    before = editor.images(start)
    direction = editor.direction(source, target)
    steps, arrived = editor.reach(start, direction)
    after = editor.images(start, direction, steps)
    random = random_direction(editor, direction)
    equal = as_visible(editor, start, random, change(after, before), float(steps.mean()) / 5)
    images = {
        "edit": after,
        "random, equal length": editor.images(start, random, steps),
        "random, equal change": editor.images(start, random, equal),
    }
    if editor.sampler.chosen:
        swapped = replace(editor.sampler, chosen=[target])
        images["class asked"] = redrawn(editor, swapped, source, numbers)
    rows = {name: row_of(editor, judge, before, drawn, source, target) for name, drawn in images.items()}
    rows["edit"] |= {"arrived": float(arrived.double().mean()), "step": float(steps.mean())}
    return rows


def redrawn(editor: Editor, sampler: Sampler, source: int, numbers: Sequence[int]) -> Tensor:
    """The samples `numbers` of class `source`, uint8, drawn as the sampler's one class: equal z and noise."""
    given = replace(sampler, chosen=[source])
    drawn = []
    for first in range(0, len(numbers), sampler.batch_size):
        z, _, noise = vars(given.latents(numbers[first : first + sampler.batch_size])).values()
        labels = torch.full([len(z)], sampler.chosen[0], device=z.device)
        with torch.no_grad():
            images = sampler.generator(z, labels, noise=noise, **sampler.truncation)
        drawn.append((images.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8).cpu())
    return torch.cat(drawn)


def main(argv: list[str]) -> None:
    parser = Parser(prog="benchmarks/edit.py", description=__doc__)
    add_model_options(parser, required=False)
    add = parser.add_argument
    add("--classifier", metavar="RUN_OR_FILE", help="the guide: whose answer is moved")
    add("--judge", metavar="RUN_OR_FILE", help="another classifier")
    add("--pairs", metavar="A:B,C:D", help="classes to go from and to")
    add("--n", type=positive, default=200, metavar="N", help="samples of a pair")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="the last line is one flat JSON object")
    options = parser.parse_args(argv)
    if options.checkpoint is None:
        print("nothing to measure: give --checkpoint GAN --classifier RUN --judge RUN --pairs A:B")
        return
    if None in (options.classifier, options.judge, options.pairs):
        raise UserError("--classifier, --judge and --pairs belong to --checkpoint; give all of them")
    load_before = os.getloadavg()[0]
    checkpoint = load(resolve(options.checkpoint, options.which))
    known = load(resolve(options.classifier))
    device = torch.device(options.device or "cpu")
    generator, guide = generator_from(checkpoint, device), classifier_from(known, device)
    chosen = list(range(generator.classes))
    sampler = Sampler(generator=generator, chosen=chosen, seed=options.seed, batch_size=options.batch_size)
    result: dict[str, float | int | str] = {"n": options.n, "seed": options.seed, "load_1min_before": load_before}
    editor = Editor(sampler, guide, known["classes"])
    judge = load_judge(options.judge, checkpoint, editor.names, device, None, option="--judge")
    means: dict[str, list[Row]] = {}
    for pair in options.pairs.split(","):
        source, _, target = pair.partition(":")
        labels = pair_of(editor.names, source.strip(), target.strip())
        for what, row in measure(editor, judge, *labels, options.n).items():
            show(pair, what, row)
            means.setdefault(what, []).append(row)
    for what, rows in means.items():
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        show("mean", what, mean)
        result |= {f"w/{what}/{key}": value for key, value in mean.items()}
    if options.json:
        print(json.dumps(result))


def show(pair: str, what: str, row: Row) -> None:
    """A line of the table."""
    figures = "  ".join(f"{key} {value:.3f}" for key, value in row.items())
    print(f"{pair:28} {what:22} {figures}", flush=True)


if __name__ == "__main__":
    sys.exit(run_cli(main))
