"""One rank of the oracle runs in float64: trains tiny tasks, classifiers being slim, and writes losses, gradients and
weights of every step. A variant is `task:micro_batch`, micro_batch 0 being a process's whole share.
"""

import importlib
from pathlib import Path
from typing import Any

import torch

from duetgan.training.base.data import make_loader, open_training
from duetgan.training.base.monitors import MetricWindow
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.utils.distributed import collectives
from tests.end_to_end.ranks import together
from tests.slim import slim_down

STEPS = 4
CLASSIFIER = "classifier"  # run beside the data, of the classifier that gives the generator a loss
COMMON = {"batch_size": 8, "steps": 10, "seed": 3, "augment": {"flip": True, "shift": 1}}
OPTIMIZER = {"name": "adam", "lr": 0.01, "betas": [0.0, 0.99]}
GAN: dict[str, Any] = COMMON | {
    "task": "gan",
    "generator": {"z_dim": 8, "w_dim": 8, "mapping_layers": 2, "channel_base": 64, "channel_max": 8},
    "discriminator": {"channel_base": 64, "channel_max": 8, "minibatch_std_group": 2},
    "loss": {"r1_gamma": 1.0, "r1_interval": 2, "style_mixing": 0.9, "mismatch_weight": 0.5},
    "generator_optimizer": OPTIMIZER,
    "discriminator_optimizer": OPTIMIZER,
}
# every loss the generator can have; `apart` takes their gradients one by one
LOSSES = GAN["loss"] | {
    "path_length_weight": 2.0,
    "path_length_interval": 2,
    "feature_matching_weight": 1.0,
    "feature_matching_group": 2,
    "classifier": CLASSIFIER,
    "classifier_weight": 0.5,
    "auxiliary_weight": 0.7,
}
PAIRS = {"objective": "relativistic", "r1_gamma": 1.0, "r2_gamma": 0.5, "gamma_final": 0.1, "r1_interval": 1}
ADA = {"mode": "adaptive", "p": 0.7, "interval": 2, "kimg": 0.05}
R3 = {"width": 8, "cardinality": 2, "blocks": 1}
TREES: dict[str, dict[str, Any]] = {
    "gan": GAN,
    "gan-losses": GAN | {"loss": LOSSES},
    "gan-apart": GAN | {"loss": LOSSES | {"gradients_every": 1}},
    "gan-pairs": GAN | {"loss": LOSSES | PAIRS | {"mismatch_weight": 0.0, "classifier": None}},
    "gan-wasserstein": GAN
    | {"loss": {"objective": "wasserstein", "gradient_penalty_weight": 10.0, "r1_gamma": 0.0, "r1_interval": 2}},
    "gan-ada": GAN | {"ada": ADA},
    "gan-r3gan": {key: GAN[key] for key in COMMON}
    | {
        "task": "gan",
        "architecture": "r3gan",
        "ada": {"mode": "scheduled", "p_final": 0.7},
        "loss": PAIRS,
        "generator": R3 | {"z_dim": 8},
        "discriminator": R3,
    },
    "gan-dcgan": {key: GAN[key] for key in COMMON}
    | {
        "task": "gan",
        "architecture": "dcgan",
        "loss": {"r1_gamma": 1.0, "r1_interval": 2, "auxiliary_weight": 0.5, "auxiliary_fakes": True},
        "generator": {"z_dim": 8, "width": 4},
        "discriminator": {"width": 4},
    },
    "gan-growing": GAN
    | {"progressive": {"start": 8, "fade_kimg": 0.032, "stable_kimg": 0.016, "batch_sizes": {8: 16}}, "loss": LOSSES},
    "classifier": COMMON
    | {
        "task": "classifier",
        "model": {"name": "resnet18", "stem": "small"},
        "optimizer": {"name": "sgd", "lr": 0.01, "weight_decay": 0.0005},
    },
}
TREES["classifier-unsynced"] = TREES["classifier"] | {"sync_bn": "off"}


