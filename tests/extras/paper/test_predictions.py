"""What is counted on paper is what happens, and the times are the formula's; the published figures of NVIDIA's code are
in tests/benchmarks/test_predictions.py."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from benchmarks.scaling import Images, Reader, recipe
from duetgan.extras.paper import predictions as on_paper
from duetgan.extras.paper.predictions import GIB, USABLE, Count, Gpu, Ledger, Operation, count, largest
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.training.engine.speed import Trial
from tests.end_to_end.helpers import train_in_process, write_config

EVERY_GPU = (*on_paper.CONSUMER_GPUS, *on_paper.GPUS)
CPU = torch.device("cpu")
GREY = Images(16, 10, 1, 200)


def reader(images: Images = GREY) -> Any:
    return Reader(images)


def small(name: str, **more: Any) -> Any:
    return recipe(name).changed(precision="fp32", **more)


@pytest.fixture(scope="module")
def counted():
    """The quickstart's GAN with batches of eight."""
    return count(small("quickstart_gan"), reader(), 8)


# --- against what others say and against hand counts


def test_resnet_50_has_its_published_size_and_arithmetic():
    """25.56M parameters and 4.09 GMAC at 224 px: torchvision's table of weights; 3 times that with the backward pass,
    but for the images' own gradient.
    """
    with FakeTensorMode():
        network = Classifier(ModelConfig(name="resnet50"), channels=3, classes=1000, resolution=224)
        with Ledger() as ledger:
            logits = network(torch.zeros(2, 3, 224, 224))
            forward = sum(operation.flop for operation in ledger.operations)
            logits.sum().backward()
    assert sum(p.numel() for p in network.parameters()) == 25_557_032
    assert forward / 2 / 2e9 == pytest.approx(4.09, rel=0.002)
    first = 2 * 2 * 112**2 * 64 * 3 * 49  # of conv1, whose input needs none
    assert sum(operation.flop for operation in ledger.operations) == pytest.approx(3 * forward - first, rel=1e-6)


def test_a_small_networks_bytes_and_arithmetic_are_those_of_a_hand_count():
    """conv 3 -> 8, ReLU, conv 8 -> 4 (4 groups), at 6 x 6, batch 5."""
    first, second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 1, groups=4, bias=False)
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
        hidden = F.relu(first(torch.zeros(5, 3, 6, 6)))
        out = second(hidden)
        kept = ledger.live
        out.sum().backward()
    pixels = 5 * 6 * 6
    images, maps, outputs = (4 * pixels * channels for channels in (3, 8, 4))
    # ReLU's own output alone is kept besides the images: what it was made of is gone
    assert kept == images + maps + outputs
    convolutions = [o for o in ledger.operations if o.flop]
    multiplies = [pixels * 8 * 3 * 9, pixels * 4 * 2]
    assert [o.flop for o in convolutions] == [2 * m for m in (*multiplies, 2 * multiplies[1], multiplies[0])]
    assert {o.kind for o in convolutions} == {"convolution"}
    assert convolutions[0].bytes == images + maps + 4 * 8 * 3 * 9
    relu = next(o for o in ledger.operations if o.bytes == 2 * maps and not o.flop)
    assert relu.kind == "single"


def test_views_and_bare_allocations_are_no_work():
    with FakeTensorMode(), Ledger() as ledger:
        torch.empty(4, 4).t().expand(3, 4, 4).add_(1)
    assert [operation.bytes for operation in ledger.operations] == [2 * 4 * 16]  # of what is expanded its storage


def test_the_time_is_the_slower_of_arithmetic_and_memory_and_an_overhead():
    gpu = Gpu("one", half=4e3, convolution=2e3, single=1e3, bandwidth=100.0)
    bound = [Operation("", "half", 4e3, 10), Operation("", "single", 4e3, 10), Operation("", "half", 4e3, 500)]
    task: Any = None
    counted = Count(1, task, 0, 0, "", [(0.75, bound[:1]), (0.25, bound)])
    assert counted.roofline(gpu) == 0.75 * 1 + 0.25 * (1 + 4 + 5)
    operations = 0.75 + 0.25 * 3
    device = 3.25 / on_paper.CONVOLUTIONS + on_paper.LAUNCH * operations
    assert counted.seconds(gpu) == counted.seconds(gpu, graphs=True) == pytest.approx(device)
    quick = counted._replace(kinds=[(1.0, [Operation("", "half", 0.0, 0)] * 4)])
    assert quick.seconds(gpu) == pytest.approx(4 * on_paper.HOST)  # the GPU waits for Python
    assert quick.seconds(gpu, graphs=True) == pytest.approx(4 * on_paper.LAUNCH)


