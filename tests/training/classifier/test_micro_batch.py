import copy
from typing import Any

import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.data import make_loader
from duetgan.training.classifier.config import check_batches
from duetgan.training.classifier.inputs import MicroBatchSize
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.distributed.collectives import is_peer_error
from duetgan.utils.errors import TrainingHalted, UserError
from duetgan.utils.machine import ran_out
from tests.conftest import assert_raises
from tests.end_to_end.helpers import differing

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")


@pytest.mark.parametrize("share", [1, 2, 7, 12, 64])
def test_parts_are_few_whole_and_alike(share):
    for size in range(1, share + 1):
        found = MicroBatchSize(size, share).slices()
        assert [row for rows in found for row in range(rows.start, rows.stop)] == list(range(share))
        lengths = [rows.stop - rows.start for rows in found]
        assert len(found) == -(-share // size)
        assert max(lengths) <= size
        assert max(lengths) - min(lengths) <= 1


def test_a_size_that_divides_gives_its_own_parts_and_halves_down_to_one(capsys):
    assert MicroBatchSize(4, 12).slices() == [slice(0, 4), slice(4, 8), slice(8, 12)]
    for setting in (None, 99, "auto"):
        assert MicroBatchSize(setting, 12).slices() == [slice(0, 12)]
    micro, sizes = MicroBatchSize("auto", 12), []

    def attempt():
        sizes.append(micro.size)
        raise MemoryError

    assert_raises(TrainingHalted, "single sample", micro.find, attempt)
    assert sizes == [12, 6, 3, 2, 1]
    told = capsys.readouterr().err
    assert "memory ran out with 2 samples" in told
    assert "BatchNorm" in told
    MicroBatchSize(12, 12).find(attempt)  # a number is not looked for
    other = MicroBatchSize("auto", 12)
    for size, expected in ((3, 3), (20, 12)):  # the latter of a run with larger batches
        other.load_state_dict({"size": size})
        assert other.size == expected


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


def test_a_size_that_fits_is_found_before_the_first_step(packed, capsys):
    task, loader = build(packed, micro_batch="auto")
    smaller, other_loader = build(packed, micro_batch=3)
    tried = full_above(task, 3)
    for step in range(2):
        found = task.step(loader, step)
        expected = smaller.step(other_loader, step)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert tried == [12, 6, *[3] * 3 * 4]
    torch.testing.assert_close(state_of(task), state_of(smaller), rtol=0, atol=0)
    told = capsys.readouterr().err.splitlines()
    assert len([line for line in told if "memory ran out" in line]) == 2
    assert "BatchNorm computes its statistics over 3 samples instead of 6" in told[-1]
    # what was found stays when the run is resumed
    resumed, _ = build(packed, micro_batch="auto")
    resumed.registry()["micro_batch"].load_state_dict(task.registry()["micro_batch"].state_dict())
    assert resumed.inputs.micro.slices() == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12)]


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_that_cut_through_pairs_are_rows_of_the_whole_batch(packed, size):
    task, loader = build(packed, augment={"mixup": 0.4, "cutmix": 1.0})
    samples = task.samples(next(loader), 0)
    (whole,) = task.inputs.micro_batches(samples)
    task.inputs.micro.size = size
    parts = list(task.inputs.micro_batches(samples))
    torch.testing.assert_close(torch.cat([part.images for part in parts]), whole.images)
    for name in ("labels", "partner_labels", "fraction"):
        found = torch.cat([getattr(part.targets, name) for part in parts])
        assert torch.equal(found, getattr(whole.targets, name))
    assert [part.is_last for part in parts] == [False] * (12 // size - 1) + [True]
    assert whole.is_last


def test_it_is_looked_for_again_where_other_parameters_train(packed):
    """Gradients of the parts before memory ran out must not stay."""
    unfreeze = {"finetune": {"unfreeze": {"head": 0, "layer4": 2}}}
    task, loader = build(packed, micro_batch="auto", **unfreeze)
    smaller, other_loader = build(packed, micro_batch=12, **unfreeze)
    calls = []
    task.inputs.micro.size = 6

    def hook(*_):
        calls.append(1)
        if len(calls) == 8:  # at step 2, in its second part: after an attempt and two steps
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 1 bytes")

    task.model.network.layer3.register_forward_pre_hook(hook)
    for step in range(4):
        smaller.inputs.micro.size = 6 if step < 2 else 3
        found, expected = task.step(loader, step), smaller.step(other_loader, step)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(calls) == 8 + 4 + 4 * 2
    assert differing(state_of(task), state_of(smaller)) == []


def test_other_errors_are_not_memory(packed):
    task, loader = build(packed, micro_batch="auto")
    tried = full_above(task, 0, RuntimeError("shapes differ"))
    assert_raises(RuntimeError, "shapes differ", task.step, loader, 0)
    assert tried == [12]


def test_batches_that_processes_cannot_share():
    config = config_of(micro_batch="auto")
    check_batches(config, 1)
    assert_raises(UserError, "micro_batch auto is for one process", check_batches, config, 2)
    with pytest.raises(UserError, match="each process holds 3; make batch_size a multiple of 8"):
        check_batches(config_of(), 4)
    check_batches(config_of(augment={"flip": True}), 4)