def train(name: str, micro_batch: int, data: str, steps: int | None = None) -> list[dict[str, Any]]:
    """Some steps of a task (default: few); metrics, gradients, weights and averages after each."""
    device = torch.device("cpu")
    kind = name.partition("-")[0]
    tree = TREES[name] | {"micro_batch": micro_batch or None, "data": {"path": data} | TREES[name].get("data", {})}
    if synthetic := tree["data"].get("synthetic"):
        beside = {key: str(Path(data).parent / synthetic[key]) for key in ("path", "checkpoint") if key in synthetic}
        tree["data"] = tree["data"] | {"synthetic": synthetic | beside}
    if "loss" in tree and tree["loss"].get("classifier"):
        tree = tree | {"loss": tree["loss"] | {"classifier": str(Path(data).parent / CLASSIFIER)}}
    if "unlabelled" in tree:
        tree = tree | {"unlabelled": tree["unlabelled"] | {"path": str(Path(data).parent / "synthetic.lmdb")}}
    config = build_run_config(tree, [], "test")
    reader = open_training(config.data)
    task = TASKS[kind].task(config, reader, None, device)
    loader = make_loader(task.config, reader, device)
    networks = {key: part for key, part in task.registry().items() if isinstance(part, torch.nn.Module)}
    record = []
    for step in range(steps or (STEPS if kind == "gan" else 2)):
        window = MetricWindow(watched=None)
        window.add(task.step(loader, step))
        named = [(f"{n}.{k}", p) for n, m in networks.items() for k, p in m.named_parameters()]
        record.append(
            {
                "metrics": window.take().means(),
                "gradients": {k: p.grad.clone() for k, p in named if p.grad is not None},
                "weights": {f"{n}.{k}": v.clone() for n, m in networks.items() for k, v in m.state_dict().items()},
                "average": {k: v.clone() for k, v in task.ema.model.state_dict().items()},
            }
        )
    return record


class Records(dict[int, dict[str, list[dict[str, Any]]]]):
    """What each number of ranks of a module records of its variants; made when it is first asked for."""

    def __init__(self, folder: Path, module: str, variants: dict[int, list[str]]) -> None:
        self.folder, self.module, self.variants = folder, module, variants

    def __missing__(self, processes: int) -> dict[str, list[dict[str, Any]]]:
        out, data, variants = self.folder / f"{processes}.pt", self.folder / "data.lmdb", self.variants[processes]
        together(record, self.module, out, str(data), variants, world=processes, output=out.with_suffix(".txt"))
        self[processes] = torch.load(out, weights_only=True)
        return self[processes]

    def differ(self, processes: int, variant: str, part: str) -> float:
        """By how much a variant's steps differ from those of one process with the whole batch."""
        return largest_difference(self[1][f"{variant.partition(':')[0]}:0"], self[processes][variant], part)


def largest_difference(a: list[dict[str, Any]], b: list[dict[str, Any]], part: str) -> float:
    assert all(x[part].keys() == y[part].keys() for x, y in zip(a, b, strict=True))
    return max(
        float((torch.as_tensor(x[part][k]).double() - torch.as_tensor(y[part][k]).double()).abs().max())
        for x, y in zip(a, b, strict=True)
        for k in x[part]
    )


def record(module: str, out: Path, data: str, variants: list[str], steps: int | None = None) -> None:
    """A rank; `module` adds to TREES when it is imported."""
    importlib.import_module(module)
    for tree in TREES.values():
        tree["steps"] = steps or tree["steps"]
    slim_down()
    torch.set_default_dtype(torch.float64)
    collectives.start(torch.device("cpu"))
    records = {}
    for variant in variants:
        name, _, micro_batch = variant.partition(":")
        records[variant] = train(name, int(micro_batch), data, steps)
    if collectives.is_main():
        torch.save(records, out)
    collectives.stop()
