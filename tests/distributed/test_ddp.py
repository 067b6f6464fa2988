"""How gradients travel between two gloo ranks: where DDP goes wrong, compression, unfreezing, memory that runs out.
The classifiers are slim ones.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.models.hooks import LayerStatistics
from duetgan.training.base.data import make_loader
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.outputs import over_ranks
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.gradients import GradientExchange
from duetgan.utils.errors import UserError
from tests.distributed import test_classifier_oracle as classifiers
from tests.distributed import worker
from tests.distributed.test_oracle import CLASSES, TOLERANCE
from tests.distributed.worker import largest_difference
from tests.end_to_end.ranks import together
from tests.slim import slim_down

worker.TREES["classifier-plain"] = classifiers.SMALL
worker.TREES["classifier-thaw"] = classifiers.SMALL | {"finetune": {"unfreeze": {"head": 0, "layer4": 1, "layer2": 3}}}
STEPS = 5
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux"),
    pytest.mark.timeout(600),  # everything is recorded at once
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one and two ranks recorded, from 32 random 16 px images of three classes."""
    folder = tmp_path_factory.mktemp("ddp")
    images = np.random.default_rng(0).integers(0, 256, (32, 3, 16, 16), dtype=np.uint8)
    pack_arrays(folder / "data.lmdb", images, labels=np.arange(32) % 3, classes=CLASSES, smallest=8)
    result = {}
    for processes in (1, 2):
        out = folder / f"{processes}.pt"
        together(be_a_rank, out, str(folder / "data.lmdb"), world=processes, output=out.with_suffix(".txt"))
        result[processes] = torch.load(out, weights_only=True)
    return result


def gathered(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor."""
    everyone = [torch.empty_like(tensor) for _ in range(collectives.world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


def two_losses(way: str) -> list[Tensor]:
    """Each rank's gradient, of two losses on its own samples."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    replica = DistributedDataParallel(model)
    x = torch.randn(2, 6, 4)[collectives.rank()]
    output = replica(x)
    first, second = output.square().mean(), output.sin().mean()
    if way == "one forward, two backwards":
        first.backward(retain_graph=True)
        second.backward()
    elif way == "two forwards, two backwards":
        output, other = replica(x), replica(x + 1)
        output.square().mean().backward()
        other.sin().mean().backward()
    else:
        (first + second).backward()
    return gathered(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one forward, two backwards", "two forwards, two backwards"])
def test_two_synchronised_backwards_leave_different_gradients_without_an_error(found, way):
    """N2: if this fails, torch has mended issue 47260: docs/distributed.md and the README's reason can go."""
    first, second = found[2]["two losses"][way]
    assert (first - second).abs().max() > 1e-2
    first, second = found[2]["two losses"]["their sum"]
    assert torch.equal(first, second)


def small_task(data: str) -> ClassifierTask:
    config: Any = build_run_config(worker.TREES["classifier-plain"] | {"data": {"path": data}}, [], "test")
    return ClassifierTask(config, Dataset(data), None, torch.device("cpu"))


def logged(data: str) -> dict[str, float]:
    """Statistics of the head in one step, over all ranks."""
    task = small_task(data)
    statistics = LayerStatistics({"head": task.model.head})
    with statistics.watching(scale=1.0):
        task.step(make_loader(task.config, task.dataset, task.precision.device), 0)
    return statistics.collect(over_ranks(statistics.packed()))


def test_layers_receive_the_same_gradients_on_any_number_of_ranks(found):
    whole, ranks = found[1]["logged"], found[2]["logged"]
    assert whole["head/gradient_std"] > 1e-3
    assert ranks == pytest.approx(whole, rel=1e-9, abs=1e-12)
    told = found[2]["unused"]
    assert told.startswith("no gradient reaches extra.weight, extra.bias:")
    assert "finetune.freeze" in told


def unused(data: str) -> str:
    """What is said of a layer that no gradient reaches."""
    task = small_task(data)
    task.model.network.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UserError) as refused:
        task.step(make_loader(task.config, task.dataset, task.precision.device), 0)
    return str(refused.value)


def exchanged(compress: Any) -> dict[str, Tensor]:
    """A rank's own gradients, and what the exchange makes of them."""
    parameters: list[Tensor] = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 5, 2)]
    exchange = GradientExchange(parameters, missing="zeros", compress=compress)
    weights = torch.randn(10, generator=torch.Generator().manual_seed(collectives.rank()))
    exchange.overlap()
    (torch.cat(parameters[:2]) * weights[:8]).sum().backward()  # the last one has no gradient
    own = torch.cat([p.grad.clone() for p in parameters[:2] if p.grad is not None] + [torch.zeros(2)])
    exchange.finish()
    return {"own": torch.stack(gathered(own)), "sum": torch.cat([p.grad for p in parameters if p.grad is not None])}


