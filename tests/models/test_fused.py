"""The Triton kernels against plain code: in Triton's interpreter, compiled for GPUs without one, and on a GPU."""

import importlib.util
import re
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from duetgan.models import layers
from duetgan.models.layers import LEAKY_SLOPE, activated_convolution, fused, scaled_activation
from duetgan.models.layers.convolution import Geometry, penalised
from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from tests.models.helpers import draw, randomised

pytest.importorskip("triton")
LAYOUTS = (torch.contiguous_format, torch.channels_last)
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def load_kernels(name):
    """A copy of the module of kernels, for an environment variable that its decorators read."""
    path = Path(fused.__file__).with_name("triton_kernels.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpret(monkeypatch, tile=64):
    """Let Triton's interpreter run the kernels on CPU tensors, in tiles of so many elements."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = load_kernels("interpreted_kernels")
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "TILES", 2)
    monkeypatch.setattr(fused, "kernels", lambda: module)
    return module


@pytest.fixture
def kernels(monkeypatch):
    """The kernels in place of plain code."""
    monkeypatch.setattr(layers, "uses_kernels", lambda _: True)
    return interpret(monkeypatch)


def inputs(shape, dtype=torch.float64, *, layout=LAYOUTS[0], noises=None):
    """x, scale, bias and noise of an activation."""
    n, c, *sides = shape
    shapes = (shape, (n, c, 1, 1), (c,), (n if noises is None else noises, 1, *sides))
    x, *rest = (draw(*size, key=f"{size}").to(dtype) for size in shapes)
    return [x.to(memory_format=layout), *rest]


def formula(x, scale, bias, noise, limit=None):
    return layers.clamped(F.leaky_relu(x * scale + bias[:, None, None] + noise, LEAKY_SLOPE), limit)


def derivatives(function, tensors, limit):
    """The output, its gradients for an outer one, and the gradients of their squares."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    y = function(*leaves, limit)
    first = torch.autograd.grad(y, leaves, draw(*y.shape, key="outer").to(y.dtype), create_graph=True)
    squares = torch.stack([gradient.square().sum() for gradient in first])
    return [y, *first, *torch.autograd.grad(squares.sum(), leaves[:2])]


# --- the interpreter

SHAPES = {"blur": (1, 2, 5, 7), "down": (2, 1, 6, 4), "up": (1, 3, 3, 2)}
FILTERS = [*(("blur", padding, 0.5) for padding in range(4)), ("down", 1, 1.0), ("up", 1, 4.0)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resampling_and_its_derivatives(monkeypatch, layout):
    """Values to the borders, gradients, their gradients, half precision, other strides, and an empty batch."""
    functions = {
        "blur": lambda x, padding, gain: layers.blur_fir(x, padding=padding, gain=gain),
        "down": lambda x, *_: layers.downsample_fir(x),
        "up": lambda x, *_: layers.upsample_fir(x),
    }
    module = interpret(monkeypatch, tile=16)
    for kind, padding, gain in FILTERS:
        x = draw(*SHAPES[kind], key=kind).to(memory_format=layout)
        found = []
        for use in (True, False):
            monkeypatch.setattr(layers, "uses_kernels", lambda _, use=use: use)
            leaf = x.clone().requires_grad_()
            y = functions[kind](leaf, padding, gain)
            outer = draw(*y.shape, key="outer").to(memory_format=layout).requires_grad_()
            (gradient,) = torch.autograd.grad(y, leaf, outer, create_graph=True)
            (second,) = torch.autograd.grad(gradient, outer, x)
            found.append([y, gradient, second])
            assert y.is_contiguous(memory_format=layout)
        torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)
        for dtype in (torch.float16, torch.bfloat16):
            small = x.to(dtype)
            expected = layers._run(small.double(), kind, gain, padding)
            half = module.fir(small, kind, gain, padding).double()
            torch.testing.assert_close(half, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    wide = draw(2, 3, 4, 8).to(memory_format=layout)
    expected = layers._run(wide[..., ::2], "down", 1.0, 1)
    torch.testing.assert_close(module.fir(wide[..., ::2], "down", 1.0, 1), expected, rtol=1e-13, atol=1e-13)
    assert module.fir(wide[:0], "up", 4.0, 1).shape == (0, 3, 8, 16)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_and_its_derivatives(layout):
    """Odd sides, several tiles and programs, noise of each sample or of all, an empty batch, and other strides."""
    for shape, noises in (((2, 5, 3, 7), None), ((2, 33, 1, 2), 1), ((0, 3, 4, 4), None)):
        tensors = inputs(shape, layout=layout, noises=noises)
        for limit in (None, 1.5):
            found = derivatives(scaled_activation, tensors, limit)
            torch.testing.assert_close(found, derivatives(formula, tensors, limit), rtol=1e-12, atol=1e-12)
            assert found[0].is_contiguous(memory_format=layout)
    _, scale, bias, noise = inputs((2, 5, 3, 7))
    sliced = inputs((2, 5, 6, 14), layout=layout)[0][..., ::2, ::2]
    found = scaled_activation(sliced, scale, bias, noise, limit=None)
    torch.testing.assert_close(found, formula(sliced, scale, bias, noise), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("dtype", "layout"), [(torch.float16, LAYOUTS[1]), (torch.bfloat16, LAYOUTS[0])])
def test_half_precision_is_rounded_once(dtype, layout):
    tensors = inputs((2, 5, 3, 4), dtype, layout=layout)
    found = derivatives(scaled_activation, tensors, 2.0)
    expected = derivatives(formula, [x.double() for x in tensors], 2.0)
    for a, b in zip(found[:5], expected[:5], strict=True):  # the first derivatives' squares are sums of rounded ones
        torch.testing.assert_close(a.double(), b, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    x, scale, bias, noise = inputs((1, 1, 2, 2), dtype)
    assert fused.Activation.apply(y := x.clone(), None, bias, None, None).data_ptr() == y.data_ptr()  # in place
    assert scaled_activation(x * torch.nan, scale, bias, noise, 1.0).isnan().all()


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(layout):
    def activation(x, scale, bias, noise):
        return scaled_activation(x.to(memory_format=layout), scale, bias, noise, 1.7)

    def convolution(x, weight, bias):
        with penalised():
            return activated_convolution(x.to(memory_format=layout), weight, bias, Geometry(), 1.3)

    tensors = [x.requires_grad_() for x in inputs((2, 3, 2, 3))]
    filters = [draw(2, 3, 2, 2), draw(2, 3, 1, 1, key="weight"), draw(2, key="bias")]
    filters = [x.requires_grad_() for x in filters]
    for function, leaves in ((activation, tensors), (convolution, filters)):
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_penalties_of_whole_networks_are_those_of_plain_code(monkeypatch):
    """Path lengths through the generator and R1 through the discriminator, in float64."""
    size: Any = {"channel_base": 8, "channel_max": 1, "conv_clamp": 1.0, "clamp_always": True}
    shape: Any = {"resolution": 8, "channels": 1, "classes": 0}
    generator = randomised(Generator(GeneratorConfig(z_dim=4, w_dim=4, mapping_layers=1, **size), **shape))
    discriminator = randomised(Discriminator(DiscriminatorConfig(minibatch_std_group=1, **size), **shape))
    networks = [generator, discriminator]

    def gradients():
        ws = draw(2, generator.num_ws, 4, key="w").requires_grad_()
        with penalised():
            images = generator.synthesis(ws, "const")
            (lengths,) = torch.autograd.grad(images.square().sum(), ws, create_graph=True)
            reals = images.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(discriminator(reals).sum(), reals, create_graph=True)
        loss = lengths.square().sum() + slopes.square().sum() + discriminator(images).sum()
        parameters = [p for network in networks for p in network.parameters()]
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    expected = gradients()
    module = interpret(monkeypatch, tile=512)
    names = ("fir", "activation")
    launches = {name: Mock(side_effect=getattr(module, name)) for name in names}
    for name, launch in launches.items():
        monkeypatch.setattr(module, name, launch)
    monkeypatch.setattr(layers, "uses_kernels", lambda _: True)
    torch.testing.assert_close(gradients(), expected, rtol=1e-9, atol=1e-9)
    assert min(launch.call_count for launch in launches.values()) >= 10


def test_a_device_whose_kernels_fail_runs_plain_code_and_the_plan_says_so(monkeypatch):
    fused.problem.cache_clear()
    assert fused.describe(CPU) == "plain, because cpu is not a CUDA device"
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "duetgan.models.layers.triton_kernels", raising=False)
    monkeypatch.setattr(torch, "ones", Mock())  # an image of the device
    assert fused.describe(CUDA).startswith("plain, because ")
    monkeypatch.setattr(fused, "setting", "off")
    assert fused.describe(CUDA) == "plain, because kernels is off"
    monkeypatch.undo()
    fused.problem.cache_clear()


def test_kernels_are_used_on_cuda_unless_they_are_off(monkeypatch):
    monkeypatch.setattr(fused, "Tensor", SimpleNamespace)  # stands for a tensor's class
    for setting, is_cuda, expected in (("auto", True, True), ("auto", False, False), ("off", True, False)):
        monkeypatch.setattr(fused, "setting", setting)
        image: Any = SimpleNamespace(is_cuda=is_cuda)
        assert fused.can_use(image) is expected
    assert not fused.can_use(torch.ones(1))  # another class


# --- without a GPU, but with its compiler


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_and_load_sixteen_bytes_at_once(monkeypatch, tmp_path, capability):
    """fp16 in channels_last, to machine code by the assembler in Triton's wheel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    module = load_kernels("compiled_kernels")
    tiles: dict[str, Any] = {"slope": 0.2, "limit": 256.0, "tiles": 8, "c_block": 64, "p_block": 16}
    tiles["channel_stride"] = 1
    sums = {"scale_ptr": "*fp32", "second_scale_ptr": "*fp32", "bias_ptr": "*fp32", "noise_ptr": "*fp32"}
    sums |= {f"{name}_sums_ptr": "*fp32" for name in ("scale", "bias", "noise")}
    fir: dict[str, Any] = {"padding": 1, "gain": 1 / 64, "block": 1024}
    forward = dict.fromkeys(("second_ptr", "second_scale_ptr", "y_ptr"))
    totals = dict.fromkeys(f"{name}_sums_ptr" for name in ("scale", "bias", "noise"))
    gradient = dict.fromkeys(("second_scale_ptr", "bias_ptr", "noise_ptr"))
    cases = [(module._fir, fir | {"kind": kind}) for kind in ("blur", "down", "up")]
    cases += [(module._activation, tiles | more) for more in (forward | totals, gradient, totals)]
    for kernel, constants in cases:
        signature, attributes = {}, {}
        for index, name in enumerate(kernel.arg_names):
            kind = "constexpr" if name in constants else "i32"
            if name.endswith("_ptr") and name not in constants:
                kind = sums.get(name, "*fp16")
            signature[name] = kind
            if kind != "constexpr":
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        built = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})
        code = built.asm["ptx"]
        assert len(built.asm["cubin"]) > 1000
        assert re.search(r"ld\.global\.v4", code), kernel
        assert not re.search(r"ld\.global(\.\w+)*\.b16", code), kernel  # every image is loaded in vectors
        assert re.search(r"st\.global\.v4", code), kernel


# --- with a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_kernels_equal_plain_code_and_can_be_captured():
    assert fused.describe(CUDA) == "Triton"
    for layout, dtype in product(LAYOUTS, (torch.float32, torch.float16, torch.bfloat16)):
        tensors = [x.to(CUDA) for x in inputs((3, 64, 17, 9), dtype, layout=layout)]
        rounding = 4 * torch.finfo(dtype).eps
        found = derivatives(scaled_activation, tensors, None)[:5]
        expected = derivatives(formula, [x.double() for x in tensors], None)[:5]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=rounding, atol=rounding * b.abs().max().item())
        for kind, padding in (("blur", 0), ("blur", 2), ("down", 1), ("up", 1)):
            x = tensors[0][:, :, :16, :8]
            expected = layers._run(x.double().cpu(), kind, 4.0, padding)
            found = layers._run(x, kind, 4.0, padding)
            torch.testing.assert_close(found.double().cpu(), expected, rtol=rounding, atol=10 * rounding)
    static = torch.randn(2, 32, 16, 16, device=CUDA, dtype=torch.float16)

    def run():
        return layers.blur_fir(layers.upsample_fir(static), padding=1)

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert torch.equal(captured, expected)
