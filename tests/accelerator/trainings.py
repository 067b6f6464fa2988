"""Small trainings, step by step, on the CPU and on `sim`. Whole runs of train.py: cases.py."""

import gc
from collections import ChainMap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from duetgan.data.augment.transforms import AUGMENTATIONS
from duetgan.data.packing.records import pack_arrays
from duetgan.training.base.data import make_loader, open_training
from duetgan.training.base.monitors import MetricWindow
from duetgan.training.engine.tasks import TASKS, build_run_config
from tests.accelerator import device
from tests.distributed.test_oracle import CLASSES, untrained_classifier
from tests.distributed.worker import CLASSIFIER, TREES
from tests.end_to_end.helpers import differing

AUGMENTATIONS["dimmed"] = lambda images, draws: (images * draws[:, :1, None, None]).to(torch.uint8)
STEPS = 3  # the first and the last with the lazy penalties, the second without


def gan(name: str = "gan", **more: Any) -> dict[str, Any]:
    return TREES[name] | more


def classifier(name: str = "resnet18", *, px: int | None = None, **more: Any) -> dict[str, Any]:
    return TREES["classifier"] | {"model": {"name": name, "input_size": px}} | more


def optimizer(name: str, **more: Any) -> dict[str, Any]:
    return classifier(optimizer={"name": name, "lr": 0.01} | more)


# what `make test` runs
FAST: dict[str, dict[str, Any]] = {
    "GAN, every loss, bf16": gan("gan-losses", precision="bf16"),
    "R3GAN, scheduled augmentation": gan("gan-r3gan"),
    "classifier, ResNet, fp16": classifier(precision="fp16", augment={"own": ["dimmed"]}),
}
SLOW: dict[str, dict[str, Any]] = {
    "GAN, growing": gan("gan-growing"),
    "DCGAN": gan("gan-dcgan"),
    "classifier, unfrozen by and by": classifier(finetune={"unfreeze": {"backbone": 2, "layer4": 1, "head": 0}}),
    "GAN, fp16": gan(precision="fp16"),
    "GAN, every loss": gan("gan-losses"),
    "GAN, every loss, micro-batches": gan("gan-losses", micro_batch=4),
    "GAN, gradients of each loss": gan("gan-apart"),
    "GAN, relativistic, R1 and R2": gan("gan-pairs"),
    "GAN, Wasserstein, gradient penalty": gan("gan-wasserstein"),
    "GAN, adaptive augmentation": gan("gan-ada"),
    "GAN, activation checkpointing": gan(generator=TREES["gan"]["generator"] | {"activation_checkpointing": True}),
    "R3GAN, fp16": gan("gan-r3gan", precision="fp16"),
    "DCGAN, bf16": gan("gan-dcgan", precision="bf16"),
    "classifier, ResNet, bf16": classifier(px=32, precision="bf16"),
    "classifier, ConvNeXt": classifier("convnext_tiny", px=32),
    "classifier, EfficientNet": classifier("efficientnet_b0"),
    "classifier, airbench, Muon": classifier("airbench", optimizer={"name": "muon", "unit_filters": True}),
    "classifier, airbench, bf16": classifier("airbench", precision="bf16"),
    "classifier, timm's ResNet": classifier("timm:resnet18"),
    "classifier, layer decay, frozen BatchNorm": classifier(finetune={"layer_decay": 0.7, "freeze_bn": True}),
    "classifier, activation checkpointing": classifier(model={"name": "resnet18", "activation_checkpointing": True}),
    "classifier, mixup and CutMix": classifier(augment={"mixup": 0.5, "cutmix": 0.5, "flip": True}),
    "classifier, TrivialAugment, erasing": classifier(augment={"trivial_augment": True, "erase": 0.5}),
    "classifier, squared error, weights of classes": classifier(
        loss={"kind": "squared-error", "class_weights": "balanced", "label_smoothing": 0.0}
    ),
    "classifier, AdamW, clipped norm": optimizer("adamw", clip_norm=0.5),
    "classifier, SGD, clipped values": optimizer("sgd", clip_value=0.01),
    "classifier, Muon, adaptive clipping": optimizer("muon", clip_adaptive=0.01),
    "classifier, schedule-free SGD": optimizer("schedulefree-sgd", schedule="constant"),
    "classifier, images without labels": classifier(
        unlabelled={"path": "data.lmdb", "spread": 0.5}, finetune={"probe": True, "unfreeze": {"head": 0}}
    ),
    "classifier, schedule-free AdamW": optimizer("schedulefree-adamw", schedule="constant"),
}
# without augmentation, which the estimate leaves out, and large enough for activations to count
WIDE = {key: TREES["gan"][key] | {"channel_base": 512, "channel_max": 32} for key in ("generator", "discriminator")}
PLAIN: dict[str, Any] = {"batch_size": 16, "augment": {}}
MEMORY: dict[str, dict[str, Any]] = {
    f"{name}, {precision}": tree | PLAIN | {"precision": precision}
    for precision in ("fp32", "bf16")
    for name, tree in {
        "GAN": gan(**WIDE),
        "GAN, R1 and R2": gan("gan-pairs", **WIDE),
        "R3GAN": gan("gan-r3gan", ada={"mode": "off"}),
        "classifier": classifier(model={"name": "resnet18", "stem": "small"}),
    }.items()
}
# In reduced precision CUDA's autocast takes roots, powers and sums in fp32 and the CPU's does not: how far the weights
# may be apart after the steps.
OTHERWISE = {"DCGAN, bf16": 0.002}