def test_the_exchange_adds_what_bfloat16_keeps_at_an_agreed_size(found):
    exact, rounded = found[2]["exchanged off"], found[2]["exchanged bf16"]
    assert torch.equal(exact["sum"], exact["own"].sum(dim=0))
    first, second = rounded["own"].bfloat16()
    assert torch.equal(rounded["sum"], (first + second).to(rounded["sum"].dtype))
    assert not torch.equal(exact["sum"], rounded["sum"])


@pytest.mark.parametrize("part", ["metrics", "gradients", "weights", "average"])
def test_unfreezing_on_two_ranks_gives_one_process_result(found, part):
    whole, ranks = found[1]["classifier-thaw"], found[2]["classifier-thaw"]
    sizes = [len(record["gradients"]) for record in whole]
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4]
    assert largest_difference(whole, ranks, part) < TOLERANCE


def messages(folder: Path) -> list[dict[str, Any]]:
    """What each rank gets of every kind of message."""
    rank, file = collectives.rank(), folder / "made"
    first, second = torch.full((2,), 1.0 + rank), torch.full((3, 1), 4.0 * rank, dtype=torch.float32)
    collectives.average_([first, second])

    def make() -> bool:
        existed = file.exists()
        file.touch()
        return existed

    errors = []
    for ranks in ((1,), (0, 1)):
        try:
            with collectives.raising_together():
                if rank in ranks:
                    raise UserError(f"of rank {rank}")
        except UserError as error:
            errors.append((str(error), error.of_rank))
    found = {
        "max": collectives.all_reduce_max(3 - rank),
        "broadcast": collectives.broadcast_object({"rank": rank}),
        "main": collectives.from_main_process(lambda: rank + 3),
        "to main": collectives.gather_to_main(lambda: rank + 5),
        "main first": collectives.main_first(make),
        "average": [first.tolist(), second.tolist()],
        "errors": errors,
        "unequal": collectives.unequal_ranks({"a": [torch.ones(2)], "b": [first + rank]}, first.device),
    }
    return collectives.gather_objects(found)


def test_messages_between_two_ranks(found):
    same = {"max": 3, "broadcast": {"rank": 0}, "main": 3, "average": [[1.5, 1.5], [[2.0]] * 3], "unequal": {"b": [1]}}
    same["errors"] = [("of rank 1", 1), ("of rank 0", 0)]
    expected = [same | {"to main": [5, 6], "main first": False}, same | {"to main": [], "main first": True}]
    assert found[2]["messages"] == expected


def be_a_rank(out: Path, data: str) -> None:
    slim_down()
    torch.set_default_dtype(torch.float64)
    collectives.start(torch.device("cpu"))
    found: dict[str, Any] = {"classifier-thaw": worker.train("classifier-thaw", 0, data, STEPS), "logged": logged(data)}
    if collectives.world_size() > 1:
        ways = ("one forward, two backwards", "two forwards, two backwards", "their sum")
        found["two losses"] = {way: two_losses(way) for way in ways}
        found |= {f"exchanged {compress}": exchanged(compress) for compress in ("off", "bf16")}
        found |= {"unused": unused(data), "messages": messages(out.parent)}
    if collectives.is_main():
        torch.save(found, out)
    collectives.stop()
