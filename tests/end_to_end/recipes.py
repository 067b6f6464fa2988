"""Recipes of the exactness tests: all that has a state or draws random numbers is on, and images are decoded."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source

CLASSES = ("cross", "dot", "stripe")
STEPS, BATCH = 18, 8
GAN: dict[str, Any] = {
    "task": "gan",
    "generator": {"z_dim": 8, "w_dim": 8, "mapping_layers": 2, "channel_base": 64, "channel_max": 8},
    "discriminator": {"channel_base": 64, "channel_max": 8, "minibatch_std_group": 2},
    "loss": {
        "r1_interval": 2,
        "mismatch_weight": 0.5,
        "path_length_weight": 2,
        "path_length_interval": 3,
        "feature_matching_weight": 0.1,
        "feature_matching_group": 2,
        "gradients_every": 4,
    },
    "ada": {"mode": "adaptive", "p": 0.5, "kimg": 0.2, "interval": 3},
    "generator_optimizer": {"lr": 0.002, "betas": [0.0, 0.99], "schedule": "cosine", "warmup_steps": 3},
    "discriminator_optimizer": {"lr": 0.002, "betas": [0.0, 0.99], "beta2_final": 0.999},
    "augment": {"flip": True, "shift": 1},
}
CLASSIFIER: dict[str, Any] = {
    "task": "classifier",
    "model": {"stem": "small-stride2"},
    "optimizer": {"name": "sgd", "lr": 0.02, "warmup_steps": 2, "schedule": "cosine"},
    "augment": {
        **{"flip": True, "shift": 1, "trivial_augment": True, "erase": 0.3},
        **{"mixup": 0.4, "cutmix": 1.0, "mix_prob": 0.8},
    },
}
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": BATCH,
    "log": {"every": 3, "samples_every": 0, "tensorboard": False},
    "checkpoint": {"every": 5, "keep": 20},
    "evaluation": {"every": 4, "n": 20},
}
TASKS = {"gan": GAN, "classifier": CLASSIFIER}


def image_folders(folder: Path, count: int, seed: int) -> Path:
    """`count` colour images of sizes of their own, PNG and JPEG, in three class folders."""
    draws = np.random.default_rng(seed)
    for index in range(count):
        name = CLASSES[index % 3]
        pixels = draws.integers(0, 256, (*draws.integers(20, 30, 2).tolist(), 3), dtype=np.uint8)
        smooth = cv2.GaussianBlur(pixels, (0, 0), 1 + index % 3)
        (folder / name).mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(folder / name / f"{index:03d}.{'png' if index % 2 else 'jpg'}"), smooth)
    return folder


def pack_folders(folder: Path, dest: Path) -> Path:
    """As they are: each reading decodes, crops and scales them."""
    source = open_source(str(folder), split="train", root=None)
    pack(source, dest, encoding="source", duplicates=False, workers=0)
    return dest


def write_recipe(path: Path, task: str, data: Path, **changes: Any) -> Path:
    """A recipe of `task` on DATA/train.lmdb and DATA/test.lmdb."""
    files = {"path": str(data / "train.lmdb"), "val_path": str(data / "test.lmdb")}
    read = {"resolution": 16, "crop": "random", "workers": 0}
    path.write_text(yaml.safe_dump(TASKS[task] | COMMON | {"data": files | read} | changes))
    return path
