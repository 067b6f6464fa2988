"""What a GAN's step is given, and the head that names classes."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.augment.transforms import draw_and_apply
from duetgan.data.packing.records import pack_arrays
from duetgan.models.restore import discriminator_from
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.training.gan import evaluation
from duetgan.training.gan.batch import StepSlice
from duetgan.training.gan.draws import GanDraws
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.distributed.worker import GAN
from tests.end_to_end.test_kinds import spec_of
from tests.end_to_end.test_kinds_commands import pack
from tests.training.gan.test_steps import Run, folder, same, state  # noqa: F401  (a fixture)

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"z_dim": 5, "w_dim": 4, "mapping_layers": 1, "channel_base": 64, "channel_max": 4}


@pytest.fixture(scope="module")
def model():
    with forked(0, "init", "test draws"):
        return Generator(GeneratorConfig(**SIZES), resolution=16, channels=1, classes=3)


class Draws(GanDraws):
    """Of one model and batch size."""

    def __init__(self, model, batch_size=12, seed=0, histogram=(1, 1, 1)):
        super().__init__(seed, CPU, list(histogram))
        self.model, self.batch_size = model, batch_size

    def drawn(self, step, phase, mixing):
        return self.latents(step, phase, self.batch_size, self.model.z_dim, mixing=mixing, num_ws=self.model.num_ws)

    def maps(self, step, phase):
        return self.noise(step, phase, self.batch_size, self.model.noise_shapes())


def same_draws(one, other):
    names = ("z", "z_mixed", "crossover", "labels")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("rank", [0, 1])
def test_half_a_batch_is_done_once_where_micro_batches_do_not_divide_it(monkeypatch, rank):
    """Of a batch of 48 on two ranks, in micro-batches of 8: the second rank's half begins at row 12."""
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    half = StepSlice(step=0, batch_size=48, size=24, micro=8, first=24 * rank, metrics={}).half()
    rows = half.micro_batches()
    assert [(each.start - 12 * rank, each.stop - 12 * rank) for each in rows] == [(0, 8), (8, 12)]
    assert [half.is_last(each) for each in rows] == [False, True]


def test_a_draw_depends_on_its_key_alone(model):
    once, noise = Draws(model).drawn(3, "generator", 0.9), Draws(model).maps(3, "generator")
    assert once.z.shape == once.z_mixed.shape == (12, 5)
    assert once.labels.shape == once.crossover.shape == (12,)
    assert [layer.shape for layer in noise] == [(12, *shape) for shape in model.noise_shapes()]
    first, second = (layer for layer in noise if layer.shape[-1] == 16)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert torch.cat([layer.flatten() for layer in noise]).std().item() == pytest.approx(1, abs=0.05)
    used = Draws(model)
    used.drawn(2, "generator", 0.9)
    used.maps(3, "generator")
    torch.manual_seed(5)
    assert same_draws(used.drawn(3, "generator", 0.9), once)
    state = torch.random.get_rng_state()
    assert not torch.equal(once.z, once.z_mixed)
    for seed, step, phase in ((1, 3, "generator"), (0, 4, "generator"), (0, 3, "discriminator")):
        keyed = Draws(model, seed=seed)
        other, maps = keyed.drawn(step, phase, 0.9), keyed.maps(step, phase)
        pairs = [(once.z, other.z), (once.z_mixed, other.z_mixed), *zip(noise, maps, strict=True)]
        assert not any(torch.equal(one, another) for one, another in pairs)
    assert torch.random.get_rng_state().equal(state)


def test_without_mixing_the_first_style_is_the_same_and_path_noise_is_the_steps(model):
    latents, mixed = Draws(model).drawn(3, "generator", 0.0), Draws(model).drawn(3, "generator", 0.9)
    assert latents.z_mixed is None
    assert latents.crossover is None
    assert torch.equal(latents.z, mixed.z)
    assert torch.equal(latents.labels, mixed.labels)
    numbers = GanDraws(0, CPU, [])
    noise = numbers.path_noise(8, 50, (3, 8, 8))
    assert noise.shape == (50, 3, 8, 8)
    assert noise.std().item() == pytest.approx(1, abs=0.03)
    assert torch.equal(noise, GanDraws(0, CPU, [1, 2]).path_noise(8, 50, (3, 8, 8)))
    assert not torch.equal(noise, numbers.path_noise(12, 50, (3, 8, 8)))
    assert not torch.equal(noise, GanDraws(1, CPU, []).path_noise(8, 50, (3, 8, 8)))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9, 1.0])
