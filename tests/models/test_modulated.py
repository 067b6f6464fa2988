import pytest
import torch

from duetgan.models.layers.stylegan2 import ModulatedConv2d, StyledLayer
from duetgan.utils.seeding import forked
from tests.models import reference
from tests.models.helpers import close, draw, randomised

FORMS = [(3, True, False), (3, True, True), (1, True, False), (1, False, False), (3, False, False), (3, False, True)]


def whole(layer, x, w, gain=1.0):
    """The layer's output with the demodulation applied."""
    out, scale = layer(x, w, gain)
    return out if scale is None else out * scale


@pytest.mark.parametrize("style", [1.0, 1e-4])  # so small that 1e-8 decides: one on unscaled weights would be seen
@pytest.mark.parametrize(("size", "demodulate", "upsample"), FORMS)
def test_modulated_convolution_equals_the_fused_form_sample_by_sample(size, demodulate, upsample, style):
    layer = randomised(ModulatedConv2d(3, 5, size, 6, demodulate=demodulate, upsample=upsample))
    with torch.no_grad():
        layer.affine.weight.mul_(style)
        layer.affine.bias.mul_(style)
    x, w = draw(4, 3, 5, 4), draw(4, 6, key="w")
    expected = reference.modulated(layer, x.numpy(), w.numpy(), demodulate=demodulate, upsample=upsample)
    close(whole(layer, x, w), expected, 1e-10)


def test_the_gain_scales_the_demodulated_output():
    layer = randomised(ModulatedConv2d(3, 5, 3, 6))
    x, w = draw(2, 3, 4, 4), draw(2, 6, key="w")
    torch.testing.assert_close(whole(layer, x, w, 1.7), 1.7 * whole(layer, x, w), rtol=1e-12, atol=1e-12)


def test_style_starts_at_one_and_demodulated_output_has_unit_scale_whatever_it_is():
    with forked(0, "init", "modulated"):
        layer = ModulatedConv2d(64, 64, 3, 16).double()
    assert layer.affine(torch.zeros(1, 16).double()).eq(1).all()
    x = draw(2, 64, 16, 16)
    for factor in (1.0, 50.0):
        out = whole(layer, x, factor * draw(2, 16, key="w"))
        assert out[:, :, 1:-1, 1:-1].std().item() == pytest.approx(1.0, rel=0.05)


def test_noise_has_no_effect_at_the_start_but_a_gradient():
    layer = StyledLayer(3, 4, 5, 8).double()
    x, w, noise = draw(2, 3, 8, 8), draw(2, 5, key="w"), draw(2, 1, 8, 8, key="noise")
    torch.testing.assert_close(layer(x, w, noise), layer(x, w, None), rtol=0, atol=0)
    layer(x, w, noise).sum().backward()
    assert layer.noise_strength.grad is not None
    assert layer.noise_strength.grad != 0


def test_under_autocast_the_style_and_demodulation_stay_in_single_precision():
    with forked(0, "init", "autocast"):
        layer = StyledLayer(16, 16, 8, 8)
    x, w = draw(2, 16, 8, 8).float(), draw(2, 8, key="w").float()
    expected = layer(x, w, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x, w, None)
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 0.01
    # a huge style overflows no square: energies are not summed in reduced precision
    with torch.autocast("cpu", dtype=torch.float16):
        big = layer.conv(x, w * 1e3)
    assert big[1] is not None
    assert torch.isfinite(big[1]).all()
    assert big[1].min() > 0
