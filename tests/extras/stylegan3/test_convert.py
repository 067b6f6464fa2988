"""NVIDIA's files come over with their images; others are refused by name."""

from typing import Any

import pytest
import torch

from benchmarks.stylegan3_parity import draw
from duetgan.commands.generate import main as generate
from duetgan.extras.official.convert import read
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.extras.official import layouts
from tests.extras.stylegan3.conftest import GOLDEN, R, T, write


@pytest.mark.parametrize("case", GOLDEN)
def test_pixels_are_those_of_nvidias_program(case, donors):
    checkpoint = load(resolve(donors[case]))
    assert checkpoint["config"]["architecture"] == {T: "stylegan3-t", R: "stylegan3-r"}[case]
    generator = generator_from(checkpoint)
    z = draw(1, generator.z_dim, seed=100)
    labels = torch.zeros(1, dtype=torch.int64) if generator.classes else None
    found = generator(z, labels)[0, :, ::5, ::5]
    expected = torch.tensor(GOLDEN[case]["pixels"])
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


FILTER = "synthesis.L1_24_24.down_filter"
REFUSED: dict[str, tuple[str, Any]] = {
    FILTER: (f"{FILTER} differs from Duet's filter", torch.ones(12) / 12),
    "img_resolution": ("a resolution of 24", 24),
    "first_cutoff": ("first_cutoff is '3'; Duet's networks have 2.0", 3),
    "num_critical": ("critical_layers 5: give less", 5),
    "channel_max": ("G has no synthesis.L0_24_16.up_filter", 16),
    "mystery": ("mystery, which Duet does not know", 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, tmp_path):
    message, value = REFUSED[name]
    write(tmp_path / "x.pkl", T, **{name: value})
    assert_raises(UserError, message, read, tmp_path / "x.pkl")


def test_the_programs_stylegan2_keeps_its_clamp_and_mean(tmp_path):
    """Found by parity: stylegan3's program leaves out arguments that have other defaults in stylegan2-ada-pytorch."""
    g = {name: value for name, value in layouts.G_ARGUMENTS.items() if name != "synthesis_kwargs"} | layouts.CHANNELS
    d = {name: value for name, value in layouts.D_ARGUMENTS.items() if name not in ("conv_clamp", "num_fp16_res")}
    layouts.write_nvidia(tmp_path / "x.pkl", g=g, d=d)
    converted = read(tmp_path / "x.pkl")
    for config in (converted.generator, converted.discriminator):
        assert (config["conv_clamp"], config["clamp_always"], config["fp16_resolutions"]) == (256.0, True, 4)


def test_every_kind_of_picture_of_a_converted_network(donors, tmp_path):
    common = ["--checkpoint", str(donors[R]), "--device", "cpu", "--out"]
    image = tmp_path / "grid"
    commands: list[list[str]] = [
        ["grid", *common, str(image), "--n", "3", "--truncation-psi", "0.7", "--latents", "numpy"],
        ["mix", *common, str(tmp_path / "mix.png"), "--n", "2"],
        ["interpolate", *common, str(tmp_path / "a.gif"), "--n", "2", "--frames", "2"],
        ["move", *common, str(tmp_path / "b.gif"), "--translate", "0.2,-0.1", "--rotate", "90", "--frames", "3"],
    ]
    for command in commands:
        assert generate(command) == 0
    target = sorted(image.glob("*.png"))[0]
    project = [
        "project",
        *common,
        str(tmp_path / "p.png"),
        "--image",
        str(target),
        "--steps",
        "2",
        "--features",
        "pixels",
    ]
    assert generate(project) == 0
