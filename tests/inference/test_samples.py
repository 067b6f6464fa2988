import pytest
import torch

from duetgan.inference.samples import chosen_classes
from duetgan.models.gan import draw, generate
from duetgan.utils.errors import UserError
from tests.inference.conftest import sampler_of, styled, without_w


def apart(a, b):
    """The largest difference of two sets of images; 1 is the rounding of another batch."""
    return int((a.int() - b.int()).abs().max())


def test_numbers_go_round_the_chosen_classes_and_images_are_those_of_their_keys(generator):
    sampler = sampler_of(generator, chosen=[2, 0])
    assert sampler.labels(range(5)).tolist() == [2, 0, 2, 0, 2]
    assert sampler.indices(range(5)) == [2, 0, 5, 3, 8]  # sample i of class c has index i * 3 + c
    plain = sampler_of(styled(classes=0))
    assert plain.labels([4, 7]) is None
    assert plain.indices([4, 7]) == [4, 7]
    sampler = sampler_of(generator, chosen=[2, 0], seed=5, truncation_psi=0.6, truncation_cutoff=2)
    named = {"truncation_psi": 0.6, "truncation_cutoff": 2}
    wanted = generate(generator, labels=torch.tensor([0, 2]), indices=[3, 8], seed=5, **named)  # type: ignore[arg-type]
    assert torch.equal(sampler.images([3, 4]), wanted)


def test_a_sample_does_not_depend_on_what_else_is_drawn(generator):
    every, some = sampler_of(generator), sampler_of(generator, chosen=[1], batch_size=2)
    images = every.images(range(9))
    assert apart(images[1::3], some.images(range(3))) <= 1
    assert apart(images, sampler_of(generator, batch_size=4).images(range(9))) <= 1
    assert apart(images[:3], images[3:6]) > 10
    assert apart(images, sampler_of(generator, seed=1).images(range(9))) > 10


def test_latents_are_what_images_are_made_of(generator):
    sampler = sampler_of(generator, seed=2)
    z, labels, noise = sampler.latents([3, 4])
    expected_z, expected_noise = draw(generator, [3, 4], 2)
    assert torch.equal(z, expected_z)
    assert labels.tolist() == [0, 1]
    assert all(torch.equal(a, b) for a, b in zip(noise, expected_noise, strict=True))
    assert sampler_of(generator, noise_mode="none").latents([0])[2] == "none"


@pytest.mark.parametrize("cutoff", [-1, 5])
def test_a_cutoff_is_one_of_the_layers(generator, cutoff):
    assert generator.num_ws == 4
    sampler_of(generator, truncation_cutoff=4)
    with pytest.raises(UserError, match=rf"--truncation-cutoff {cutoff}: give 0 to 4"):
        sampler_of(generator, truncation_cutoff=cutoff)


def test_without_w_there_is_no_truncation():
    assert sampler_of(without_w()).images(range(4)).shape == (4, 1, 8, 8)
    for options in ({"truncation_psi": 0.5}, {"truncation_cutoff": 1}):
        with pytest.raises(UserError, match="works on w, which this generator does not have"):
            sampler_of(without_w(), **options)


def test_classes_are_chosen_by_name_and_fit_the_generator(generator):
    names = ["dark", "grey", "light"]
    assert chosen_classes("all", names) == [0, 1, 2]
    assert chosen_classes("light, dark", names) == [2, 0]
    assert chosen_classes("all", []) == []
    for text, classes, message in (
        ("drak", names, "did you mean 'dark'"),
        ("dark,dark", names, "named twice"),
        ("dark", [], "unconditional"),
    ):
        with pytest.raises(UserError, match=message):
            chosen_classes(text, classes)
    for model, chosen in ((generator, []), (styled(classes=0), [0])):
        with pytest.raises(ValueError, match="conditional"):
            sampler_of(model, chosen=chosen)
