import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.data import make_loader
from duetgan.training.classifier.config import check_batches
from duetgan.training.classifier.task import ClassifierTask, MicroBatch
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.distributed.collectives import is_peer_error
from duetgan.utils.errors import TrainingHalted, UserError
from duetgan.utils.machine import ran_out
from tests.conftest import assert_raises

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")


@pytest.mark.parametrize("share", [1, 2, 7, 12, 64])
def test_parts_are_few_whole_and_alike(share):
    for size in range(1, share + 1):
        found = MicroBatch(size, share).slices()
        assert [row for rows in found for row in range(rows.start, rows.stop)] == list(range(share))
        lengths = [rows.stop - rows.start for rows in found]
        assert len(found) == -(-share // size)
        assert max(lengths) <= size
        assert max(lengths) - min(lengths) <= 1


def test_a_size_that_divides_gives_its_own_parts_and_halves_down_to_one():
    assert MicroBatch(4, 12).slices() == [slice(0, 4), slice(4, 8), slice(8, 12)]
    for setting in (None, 99, "auto"):
        assert MicroBatch(setting, 12).slices() == [slice(0, 12)]
    micro = MicroBatch("auto", 12)
    sizes = []
    for _ in range(4):
        told = micro.halve()
        sizes.append(micro.size)
    assert sizes == [6, 3, 2, 1]
    assert "memory ran out with 2 samples" in told
    assert "BatchNorm" in told
    assert_raises(TrainingHalted, "single sample", micro.halve)
    other = MicroBatch("auto", 12)
    other.load_state_dict(MicroBatch("auto", 12).state_dict() | {"size": 3})
    assert other.size == 3


def test_what_says_that_memory_ran_out():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    libraries = ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "Cuda failure 2 'out of memory'")
    of_libraries = [*map(RuntimeError, libraries), torch.AcceleratorError("CUDA error: out of memory")]
    for error in (refused.value, torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), *of_libraries):
        assert ran_out(error)
    assert not is_peer_error(torch.distributed.DistBackendError(libraries[1]))
    assert is_peer_error(torch.distributed.DistBackendError("unhandled system error"))
    for other in (RuntimeError("shapes differ"), ValueError("DefaultCPUAllocator: can't allocate memory")):
        assert not ran_out(other)


# --- in the classifier's step

TREE: dict[str, Any] = {
    "task": "classifier",
    "batch_size": 12,
    "steps": 20,
    "model": {"stem": "small-stride2"},
    "augment": {"flip": True, "shift": 1, "trivial_augment": True, "mixup": 0.4},
    "optimizer": {"name": "sgd", "lr": 0.05, "warmup_steps": 0},
}


def config_of(**more) -> Any:
    return build_run_config(TREE | more, [], "x")


def build(packed, **more):
    config, reader = config_of(data={"path": str(packed / "train.lmdb")}, **more), Dataset(packed / "train.lmdb")
    return ClassifierTask(config, reader, None, CPU), make_loader(config, reader, CPU)


def full_above(task, limit, error=None):
    """Memory runs out in the middle of a forward pass of more than `limit` samples. Returns the tried sizes."""
    tried = []

    def hook(_module, inputs):
        tried.append(len(inputs[0]))
        if len(inputs[0]) > limit:
            raise error or torch.OutOfMemoryError("out of memory")

    task.model.network.layer3.register_forward_pre_hook(hook)  # statistics of the layers before have changed by then
    return tried


def state_of(task):
    return copy.deepcopy({name: part.state_dict() for name, part in task.registry().items() if name != "micro_batch"})


def test_a_step_without_memory_is_repeated_from_its_beginning(packed, capsys):
    task, loader = build(packed, micro_batch="auto")
    smaller, other_loader = build(packed, micro_batch=3)
    tried = full_above(task, 3)
    for step in range(2):
        found = task.step(loader, step)
        expected = smaller.step(other_loader, step)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert tried == [12, 6, 3, 3, 3, 3, 3, 3, 3, 3]
    torch.testing.assert_close(state_of(task), state_of(smaller), rtol=0, atol=0)
    told = capsys.readouterr().err.splitlines()
    assert len([line for line in told if "memory ran out" in line]) == 2
    assert "BatchNorm normalises by, and averages, the statistics of 3 samples instead of 6" in told[-1]
    # what was found stays when the run is resumed
    resumed, _ = build(packed, micro_batch="auto")
    resumed.registry()["micro_batch"].load_state_dict(task.registry()["micro_batch"].state_dict())
    assert resumed.micro.slices() == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12)]


def test_several_processes_try_before_they_send(packed, monkeypatch):
    """In two steps, so that all ranks use the same parts: gradients that a rank has sent cannot be taken back."""
    task, loader = build(packed, micro_batch="auto")
    smaller, other_loader = build(packed, micro_batch=12)
    task.step(loader, 0)
    smaller.step(other_loader, 0)
    replica: Any = SimpleNamespace(no_sync=nullcontext)
    task.replica = replica
    task.micro.retry()
    smaller.micro.size = 3
    tried = full_above(task, 3)
    sent: list[int] = []
    monkeypatch.setattr(task, "_sum_gradients", lambda: sent.append(len(tried)))
    for step in range(1, 5):
        task.step(loader, step)
        smaller.step(other_loader, step)
    assert tried == [12, 6, *[3] * 4 * 6]  # the first two steps once more
    assert sent == [10, 18, 22, 26]
    torch.testing.assert_close(state_of(task), state_of(smaller), rtol=0, atol=0)


def test_memory_that_runs_out_between_micro_batches(packed):
    """Gradients of the parts before must not stay."""
    task, loader = build(packed, micro_batch="auto")
    smaller, other_loader = build(packed, micro_batch=3)
    task.micro.size = 6
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 1 bytes")

    task.model.network.layer3.register_forward_pre_hook(hook)
    task.step(loader, 0)
    smaller.step(other_loader, 0)
    assert len(calls) == 2 + 4
    torch.testing.assert_close(state_of(task), state_of(smaller), rtol=0, atol=0)


def test_other_errors_are_not_memory(packed):
    task, loader = build(packed, micro_batch="auto")
    tried = full_above(task, 0, RuntimeError("shapes differ"))
    assert_raises(RuntimeError, "shapes differ", task.step, loader, 0)
    assert tried == [12]


def test_batches_that_processes_cannot_share():
    config = config_of(micro_batch="auto")
    check_batches(config, 1)
    assert_raises(UserError, "set sync_bn off", check_batches, config, 2)
    check_batches(config_of(micro_batch="auto", sync_bn="off"), 2)
    with pytest.raises(UserError, match="each process holds 3; make batch_size a multiple of 8"):
        check_batches(config_of(), 4)
    check_batches(config_of(augment={"flip": True}), 4)
