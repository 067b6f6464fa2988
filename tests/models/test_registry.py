import pytest
import torch

from duetgan.models.registry import ARCHITECTURES, architecture_of
from duetgan.utils.errors import UserError

SMALL: dict[str, dict[str, int]] = {
    "stylegan2": {"channel_base": 64, "channel_max": 4},
    "r3gan": {"width": 8, "cardinality": 2},
    "dcgan": {"width": 2},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("classes", [0, 3])
def test_every_architecture_is_built_and_run_alike(name, classes):
    entry = architecture_of(name)
    with torch.device("meta"):  # of full size, without its memory
        shape = {"resolution": 32, "channels": 3, "classes": classes}
        generator = entry.generator(entry.generator_config(), **shape)
        discriminator = entry.discriminator(entry.discriminator_config(), **shape)
    for network in (generator, discriminator):
        assert (network.resolution, network.channels, network.classes) == (32, 3, classes)
    assert generator.z_dim == entry.generator_config().z_dim
    assert discriminator.config.group >= 1
    assert isinstance(generator.noise_shapes(), list)
    for method in ("hidden", "features", "project"):
        assert callable(getattr(discriminator, method))


def test_an_unknown_name_is_refused_with_the_near_one():
    with pytest.raises(UserError, match=r"'r3-gan' is unknown \(did you mean 'r3gan'\?\); there are stylegan2, r3gan"):
        architecture_of("r3-gan")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["generator", "discriminator"])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_both_networks_can_be_traced_in_training(architecture, name):
    """TensorBoard's graph of a run is a trace of networks whose parameters train."""
    parts = ARCHITECTURES[architecture]
    config = getattr(parts, f"{name}_config")(**SMALL[architecture])
    network = getattr(parts, name)(config, resolution=8, channels=1, classes=2)
    z = torch.zeros(4, network.z_dim) if name == "generator" else torch.zeros(4, 1, 8, 8)
    labels = torch.zeros(4, dtype=torch.int64)
    traced = torch.jit.trace(network, (z, labels), check_trace=False, strict=False)
    torch.testing.assert_close(traced(z, labels), network(z, labels))
