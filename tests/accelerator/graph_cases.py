"""Trainings on `sim` with and without graphs, in a process of its own: `python -m tests.accelerator.graph_cases PART
FOLDER` prints a JSON object. PART is fast or slow. See `pretend_graph.py`.
"""

import functools
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from duetgan.training.base import graphs
from duetgan.training.base.data import make_loader, open_training
from duetgan.training.classifier.loss import Criterion
from duetgan.training.engine.tasks import TASKS
from duetgan.training.gan import draws as gan_draws
from duetgan.training.optim.updater import Updater
from duetgan.utils.config.yaml_files import read_yaml
from tests.accelerator import device, trainings
from tests.accelerator.cases import planted, reading_norms, snapshots_take_the_cpus_tensors
from tests.accelerator.pretend_graph import PretendDevice
from tests.accelerator.trainings import classifier, gan, optimizer
from tests.conftest import REPOSITORY
from tests.distributed.worker import ADA, GAN, PAIRS
from tests.end_to_end.helpers import differing
from tests.slim import slim_down

STEPS, FEW = 20, 10  # of a comparison; of one that `make test` runs
NO_PRESETS = ("study_", "few_labels")  # not trainings; of other images
Tree = dict[str, Any]
# shrunken networks and schedules of the presets, by the section's architecture
SMALL: dict[str, Tree] = {
    "stylegan2": {"z_dim": 8, "w_dim": 8, "mapping_layers": 2, "channel_base": 64, "channel_max": 8},
    "r3gan": {"width": 8, "cardinality": 2, "blocks": 1, "z_dim": 8},
    "dcgan": {"z_dim": 8, "width": 4},
}


def small(name: str) -> Tree:
    """A preset with its options, but small networks, and changes within few steps."""
    tree = read_yaml(REPOSITORY / "configs" / f"{name}.yaml")
    tree |= {"batch_size": 8, "steps": STEPS, "data": {}, "evaluation": {}, "checkpoint": {}, "log": {}}
    if tree.get("micro_batch"):
        tree["micro_batch"] = 4
    if tree["task"] == "classifier":
        tree["model"] = tree.get("model", {}) | {"weights": None}
        if tree["model"].get("input_size"):
            tree["model"]["input_size"] = 32
        finetune = tree.setdefault("finetune", {})
        for key in ("unfreeze", "freeze_at"):
            if key in finetune:
                finetune[key] = {part: min(step, 6) for part, step in finetune[key].items()}
        return tree
    sizes = SMALL[tree.get("architecture", "stylegan2")]
    for network in ("generator", "discriminator"):
        options = {key: value for key, value in sizes.items() if network == "generator" or key in OF_BOTH}
        tree[network] = tree.get(network, {}) | options
    if "minibatch_std_group" in tree["discriminator"]:
        tree["discriminator"]["minibatch_std_group"] = 4
    if "progressive" in tree:
        tree["progressive"] = {"start": 8, "fade_kimg": 0.048, "stable_kimg": 0.04, "batch_sizes": {8: 16}}
    if "schedule_kimg" in tree:
        tree["schedule_kimg"] = 0.1
    if "ada" in tree:
        tree["ada"] |= {"kimg": 0.1}
    return tree


OF_BOTH = ("channel_base", "channel_max", "width", "cardinality", "blocks")
PRESETS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml") if not path.stem.startswith(NO_PRESETS))
GROWING = {"start": 8, "fade_kimg": 0.04, "stable_kimg": 0.032, "batch_sizes": {8: 16}}
PATHS = GAN["loss"] | {"path_length_weight": 2.0, "path_length_interval": 4}
R3 = gan("gan-r3gan", precision="fp16", generator_optimizer={"beta2_final": 0.9}, schedule_kimg=0.05)
# what `make test` runs: every kind of value that enters a step
FAST: dict[str, Tree] = {
    "GAN, growing, path lengths": gan(progressive=GROWING, loss=PATHS),
    "R3GAN, fp16, schedules": R3,
    "classifier, fp16, mixed, clipped, unfrozen, resized": classifier(
        precision="fp16",
        augment={"mixup": 0.5, "cutmix": 0.5, "flip": True, "shift": 1},
        optimizer={"name": "adamw", "lr": 0.01, "clip_adaptive": 0.01},
        finetune={"unfreeze": {"backbone": 7, "layer4": 3, "head": 0}},
        resizing={"initial_scale": 0.5, "delay_fraction": 0.2},
        steps=10,
    ),
}
SLOW: dict[str, Tree] = {
    **{f"preset {name}": small(name) for name in PRESETS},
    **trainings.FAST,
    **trainings.SLOW,
    "GAN, half-life that changes": gan(ema={"ema_kimg": 0.1, "ema_kimg_start": 0.0, "ema_rampup": None}),
    "GAN, pairs in one pass": gan("gan-pairs", loss=PAIRS | {"same_pairs": True, "r2_gamma": 0.0, "r1_interval": 2}),
    "GAN, noise and cutout": gan(ada=ADA | {"operations": {"noise": 1.0, "cutout": 1.0, "filter": 1.0, "blit": 1.0}}),
    "GAN, AdamW, one-cycle": gan(
        generator_optimizer={"name": "adamw", "schedule": "one-cycle", "cycle_momentum": [0.9, 0.5], "clip_value": 0.01}
    ),
    "GAN, muon-adam": gan(generator_optimizer={"name": "muon-adam", "clip_norm": 0.1}),
    "classifier, one-cycle": optimizer("sgd", schedule="one-cycle", cycle_momentum=[0.95, 0.85], momentum=0.9),
    "classifier, micro-batches": classifier(micro_batch=3),
    "classifier, frozen by and by": classifier(finetune={"freeze_at": {"stem": 4, "layer1": 8}}),
}
EAGER = {"GAN, gradients of each loss": "CUDA graph, 0 kinds of steps; eager where diagnostics are due"}