def test_fused_kernels_are_one_operation_that_reads_and_writes_an_image_once():
    with FakeTensorMode(), Ledger() as ledger:
        kernels = on_paper.Kernels(ledger)
        x = torch.zeros(2, 3, 8, 8, dtype=torch.float16)
        ledger.operations.clear()
        assert kernels.fir(x, "up", 4.0, 1).shape == (2, 3, 16, 16)
        assert kernels.fir(x, "down", 1.0, 1).shape == (2, 3, 4, 4)
        assert kernels.fir(x, "blur", 1.0, 2).shape == (2, 3, 9, 9)
        y, *sums = kernels.activation(x, None, None, None, None, second=x, y=x, sums=(True, True, True))
    assert y is not None
    assert [None if total is None else tuple(total.shape) for total in sums] == [(2, 3, 1, 1), (3,), (2, 1, 8, 8)]
    assert [o.bytes for o in ledger.operations] == [n * x.nbytes for n in (5, 1.25)] + [2 * 6 * (64 + 81), 4 * x.nbytes]
    assert {o.kind for o in ledger.operations} == {"half"}


@pytest.mark.slow
def test_a_gan_with_kernels_has_fewer_operations_bytes_and_no_more_memory():
    config = recipe("r3gan_small").changed(precision="bf16")
    plain, fused = (count(config, reader(), 8, kernels=on) for on in (False, True))
    assert fused.mean(lambda _: 1.0) < 0.9 * plain.mean(lambda _: 1.0)
    assert fused.mean(lambda o: o.bytes) < 0.95 * plain.mean(lambda o: o.bytes)
    assert fused.peak <= plain.peak


# --- against what a real step does


def allocated(config: Any, samples: int, images: Images) -> int:
    """The most bytes that torch's allocator has handed out at once while the same steps were done."""
    with profile(profile_memory=True) as profiler:
        trial = Trial(config, samples, reader(images), CPU)
        for step in (next(iter(trial.step_fractions)), *trial.step_fractions):
            trial.seconds("fp32", step)
    seen, found = profiler.profiler.kineto_results.experimental_event_tree(), []
    while seen:
        event = seen.pop()
        seen += event.children
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size))
    _, total, size = min(found)  # what earlier profiles have left is in the totals
    return max(found, key=lambda allocation: allocation[1])[1] - (total - size)


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("fashion_mnist_classifier_gpu", 32),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("cifar10_gan", 32), ("r3gan_small", 16))),
    ],
)
def test_the_peak_is_that_of_a_real_step(name, samples, monkeypatch):
    monkeypatch.setattr("duetgan.training.classifier.network.fit_first_filters", lambda *_: None)  # there are no images
    config, images = small(name, augment=type(vars(recipe(name))["augment"])()), Images(16, 10, 3, 200)
    counted = count(config, reader(images), samples)
    # The second derivatives of the CPU's grouped convolutions hold one map more than the count: 10.3 % in R3GAN.
    assert counted.peak == pytest.approx(allocated(config, samples, images), rel=0.11)


def test_what_stays_is_weights_average_moments_and_gradients(counted):
    generator, discriminator = (sum(p.nbytes for p in n.parameters()) for n, _ in counted.task.networks().values())
    assert counted.held == pytest.approx(5 * generator + 4 * discriminator, rel=0.01)
    assert counted.held < counted.peak


def test_lazy_penalties_count_by_their_share_and_in_their_phase(counted):
    assert sorted(share for share, _ in counted.kinds) == [1 / 16, 15 / 16]
    phases = [{operation.phase for operation in operations} for _, operations in counted.kinds]
    assert ["discriminator/penalty" in each for each in phases] == [False, True]
    assert counted.phase in phases[1]


def test_the_largest_batch_lies_on_the_line_through_two_counts():
    """At 3 GiB and 0.25 GiB a sample."""
    no_task: Any = None
    small, large = (Count(n, no_task, 0, int((3 + 0.25 * n) * GIB), "", []) for n in (8, 16))
    assert [largest(small, large, gib / USABLE, 4) for gib in (3.2, 4, 12.9, 13.1)] == [0, 4, 36, 40]


# --- the dry run


def test_a_dry_run_tells_of_gpus_where_it_is_asked(tmp_path, packed, capsys):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    options = ["--dry-run", "gpu", "--batch-size", "16", "--micro-batch", "8"]
    assert train_in_process(config, tmp_path / "run", *options) == 0
    out = capsys.readouterr().out
    assert "on paper, 16 samples a GPU" in out
    lines = {gpu.name: next(line for line in out.splitlines() if line.startswith(gpu.name)) for gpu in EVERY_GPU}
    steps = re.search(r"all (\d+) steps", out)
    assert steps
    for name in ("RTX 4090", "RTX 3090", "RTX 3060", "A100"):  # U6: the whole run's time, and how far off it may be
        assert re.search(r"GiB +[\d,]+ +[\d.,e+]+ +[\d.,e+]+ +[\d.]+ (s|min|h)$", lines[name])
    assert on_paper.STATED_ERROR in out
    assert not (tmp_path / "run").exists()