def test_share_of_mixed_samples_and_range_of_the_crossover(model, probability):
    crossover = Draws(model, batch_size=4000).drawn(0, "generator", probability).crossover
    assert model.num_ws == 6
    mixed = crossover[crossover < 6]
    assert len(mixed) / 4000 == pytest.approx(probability, abs=0.03)
    assert crossover.max() <= 6
    counts = torch.bincount(mixed, minlength=6).double() / len(mixed)
    assert counts[0] == 0  # one style at least comes from z itself
    torch.testing.assert_close(counts[1:], torch.full((5,), 0.2, dtype=torch.float64), rtol=0, atol=0.07)


def test_labels_are_as_frequent_as_in_the_data_and_wrong_ones_never_true(model):
    labels = Draws(model, batch_size=4000, histogram=(10, 0, 30)).drawn(0, "generator", 0).labels
    shares = torch.bincount(labels, minlength=3).double() / 4000
    torch.testing.assert_close(shares, torch.tensor([0.25, 0, 0.75], dtype=torch.float64), rtol=0, atol=0.03)
    assert shares[1] == 0
    assert Draws(model, histogram=()).drawn(0, "generator", 0).labels.eq(0).all()
    offsets = Draws(model).label_offsets(3, 2000)
    assert torch.bincount(offsets, minlength=3)[0] == 0  # never the true label
    assert torch.bincount(offsets).tolist()[1:] == pytest.approx([1000, 1000], abs=120)
    weights = Draws(model).interpolation_weights(3, 2000)
    assert 0 <= weights.min() < 0.01
    assert 0.99 < weights.max() < 1
    for name, values in (("label_offsets", offsets), ("interpolation_weights", weights)):
        for seed, step, same_key in ((0, 3, True), (0, 4, False), (1, 3, False)):
            assert torch.equal(getattr(Draws(model, seed=seed), name)(step, 2000), values) == same_key, name


def test_the_head_leaves_the_networks_beginnings_alone(folder):  # noqa: F811
    """A comparison with and without it is paired: nothing but the head is drawn anew."""
    run, without = Run(folder, GAN, loss={"auxiliary_weight": 1.0}), Run(folder, GAN)
    assert same(state(run.task.generator), state(without.task.generator))
    with_head = state(run.task.discriminator)
    head = {name: with_head.pop(name) for name in ("auxiliary.weight", "auxiliary.bias")}
    assert same(with_head, state(without.task.discriminator))
    assert head["auxiliary.weight"].shape == (3, 8)
    other = Run(folder, GAN | {"seed": 4}, loss={"auxiliary_weight": 1.0})
    for name in ("generator", "discriminator"):
        first, second = (state(each.task.registry()[name]) for each in (run, other))
        drawn = [key for key, value in first.items() if value.any() and "affine.bias" not in key]
        assert len(drawn) > 5
        assert not [key for key in drawn if torch.equal(first[key], second[key])]
    run = Run(folder, GAN, loss={"auxiliary_weight": 1.0})
    config = {"discriminator": GAN["discriminator"]}
    content: dict[str, Any] = {"task": "gan", "config": config, "shape": run.task.shape}
    content["state"] = {"discriminator": state(run.task.discriminator)}
    assert same(state(discriminator_from(content)), content["state"]["discriminator"])


@pytest.mark.parametrize("classes", [[], ["a"], ["a", "b"]])
def test_losses_of_labels_need_two_classes(tmp_path, classes):
    images = np.random.default_rng(0).integers(0, 256, (16, 1, 16, 16), dtype=np.uint8)
    labels = np.arange(16) % len(classes) if classes else None
    pack_arrays(tmp_path / "data.lmdb", images, labels=labels, classes=classes)
    refusal = pytest.raises(UserError, match=r"loss\.auxiliary_weight needs images of two classes")
    with nullcontext() if len(classes) == 2 else refusal:
        Run(tmp_path, GAN, loss={"auxiliary_weight": 1.0, "mismatch_weight": 0.0})
    states = []
    for weight in (0.0, 0.5):
        run = Run(tmp_path, GAN, loss={"mismatch_weight": weight})
        run.step()
        states.append(state(run.task.discriminator))
    assert same(*states) == (len(classes) < 2)


