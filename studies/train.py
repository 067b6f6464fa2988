"""Trainings of a study, in this process, and how their classifiers are judged."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from data.reading.dataset import Dataset, dataset_for_model
from metrics.evaluate_classifier import answers_of, check_classes, classify
from models.restore import classifier_from
from studies.config import Recipe, tokens
from studies.declare import Result
from training.base.config import RunConfig
from training.engine.run import train
from training.engine.tasks import build_run_config
from utils.checkpoint import load, resolve
from utils.config.yaml_files import read_yaml
from utils.distributed.collectives import choose_device
from utils.errors import UserError

QUIET = {"log.tensorboard": False, "log.samples_every": 0}  # what nobody looks at in one of many runs


def train_run(
    folder: Path,
    config: str,  # a recipe
    overrides: Mapping[str, Any],  # dotted keys
    *,
    seed: int,
    device: str | None = None,
    max_steps: int | None = None,
) -> None:
    """Train a run to its end, or resume it; what it prints goes into FOLDER.log. Nothing where it has ended.

    Raises StoppedBySignal once it has saved, and what training raises.
    """
    if ended(folder, max_steps):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with log_into(folder.with_name(f"{folder.name}.log")):
        train(
            config,
            tokens({**overrides, "seed": seed}),
            run_dir=str(folder),
            device=device,
            max_steps=max_steps,
        )


def run_config(recipe: Recipe) -> RunConfig:
    """The settings of a recipe's run. Raises UserError for what is wrong in them."""
    return build_run_config(read_yaml(recipe.file), tokens(recipe.overrides), str(recipe.file))


def ended(folder: Path, max_steps: int | None = None) -> bool:
    """Whether a run's training came to its end, or to the step where it was to stop."""
    status = folder / "status.json"
    if not status.is_file():
        return False
    found = json.loads(status.read_text())
    return found["state"] == "finished" or (max_steps is not None and found.get("step") == max_steps)


@contextmanager
def log_into(file: Path) -> Iterator[None]:
    """What is printed inside the block is appended to a file."""
    with file.open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        yield


def judge_classifier(
    folder: Path,  # a classifier's run
    sets: Mapping[str, Path],  # name -> packed images
    *,
    device: str | None = None,
    batch_size: int = 250,
) -> Result:
    """The answers of a run's average classifier to every image of the sets, and each set's accuracy."""
    checkpoint = load(resolve(str(folder)))
    classifier = classifier_from(checkpoint, choose_device(device))
    figures: dict[str, float | None] = {}
    hits: dict[str, np.ndarray] = {}
    for name, path in sets.items():
        with dataset_for_model(path, checkpoint) as reader:
            check_classes(classifier, reader)
            answers = answers_of(classifier, reader, classify(classifier, reader, batch_size=batch_size))
        hits[name] = answers.hits.numpy()
        figures[f"{name}_accuracy"] = float(hits[name].mean())
    return Result(figures, hits)


def classifier_arm(
    config: str,
    overrides: Mapping[str, Any],
    sets: Mapping[str, Path],
    *,
    device: str | None = None,
) -> Callable[[Path, int], Result]:
    """What an arm does that trains a classifier and judges it on the sets."""

    def make(folder: Path, seed: int) -> Result:
        train_run(folder, config, {**QUIET, **overrides}, seed=seed, device=device)
        return judge_classifier(folder, sets, device=device)

    return make


def require_trained_on(run: str, images: Path) -> None:
    """Raise UserError unless a run was trained on exactly these images: another may have seen those that judge."""
    checkpoint = load(resolve(run))
    with Dataset(images) as reader:
        wanted = reader.meta.content_hash
    if (checkpoint.get("data") or {}).get("content_hash") != wanted:
        raise UserError(
            f"{run}: was not trained on this study's training images; train it with --data.path {images}, or leave "
            "gan.run out"
        )
