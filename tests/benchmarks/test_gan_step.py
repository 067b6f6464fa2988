"""The GAN step's benchmark at a tiny size: it counts what it says, and every figure it promises is there."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gan_step
from benchmarks.gan.convolutions import Recorder, bare_seconds, flops
from duetgan.utils.config.yaml_files import read_yaml

CPU = torch.device("cpu")
LAYOUTS = (torch.channels_last, torch.contiguous_format)
CASES = {  # kernel, stride, padding, transposed, pixels
    "3x3": (3, 1, 1, False, 8),
    "1x1": (1, 1, 0, False, 8),
    "strided": (3, 2, 0, False, 9),
    "strided, even": (3, 2, 1, False, 8),
    "transposed": (3, 2, 0, True, 5),
}


def convolution(name, layout=torch.channels_last):
    """x, weight and the convolution of them."""
    kernel, stride, padding, transposed, size = CASES[name]
    x = torch.randn(2, 3, size, size).to(memory_format=layout).requires_grad_()
    weight = torch.randn(*((3, 5) if transposed else (5, 3)), kernel, kernel).to(memory_format=layout).requires_grad_()
    function = F.conv_transpose2d if transposed else F.conv2d
    return x, weight, lambda: function(x, weight, stride=stride, padding=padding)


def record(work, layout=torch.channels_last):
    with Recorder(channels_last=layout is torch.channels_last) as recorder:
        work()
    return recorder.calls


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_and_its_derivatives_are_counted_as_torch_counts_them(name, layout):
    x, weight, run = convolution(name, layout)
    for inputs in ((), (x,), (weight,), (x, weight)):

        def work(inputs=inputs):
            y = run()
            if inputs:
                torch.autograd.grad(y.square().sum(), inputs)

        with FlopCounterMode(display=False) as counter:
            work()
        calls = record(work, layout)
        assert flops(calls) == counter.get_total_flops() == (1 + len(inputs)) * flops(record(run))
        assert sum(calls.values()) == (2 if inputs else 1)
        call = next(iter(calls))
        assert call.x.stride == x.stride()
        assert call.output_shape() == run().shape

    # second derivative: the convolution, its gradient; of that the convolution again and the weight's gradient
    def penalty():
        (grad,) = torch.autograd.grad(run().sum(), x, create_graph=True)
        grad.square().sum().backward()

    calls = record(penalty, layout)
    assert flops(calls) == pytest.approx(4 * flops(record(run)))
    assert bare_seconds(calls, CPU, runs=1) > 0
    of_weight = [call for call in calls if call.grad is not None and call.wanted == (False, True, False)]
    assert {call.weight.shape[2:] for call in of_weight} == {tuple(weight.shape[2:])}


@pytest.fixture
def tiny(tmp_path):
    """A recipe of a few channels, with every penalty in every second step."""
    tree = read_yaml("configs/bench_gan_step.yaml")
    tree["batch_size"] = 8
    tree["generator"] |= {"z_dim": 4, "w_dim": 4, "mapping_layers": 1, "channel_max": 4}
    tree["discriminator"] |= {"channel_max": 4}
    tree["loss"] |= {"r1_interval": 2, "path_length_interval": 2}
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_every_figure_is_there_and_the_last_line_is_flat(tiny, last_line, monkeypatch):
    monkeypatch.setattr(gan_step, "peak_memory", lambda *_: (3.0, 2.0))  # a process each: not here
    result = last_line(gan_step, ["--config", str(tiny), "--repeats", "1", "--steps", "2", "--size", "8", "--json"])
    for name in ("bf16", "fp32", "fp32_nchw"):
        own = {key.removeprefix(f"{name}_"): value for key, value in result.items() if key.startswith(f"{name}_")}
        assert 0 < own["conv_share"] < 1.5
        phases = {key: value for key, value in own.items() if key.startswith("phase_")}
        assert sum(phases.values()) == pytest.approx(own["step_ms"])
        assert own["images_per_second"] == pytest.approx(8000 / own["step_ms"])
        assert own["gflops"] / own["bare_gflops"] == pytest.approx(own["conv_share"], rel=0.01)
        assert phases["phase_generator_path_length_ms"] > 0
        assert phases["phase_discriminator_penalty_ms"] > 0
        assert own["peak_mib"] == 3
    ratio = result["fp32_nchw_step_ms"] / result["bf16_step_ms"]
    assert result["bf16_vs_fp32_nchw_ratio"] == pytest.approx(ratio)
