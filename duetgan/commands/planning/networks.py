"""Choose the best of a quickstart plan's pretrained networks for the images.

`duet quickstart-networks plan.json TRAIN.lmdb` changes plan.json. It uses only training images, so
that the choice does not depend on held-out ones.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from duetgan.commands.planning.plan import LOOK, Plan, Training
from duetgan.commands.planning.replan import settled
from duetgan.utils.config.cli import Parser
from duetgan.utils.files import as_json, write_atomic

if TYPE_CHECKING:
    from duetgan.training.classifier.config import ClassifierConfig


def look(training: Training, images: Path) -> tuple[float, int]:
    """Return the cross-validated accuracy of a logistic regression on the features of a pretrained
    network, and the number of images used.
    """
    from duetgan.training.base.data import open_training
    from duetgan.training.classifier.probe import PREVIEW_PER_CLASS, look_alike_groups
    from duetgan.training.classifier.task import ClassifierTask
    from duetgan.training.engine.tasks import build_run_config
    from duetgan.utils.config.yaml_files import read_yaml
    from duetgan.utils.distributed.collectives import choose_device
    from duetgan.utils.seeding import numpy_generator

    options = [*training.overrides, "--data.path", str(images), "--precision", training.precision]
    config = cast(
        "ClassifierConfig", build_run_config(read_yaml(training.config), options, training.config)
    )
    with open_training(config.data) as reader:
        task = ClassifierTask(config, reader, None, choose_device(None))
        number = max(LOOK, PREVIEW_PER_CLASS * len(reader.meta.classes))
        rows = np.sort(numpy_generator(0, "probe", "look").permutation(len(reader))[:number])
        return task.probe_subset(rows, look_alike_groups(reader)).accuracy, len(rows)


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="duet quickstart-networks",
        description="Choose the pretrained network that suits the images best.",
    )
    parser.add_argument("plan", type=Path, metavar="plan.json")
    parser.add_argument("images", type=Path, metavar="TRAIN.lmdb")
    options = parser.parse_args(argv)
    plan = Plan.read(json.loads(options.plan.read_text()), "plan")
    accuracies = {}
    images = 0
    for training in plan.choices:
        accuracy, images = look(training, options.images)
        accuracies[training.weights] = accuracy
        print(
            f"{training.weights}: accuracy {accuracy:.3f} by a regression on {images:,} images",
            flush=True,
        )
    plan = settled(plan, accuracies, images)
    print(f"classifier: {plan.classifier.why}" if plan.classifier else "", flush=True)
    write_atomic(options.plan, as_json(plan.model_dump()))
