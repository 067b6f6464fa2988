"""A study's generators and files of their samples, as drawn or selected by a classifier."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.lmdb.record import Layout
from data.lmdb.writer import LMDBWriter
from data.records import add_image
from inference.samples import Sampler
from metrics.evaluate_gan import judge_images
from metrics.lineage import passport_of
from models.classifier import Classifier
from models.restore import classifier_from, generator_from
from studies.config import Recipe
from studies.declare import Job
from studies.execute import slug, told
from studies.parts import HELD_OUT, NAME, TRAIN, part
from studies.train import QUIET, require_trained_on, train_run
from utils.checkpoint import Checkpoint, load, resolve
from utils.classes import require_same_classes
from utils.distributed.collectives import choose_device
from utils.errors import UserError

DRAWN = 64  # samples of a class at a time
SEED = 0  # of the samples
STILL = 1e-12  # a learning rate at which one step changes nothing


@dataclass(frozen=True)
class Selection:
    """Which samples are kept, by a classifier of the study's training images alone."""

    pool: int = 4  # samples drawn for each that is wanted
    recognised: bool = True  # as the class that was asked for
    confidence: tuple[float, float] = (0.0, 1.0)  # of the class that was asked for, both ends allowed

    def rule(self) -> str:
        """The rule in words; it goes into the samples' passport."""
        low, high = self.confidence
        parts = ["recognised as asked"] * self.recognised + [f"confidence {low:g} to {high:g}"]
        return f"{', '.join(parts)}; the first of {self.pool} drawn for each"

    def keeps(self, probabilities: Tensor, label: int) -> Tensor:
        """Of samples of a class, whose probabilities are [n, classes]: bool [n]."""
        asked = probabilities[:, label]
        kept = (asked >= self.confidence[0]) & (asked <= self.confidence[1])
        return kept & (probabilities.argmax(1) == label) if self.recognised else kept


def generator_job(name: str, folder: Path, recipe: Recipe, *, device: str | None, untrained: bool = False) -> Job:
    """The generator, trained on the study's training images; `untrained`: as it is before its first step."""
    images = {"data.path": str(part(folder, TRAIN)), "data.val_path": str(part(folder, HELD_OUT))}
    still = {f"{net}_optimizer.lr": STILL for net in ("generator", "discriminator")} if untrained else {}
    overrides = {**QUIET, "log.samples_every": 10**9, **recipe.overrides, **images, **still}

    def make(place: Path) -> dict[str, Any]:
        if recipe.run is not None and not untrained:
            require_trained_on(recipe.run, part(folder, TRAIN))
            return {"run": str(Path(recipe.run).resolve())}
        steps = 1 if untrained else None
        train_run(place / "run", str(recipe.file), overrides, seed=SEED, device=device, max_steps=steps)
        return {"run": None}

    key = recipe.key() | {"untrained": untrained}
    what = "an untrained generator" if untrained else f"training the generator: {recipe.config or recipe.run}"
    return Job(name, make, key=key, needs=(NAME,), what=what)


def generator_run(folder: Path, name: str) -> str:
    """The run of a generator's job that is done."""
    return told(folder, name).get("run") or str(folder / "jobs" / slug(name) / "run")


def samples_job(
    name: str,
    folder: Path,
    generator: str,  # job of the generator
    counts: Callable[[dict[str, Any]], Mapping[str, Sequence[int]]],  # of what the parts told: each file's, by class
    *,
    key: Mapping[str, Any],  # what `counts` depends on
    device: str | None,
    selection: Selection | None = None,
    classifier: str | None = None,  # job of the classifier that selects
) -> Job:
    """A job that writes jobs/NAME/FILE.lmdb for each of the counts; of a class smaller files are the beginning of
    larger ones. It tells `kept`, the share of the drawn samples of each class that the selection keeps, and `counts`:
    what each file holds, fewer than asked for where the selection's pool has no more.
    """

    def make(place: Path) -> dict[str, Any]:
        where = choose_device(device)
        checkpoint = load(resolve(generator_run(folder, generator)))
        network = generator_from(checkpoint, where)
        parts = told(folder, NAME)
        if not network.classes:
            raise UserError(f"{checkpoint['file']}: is a generator without classes; a study needs labelled samples")
        require_same_classes("the generator", checkpoint["classes"], "the study's images", parts["classes"])
        judge = None
        if selection is not None:
            judge = classifier_from(load(resolve(str(folder / "jobs" / slug(str(classifier)) / "run"))), where)
        wanted = counts(parts)
        most = np.max([list(found) for found in wanted.values()], axis=0).tolist()
        drawn = [_draw(network, label, count, selection, judge) for label, count in enumerate(most)]
        rule = None if selection is None else selection.rule()
        passport = passport_of(network, checkpoint, seed=SEED, selection=rule)
        written = {}
        for file, each in wanted.items():
            images = [found[:count] for (found, _), count in zip(drawn, each, strict=True)]
            _write(place / f"{file}.lmdb", images, checkpoint, passport)
            written[file] = [len(found) for found in images]
        return {"kept": [share for _, share in drawn], "counts": written}

    needs = (NAME, generator) + (() if classifier is None else (classifier,))
    rule = None if selection is None else asdict(selection)
    what = f"samples of {generator}" + ("" if selection is None else f", selected: {selection.rule()}")
    return Job(name, make, key={**key, "selection": rule}, needs=needs, what=what)


def _draw(
    generator: Any, label: int, count: int, selection: Selection | None, judge: Classifier | None
) -> tuple[list[np.ndarray], float | None]:
    """At most `count` samples of a class, uint8 [C, R, R] each, in the order of their numbers, and the share of all
    drawn that is kept; at least one sample where any is wanted, the one of the highest probability.
    """
    sampler = Sampler(generator=generator, chosen=(label,), seed=SEED, batch_size=DRAWN)
    if selection is None or judge is None:
        return [image for start in range(0, count, DRAWN) for image in _images(sampler, start, count)], None
    kept: list[np.ndarray] = []
    seen, best, pool = 0, (-1.0, np.empty(0)), count * selection.pool
    for start in range(0, pool, DRAWN):
        images = _images(sampler, start, pool)
        probabilities = judge_images(judge, torch.from_numpy(images)).cpu()
        asked = probabilities[:, label]
        best = max(best, (float(asked.max()), images[int(asked.argmax())]), key=lambda pair: pair[0])
        kept += list(images[selection.keeps(probabilities, label).numpy()])
        seen += len(images)
        if len(kept) >= count:
            break
    share = len(kept) / seen if seen else None
    return (kept or [best[1]] * min(1, count))[:count], share


def _images(sampler: Sampler, start: int, end: int) -> np.ndarray:
    return sampler.images(range(start, min(start + DRAWN, end))).numpy()


def _write(path: Path, images: Sequence[Sequence[np.ndarray]], checkpoint: Checkpoint, passport: Any) -> None:
    """A file of samples, given by class; one that is there is replaced."""
    first = next(image for found in images for image in found)
    layout = Layout(channels=first.shape[0], resolutions=(first.shape[1],), encoding="raw")
    about: dict[str, Any] = {"source": "samples for a study", "passport": passport}
    about["resize_filter"] = (checkpoint.get("data") or {}).get("resize_filter", "none")
    with LMDBWriter(path, layout, classes=checkpoint["classes"], overwrite=True, **about) as writer:
        for label, found in enumerate(images):
            for image in found:
                add_image(writer, np.ascontiguousarray(image.transpose(1, 2, 0)), label)
        writer.finish()
