"""The commands on `sim:1`, in a process of their own: `python -m tests.accelerator.commands FOLDER NAME...` prints a
JSON object.

FOLDER holds train.lmdb and test.lmdb. A GAN and a classifier are trained on the CPU; each command runs on the device,
whose neighbour `sim:0` must stay empty. Trainings are compared with the CPU's: cases.py.
"""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duetgan.commands import evaluate, export, generate, predict, train
from duetgan.data.images import encode
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.influence import command as influence
from duetgan.metrics.features import extractors
from duetgan.models.backbones import base
from duetgan.reporting import pictures
from duetgan.utils.distributed.process import run_cli
from tests import slim
from tests.accelerator import device
from tests.accelerator.cases import snapshots_take_the_cpus_tensors
from tests.end_to_end.helpers import contents, train_in_process, write_config

PLACE = "sim:1"
QUIET = ["--log.samples-every", "0", "--evaluation.every", "0"]
BETWEEN = {"first": "Sandal", "last": "Sneaker"}  # classes that the classifier names, after its few steps
GAN, CLASSIFIER = "--checkpoint {gan}", "--checkpoint {classifier}"
FP32 = "--precision fp32"  # auto is another one on an accelerator
FAST = "--n 20 --json"  # of an export's check
SEARCH = "--run-dir {out} --lr-find --lr-find-steps 16"

# name -> the command's main, and what it is given; {out} is a folder, and the device goes last
COMMANDS: dict[str, tuple[Callable[[list[str]], int | None], str]] = {
    "evaluate-gan": (
        evaluate.main,
        f"{GAN} --out {{out}} --classifier {{classifier}} --extractor classifier,pixels"
        " --n 40 --per-class 4 --searched 60 --batch-size 16 --json",
    ),
    "audit": (evaluate.main, f"{GAN} --out {{out}} --audit --extractor pixels"),
    "evaluate-classifier": (
        evaluate.main,
        f"{CLASSIFIER} --out {{out}} --n 20 --batch-size 10 --robustness --tta shift --json",
    ),
    "grid": (generate.main, f"grid {GAN} --out {{out}}/grid.png --truncation-psi 0.7"),
    "truncation": (generate.main, f"truncation {GAN} --out {{out}}/rows.png --n 3"),
    "mix": (generate.main, f"mix {GAN} --out {{out}}/mix.png --n 2 --layers 1-2"),
    "interpolate": (generate.main, f"interpolate {GAN} --out {{out}}/film.gif --n 2 --frames 3"),
    "dataset": (generate.main, f"dataset {GAN} --out {{out}}/some.lmdb --n 20"),
    "project": (
        generate.main,
        f"project {GAN} --image {{image}} --out {{out}}/near.png --save {{out}}/near.safetensors"
        " --features pixels --steps 3 --noise-mode optimise",
    ),
    "edit": (
        generate.main,
        f"edit {GAN} --classifier {{classifier}} --from {{first}} --to {{last}} --samples 4 --n 2"
        " --out {out}/edit.png",
    ),
    "predict": (predict.main, f"{{test}} {CLASSIFIER} --csv {{out}}/answers.csv --tta flip --fold {FP32}"),
    "gradcam": (predict.main, f"{{image}} {CLASSIFIER} --gradcam {{out}}/maps --json {FP32}"),
    "influence": (
        influence.main,
        f"{CLASSIFIER} --data {{train}} --image {{image}} --out {{out}}/spoke.png --json",
    ),
    "mislabelled": (
        influence.main,
        f"{CLASSIFIER} --data {{train}} --mislabelled --out {{out}}/wrong.png --json",
    ),
    "lr-find": (train.main, f"--config {{classifier}}.yaml {SEARCH} {FP32}"),
    "lr-find-bf16": (train.main, f"--config {{classifier}}.yaml {SEARCH} --precision bf16 --optimizer.name adamw"),
    "train-frozen": (
        train.main,
        f"--config {{classifier}}.yaml --run-dir {{out}} {FP32} --finetune.freeze [backbone] --augment.flip true"
        " --augment.shift 0 --steps 25 --log.samples-every 0 --threads 1",
    ),
    "export-weights": (export.main, f"{GAN} --format safetensors --out {{out}}/gan.safetensors {FAST}"),
    "export-program": (export.main, f"{CLASSIFIER} --format torch-export --out {{out}}/classifier.pt2 {FAST}"),
}


def runs(folder: Path) -> dict[str, str]:
    """What the commands are given: a run of each task, images, two classes."""
    given = {"train": str(folder / "train.lmdb"), "test": str(folder / "test.lmdb"), "image": str(folder / "image.png")}
    for task in ("gan", "classifier"):
        given[task] = str(folder / task)
        config = write_config(folder / f"{task}.yaml", task, folder)
        if code := train_in_process(config, folder / task, "--device", "cpu", *QUIET, "--checkpoint.keep", "2"):
            raise RuntimeError(f"training of the {task}: exit code {code}")
    with Dataset(folder / "test.lmdb") as images:
        (folder / "image.png").write_bytes(encode(np.moveaxis(images[0][0], 0, -1).copy(), "png"))
    return given | BETWEEN


def ran(folder: Path, name: str, given: dict[str, str]) -> dict[str, Any]:
    """Run a command on the device; return its files, what each device has allocated at most, and waits by line."""
    main, template = COMMANDS[name]
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    before = device.waits.copy()
    for memory in device.memory:
        memory.forget()
    start = [memory.peak for memory in device.memory]
    argv = [each.format(out=out, **given) for each in template.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        code = run_cli(main, argv if main is export.main else [*argv, "--device", PLACE])
    if code:
        raise RuntimeError(f"{name}: exit code {code}")
    return {
        "files": len(contents(out)),
        "bytes": [memory.peak - least for memory, least in zip(device.memory, start, strict=True)],
        "waits": dict(device.waits - before),
    }


def main(folder: Path, names: list[str]) -> None:
    base.make, pictures._svg = slim.make, lambda curves, *, log: "<svg></svg>"  # small classifiers, no curves
    extractors.PLACES = ()  # type: ignore[assignment]  # no ResNet-50, wherever its weights lie
    device.install()
    snapshots_take_the_cpus_tensors()
    result: dict[str, Any] = {}
    with device.Mode(), torch.autograd.set_multithreading_enabled(False):  # see trainings.compared
        given = runs(folder)
        for name in names:
            result[name] = ran(folder, name, given)
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