def run(folder: Path, tree: Tree, steps: int = STEPS, where: str = "sim") -> Tree:
    """What the steps say, the state after them, how they ran, and bytes: held after each step, and its peak."""
    config = trainings.config_of(folder, {"compile": "off"} | tree)  # dynamo skips every frame under the device's modes
    place = torch.device(where)
    memory = device.memory[place.index or 0]
    said: list[dict[str, Tensor]] = []
    held = []
    with open_training(config.data) as reader:
        task = TASKS[config.task].task(config, reader, None, place)
        loader = make_loader(task.config, reader, place)
        for step in range(steps):
            if step == steps // 2:  # as where training goes back to a checkpoint
                state = {name: part.state_dict() for name, part in task.registry().items()}
                for name, part in task.registry().items():
                    part.load_state_dict(trainings.tree_map_only(Tensor, Tensor.clone, state[name]))
            gc.collect()
            memory.forget()
            before = memory.allocated
            said.append(task.step(loader, step))
            held.append((before, memory.peak - before))
        loader.close()
    state = {name: part.state_dict() for name, part in task.registry().items()}
    captured = [bool(step.parts) for step in task.graphs._steps.values()]
    return {
        "said": [{name: value.tolist() for name, value in metrics.items()} for metrics in said],
        "state": trainings.tree_map_only(Tensor, lambda x: x.detach().cpu(), state),
        "plan": task.describe()["graphs"],
        "captured": sum(captured),
        "held": held,
    }


def with_graphs(folder: Path, tree: Tree, *options: Any) -> Tree:
    with patch.dict(graphs.DEVICES, {"sim": PretendDevice}):
        return run(folder, tree, *options)


def compared(folder: Path, tree: Tree, *options: Any) -> Tree:
    eager, replayed = run(folder, tree, *options), with_graphs(folder, tree, *options)
    found = {key: replayed[key] for key in ("plan", "captured", "held")}
    return found | {"differing": [name for key in ("said", "state") for name in differing(eager[key], replayed[key])]}


# --- planted faults


@functools.cache
def sound(folder: Path, tree: str) -> Tree:
    return run(folder, json.loads(tree), 6)


def frozen_number(number: Any) -> Any:
    return lambda function, step, *_: function(step)


def replacing(at: Any) -> Any:
    """The smoothing of each step is another tensor."""

    def faulty(self: Criterion, step: int) -> None:
        self.smoothing = self.smoothing.clone()
        at(self, step)

    return faulty


def not_copied(replay: Any) -> Any:
    """The metrics of every step are the same memory."""

    def faulty(self: graphs.CapturedStep, *arguments: Any) -> Any:
        replay(self, *arguments)
        return dict(zip(self._names, self._metrics.unbind(), strict=True))

    return faulty


def forgotten(apply: Any) -> Any:
    """The optimizer takes the gradients that parameters have, which are not those of this kind of step."""

    def faulty(self: Updater, gradients: Any, *arguments: Any) -> None:
        apply(self, [parameter.grad for parameter in self.parameters], *arguments)

    return faulty


# name -> what is replaced, by what, in which training
SMOOTHED = classifier(loss={"label_smoothing_final": 0.9})
FAULTS: dict[str, tuple[Any, str, Any, Tree]] = {
    "a number in place of a tensor": (graphs, "number", frozen_number, R3),
    "a tensor replaced instead of filled": (Criterion, "at", replacing, SMOOTHED),
    "a generator used inside": (gan_draws.GanDraws, "noise", lambda noise: noise.__wrapped__, gan()),
    "a host read": (Updater, "step", reading_norms, classifier()),
    "metrics in the graph's memory": (graphs.CapturedStep, "replay", not_copied, classifier()),
    "gradients of another kind": (Updater, "_apply", forgotten, gan()),
}


FAST_FAULTS = ("a number in place of a tensor", "a host read")  # in `make test`


def noticed(folder: Path, fault: str) -> list[str]:
    """What differs because of a planted fault, and why steps are not captured if they are not."""
    owner, name, make, tree = FAULTS[fault]
    eager = sound(folder, json.dumps(tree))
    with planted(owner, name, make):
        replayed = with_graphs(folder, tree, 6)
    found = [name for key in ("said", "state") for name in differing(eager[key], replayed[key])]
    return [*found[:1], replayed["plan"]]


def main(part: str, folder: Path, *names: str) -> None:
    slim_down()
    device.install()
    snapshots_take_the_cpus_tensors()
    trainings.prepare(folder)
    gc.freeze()  # the collections between steps need not look at what was imported
    result: Tree = {}
    with device.Mode(), torch.autograd.set_multithreading_enabled(False):
        for name, tree in {"fast": FAST, "slow": SLOW}[part].items():
            if not names or name in names:
                result[name] = compared(folder, tree, FEW if part == "fast" else STEPS)
                print(name, result[name]["differing"][:3], result[name]["plan"], time.process_time(), file=sys.stderr)
        for fault in FAULTS:
            if (fault in FAST_FAULTS) is (part == "fast") and (not names or fault in names):
                result[fault] = noticed(folder, fault)
                print(fault, result[fault], time.process_time(), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
