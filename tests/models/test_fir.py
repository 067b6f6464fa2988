import numpy as np
import pytest
import torch

from duetgan.models import layers
from duetgan.models.layers import blur_fir, downsample_fir, fir_kernel, upsample_fir
from tests.models import reference
from tests.models.helpers import close, draw

CASES = {
    "blur 0": (lambda x: blur_fir(x, padding=0), lambda x: reference.blur(x, pad=0)),
    "blur 1": (lambda x: blur_fir(x, padding=1, gain=4.0), lambda x: reference.blur(x, pad=1, gain=4.0)),
    "blur 2": (lambda x: blur_fir(x, padding=2), lambda x: reference.blur(x, pad=2)),
    "blur 3": (lambda x: blur_fir(x, padding=3, gain=0.5), lambda x: reference.blur(x, pad=3, gain=0.5)),
    "down": (downsample_fir, reference.down),
    "up": (upsample_fir, reference.up),
}
each_case = pytest.mark.parametrize("name", CASES)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def matrix(oracle, shape):
    """The oracle as a matrix: its answers to the unit images [C, H, W] in the columns."""
    units = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    return np.stack([oracle(unit).reshape(-1) for unit in units], axis=1)


def test_fir_kernel_is_the_outer_product_of_1331():
    kernel = fir_kernel(2, 4.0, torch.zeros(1, dtype=torch.float64))
    assert kernel.shape == (2, 1, 4, 4)
    for channel in kernel:
        close(channel[0], np.outer([1, 3, 3, 1], [1, 3, 3, 1]) / 16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in CASES for size in ((4, 6), (8, 4))),
        *((name, (5, 7)) for name in CASES if name != "down"),  # odd sides cannot be halved
        *(("down", (2, 2)), ("up", (1, 1)), ("up", (1, 3))),
    ],
)
def test_values_up_to_the_borders(name, size, layout):
    function, oracle = CASES[name]
    x = draw(2, 3, *size)
    expected = np.stack([oracle(image) for image in x.numpy()])
    x = x.to(memory_format=layout)
    found = function(x)
    close(found, expected)
    close(function(x.clone().requires_grad_()), expected)  # with a graph
    assert found.shape == expected.shape
    assert found.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_case
def test_gradient_is_the_transposed_matrix_and_its_gradient_the_matrix(name, layout):
    function, oracle = CASES[name]
    x = draw(1, 2, 4, 6).to(memory_format=layout).requires_grad_()
    y = function(x)
    dense = matrix(oracle, (2, 4, 6))
    outer = draw(*y.shape, key="outer").to(memory_format=layout).requires_grad_()
    before = x.detach().clone(), outer.detach().clone()
    (grad,) = torch.autograd.grad(y, x, outer, create_graph=True)
    assert all(a.equal(b) for a, b in zip((x, outer), before, strict=True))
    assert all("Resample" in type(tensor.grad_fn).__name__ for tensor in (y, grad))  # a node of our own
    close(grad.reshape(-1), dense.T @ outer.detach().reshape(-1).numpy())
    assert grad.is_contiguous(memory_format=layout)
    again = draw(*x.shape, key="again")
    (second,) = torch.autograd.grad(grad, outer, again)
    close(second.reshape(-1), dense @ again.reshape(-1).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@each_case
def test_lower_precisions_round_the_same_numbers(name, layout, dtype):
    function, _ = CASES[name]
    x = draw(2, 8, 8, 8).to(dtype).to(memory_format=layout).requires_grad_()
    exact = x.detach().double().requires_grad_()
    found, expected = function(x), function(exact)
    assert found.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    outer = draw(*found.shape, key="outer").to(dtype)
    (grad,), (exact_grad,) = torch.autograd.grad(found, x, outer), torch.autograd.grad(expected, exact, outer.double())
    assert grad.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps * exact_grad.abs().max().item()
    torch.testing.assert_close(grad.double(), exact_grad, rtol=0, atol=tolerance)


@each_case
def test_plain_operators_where_there_is_no_graph(name, monkeypatch):
    monkeypatch.setattr(layers, "_Resample", None)  # not looked at
    function, _ = CASES[name]
    function(torch.ones(1, 1, 4, 4))
    with torch.no_grad():
        function(torch.ones(1, 1, 4, 4, requires_grad=True))
