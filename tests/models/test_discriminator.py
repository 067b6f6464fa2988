from typing import Any

import pytest
import torch

from duetgan.models.layers.stylegan2 import minibatch_std
from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig
from duetgan.utils.seeding import forked
from tests.models import reference
from tests.models.helpers import close, draw, randomised

TINY: dict[str, Any] = {"channel_base": 64, "channel_max": 5, "minibatch_std_group": 2}


def build(resolution=8, channels=1, classes=0, *, kind=Discriminator, **more):
    """A discriminator in float64 whose parameters are all away from their start."""
    shape = {"resolution": resolution, "channels": channels, "classes": classes}
    with forked(0, "init", "test discriminator"):
        config = DiscriminatorConfig(**{**TINY, **more})
        return randomised(kind(config, **shape))


def test_minibatch_std_over_samples_apart_and_what_does_not_fit():
    """Group j has the samples j, j + N / group, ...: consecutive groups of the batch in another order."""
    x, order = draw(6, 3, 8, 8), [0, 3, 1, 4, 2, 5]
    close(minibatch_std(x, 2, strided=True)[order], reference.minibatch_std(x.numpy()[order], 2))
    one, other = (build(8, 3, minibatch_std_order=name) for name in ("consecutive", "strided"))
    torch.testing.assert_close(other(x)[order], one(x[order]), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(other(x), one(x))
    for height, width in ((4, 4), (16, 16), (8, 4), (4, 8)):
        with pytest.raises(ValueError, match=rf"images of shape \(1, {height}, {width}\) for a discriminator of"):
            build()(draw(2, 1, height, width))
    for count, group in ((3, 2), (2, 4), (6, 4)):
        with pytest.raises(ValueError, match=f"a batch of {count} does not hold whole groups of {group}"):
            minibatch_std(draw(count, 1, 2, 2), group)
    with pytest.raises(ValueError, match="needs labels"):
        build(classes=2)(draw(2, 1, 8, 8))


@pytest.mark.parametrize("architecture", ["residual", "plain"])
@pytest.mark.parametrize(
    ("resolution", "channels", "classes", "count", "group", "mapping"),
    [(8, 1, 0, 4, 2, 0), (8, 3, 0, 5, 1, 0), (16, 3, 3, 4, 4, 0), (16, 3, 2, 3, 3, 1), (32, 1, 4, 4, 1, 2)],
)
def test_logits_equal_the_reference(architecture, resolution, channels, classes, count, group, mapping):
    network = build(
        resolution, channels, classes, architecture=architecture, minibatch_std_group=group, mapping_layers=mapping
    )
    assert len(network.label_mapping) == mapping
    images = draw(count, channels, resolution, resolution)
    labels = torch.arange(count) % classes if classes else None
    found = network(images, labels)
    assert found.shape == (count,)
    residual = architecture == "residual"
    expected = reference.discriminator(network, images.numpy(), labels, residual=residual, group=group)
    close(found, expected, 1e-10)


def test_one_pass_can_be_projected_onto_several_labels():
    images, labels, others = draw(2, 1, 8, 8), torch.tensor([0, 2]), torch.tensor([1, 1])
    network = build(8, 1, 3)
    features = network.features(images)
    assert features.shape == (2, 5)
    torch.testing.assert_close(network.project(features, labels), network(images, labels), rtol=0, atol=0)
    torch.testing.assert_close(network.project(features, others), network(images, others), rtol=0, atol=0)
    plain = build()
    assert plain.features(images).shape == (2, 1)
    assert plain(images, torch.tensor([5, 7])).equal(plain(images))  # labels are ignored without classes