def prepare(folder: Path) -> None:
    """32 random 16 px grey images of three classes, with 8 px stored; and a classifier's run."""
    images = np.random.default_rng(0).integers(0, 256, (32, 1, 16, 16), dtype=np.uint8)
    pack_arrays(folder / "data.lmdb", images, labels=np.arange(32) % 3, classes=CLASSES, smallest=8)
    untrained_classifier(folder / CLASSIFIER)


def config_of(folder: Path, tree: dict[str, Any]) -> Any:
    # Compiled networks multiply parameters by gains one by one, and the CPU's are not compiled.
    tree = tree | {"data": {"path": str(folder / "data.lmdb")}, "compile": "off"}
    if "unlabelled" in tree:
        tree["unlabelled"] = tree["unlabelled"] | {"path": tree["data"]["path"]}
    if tree.get("loss", {}).get("classifier"):
        tree["loss"] = tree["loss"] | {"classifier": str(folder / CLASSIFIER)}
    return build_run_config(tree, [], "test")


def run(folder: Path, tree: dict[str, Any], where: str, number: int = STEPS) -> dict[str, Any]:
    """What the steps say, the state after them, and the waits of each but the first by source line."""
    config, place = config_of(folder, tree), torch.device(where)
    found: dict[str, Any] = {"said": [], "waits": []}
    with open_training(config.data) as reader:
        task = TASKS[config.task].task(config, reader, None, place)
        loader = make_loader(task.config, reader, place)
        for step in range(number):
            before, window = device.waits.copy(), MetricWindow(watched=None)
            window.add(task.step(loader, step))
            if step:
                found["waits"].append(dict(device.waits - before))
            found["said"].append(window.take().means())
        loader.close()
    state = {name: part.state_dict() for name, part in task.registry().items()}
    return found | {"state": tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), state)}


def compared(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """A training on both, in one thread: the order in which gradients are added up is the same then."""
    with torch.autograd.set_multithreading_enabled(False):
        here, there = (run(folder, tree, where) for where in ("cpu", "sim"))
    keys = ("said", "state")
    differ = differing({key: here[key] for key in keys}, {key: there[key] for key in keys})
    name = next(name for name in ("generator", "model") if name in here["state"])
    one, other = here["state"][name], there["state"][name]
    largest = max((one[key].double() - other[key].double()).abs().max().item() for key in one)
    return {"differing": differ, "largest": largest, "waits": dict(ChainMap(*there["waits"]))}


def memory_of(folder: Path, name: str) -> dict[str, int]:
    """Bytes of a training on `sim`, which has no fused kernels: the estimate of the peak, and the peak."""
    from duetgan.extras.paper import predictions as on_paper

    config = config_of(folder, MEMORY[name])
    with open_training(config.data) as reader:
        estimate = on_paper.count(config, reader, config.batch_size, kernels=False).peak
    memory = device.memory[0]
    gc.collect()
    memory.forget()
    before = memory.allocated
    run(folder, MEMORY[name], "sim")
    return {"estimate": estimate, "peak": memory.peak - before}
