"""One rank of the oracle runs in float64: trains tiny tasks and writes losses, gradients and weights of every step.

`python -m tests.distributed.worker OUT DATA VARIANT...`; rank and world size come from the environment. A variant is
`task:micro_batch`, micro_batch 0 being a process's whole share.
"""

import sys
from typing import Any

import torch

from data.dataset import Dataset
from data.loader import InfiniteLoader
from data.sampler import GlobalSampler
from training.loop import MetricWindow
from training.tasks import TASKS, build_run_config
from utils import distributed

STEPS = 4
COMMON = {"batch_size": 8, "steps": 10, "seed": 3, "augment": {"flip": True, "shift": 1}}
OPTIMIZER = {"name": "adam", "lr": 0.01, "betas": [0.0, 0.99]}
TREES: dict[str, dict[str, Any]] = {
    "gan": COMMON
    | {
        "task": "gan",
        "generator": {"z_dim": 8, "w_dim": 8, "mapping_layers": 2, "channel_base": 64, "channel_max": 8},
        "discriminator": {"channel_base": 64, "channel_max": 8, "minibatch_std_group": 2},
        "loss": {"r1_gamma": 1.0, "r1_interval": 2, "style_mixing": 0.9, "mismatch_weight": 0.5},
        "generator_optimizer": OPTIMIZER,
        "discriminator_optimizer": OPTIMIZER,
    },
    "classifier": COMMON
    | {
        "task": "classifier",
        "model": {"name": "resnet18", "stem": "small"},
        "optimizer": {"name": "sgd", "lr": 0.01, "weight_decay": 0.0005},
    },
}
TREES["classifier-unsynced"] = TREES["classifier"] | {"sync_bn": "off"}


def train(name: str, micro_batch: int, data: str) -> list[dict[str, Any]]:
    """Four steps of a task; metrics, gradients, weights and averages after each."""
    device = torch.device("cpu")
    kind = name.partition("-")[0]
    tree = TREES[name] | {"micro_batch": micro_batch or None, "data": {"path": data}}
    reader = Dataset(data)
    task = TASKS[kind].task(build_run_config(tree, [], "test"), reader, None, device)
    sampler = GlobalSampler(
        len(reader), batch_size=8, seed=3, rank=distributed.rank(), world_size=distributed.world_size()
    )
    loader = InfiniteLoader(reader, sampler, device=device, prefetch=0)
    networks = {key: part for key, part in task.registry().items() if isinstance(part, torch.nn.Module)}
    record = []
    for step in range(STEPS if kind == "gan" else 2):
        window = MetricWindow()
        window.add(task.step(loader, step))
        named = [(f"{n}.{k}", p) for n, m in networks.items() for k, p in m.named_parameters()]
        record.append(
            {
                "metrics": window.take(),
                "gradients": {k: p.grad.clone() for k, p in named if p.grad is not None},
                "weights": {f"{n}.{k}": v.clone() for n, m in networks.items() for k, v in m.state_dict().items()},
                "average": {k: v.clone() for k, v in task.ema.model.state_dict().items()},
            }
        )
    return record


def main(out: str, data: str, variants: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    distributed.start(torch.device("cpu"))
    records = {}
    for variant in variants:
        name, _, micro_batch = variant.partition(":")
        records[variant] = train(name, int(micro_batch), data)
    if distributed.is_main():
        torch.save(records, out)
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