def test_label_sets_are_shown_the_most_frequent_first(tmp_path):
    sets = [[], [0], [0, 1], [1]]
    labels = [0, 1, 1, 2, 2, 2, 3, 3]
    images = np.zeros((8, 1, 16, 16), np.uint8)
    pack_arrays(tmp_path / "data.lmdb", images, labels=labels, classes=["a", "b"], label_sets=sets)
    task = Run(tmp_path, GAN, loss={"mismatch_weight": 0.0}).task
    assert task.generator.label_sets == task.provenance()["sets"] == [[0, 1], [0], [1], []]
    task = Run(tmp_path, GAN | {"conditional": False}).task
    assert (task.generator.label_sets, task.generator.num_labels) == (None, 0)
    assert "sets" not in task.provenance()


def test_images_of_16_bits_with_transparency_are_augmented_as_such(tmp_path):
    spec = spec_of(4, alpha=True, depth="uint16", side=16)
    pack(tmp_path / "data.lmdb", spec, 16, 0)
    run = Run(tmp_path, GAN, ada={"mode": "fixed", "p": 0.5})
    context, batch = run.task.context, next(run.loader)
    assert (context.ada.channels, context.ada.alpha) == (4, True)
    key: dict[str, Any] = {"seed": GAN["seed"], "step": 2, "start": 0, "global_batch": 8, "phase": "x"}
    expected = draw_and_apply(spec.to_float(batch.images), context.config.augment, **key)
    (found,) = context.reals(batch, run.task._slice(2), "x")
    assert torch.equal(found.images, expected)
    assert torch.equal(found.labels, batch.labels)


@pytest.mark.parametrize("depth", ["uint8", "uint16"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_images_and_weights_lie_in_memory_as_the_config_says(tmp_path, channels_last, depth):
    pack(tmp_path / "data.lmdb", spec_of(3, depth=depth, side=16), 16, 0)
    run = Run(tmp_path, GAN, channels_last=channels_last)
    (real,) = run.task.context.reals(next(run.loader), run.task._slice(0), None)
    weights = [p for network in (run.task.generator, run.task.discriminator) for p in network.parameters()]
    wide = [weight for weight in weights if weight.ndim == 4 and 1 not in (weight.shape[1], weight.shape[3])]
    assert len(wide) > 4
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert all(tensor.is_contiguous(memory_format=layout) for tensor in (*wide, real.images))


def test_logits_are_computed_in_whole_groups(folder, monkeypatch):  # noqa: F811
    """Of 32 images 30 are shown, in chunks of 15 instead of 16."""
    monkeypatch.setattr("duetgan.metrics.features.extractors.LARGEST_CHUNK", 16)
    run = Run(folder, GAN, batch_size=12, discriminator=GAN["discriminator"] | {"minibatch_std_group": 3})
    task, sizes = run.task, []
    task.discriminator.from_rgb.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    task.evaluation.mean_logits(task.ema.model, task.discriminator, task.dataset)
    assert sizes == [15] * 6  # held-out images, training images and samples


@pytest.mark.parametrize(("labels", "rows", "columns"), [(0, 8, 8), (3, 3, 10), (23, 20, 10)])
def test_a_grid_has_a_row_of_samples_for_each_label(labels, rows, columns, monkeypatch):
    shown: dict[str, Any] = {}
    model: Any = SimpleNamespace(num_labels=labels, conditions=lambda numbers: numbers + 100, spec="spec")
    monkeypatch.setattr(evaluation, "generate", lambda *given, **options: shown.update(options) or given)
    monkeypatch.setattr(evaluation, "grid", lambda *given, **options: (given, options))
    run: Any = SimpleNamespace(config=SimpleNamespace(seed=5))
    expected = (((model,),), {"columns": columns, "spec": "spec"})
    assert evaluation.GanEvaluation.sample_grid(run, model) == expected
    drawn = shown.pop("labels")
    assert shown == {"indices": range(rows * columns), "seed": 5}
    assert (None if drawn is None else drawn.tolist()) == (
        [100 + row for row in range(rows) for _ in range(columns)] if labels else None
    )
