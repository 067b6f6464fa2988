"""examples/one_file.py is a map of the program: its networks, its steps and its figure are the program's and the
reference's.
"""

import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.data import make_loader
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.task import GanTask
from examples import one_file
from tests.oracle.classifier import ClassifierReference
from tests.oracle.gan import GanReference

CPU, STEPS = torch.device("cpu"), 3
ADAM = {"name": "adam", "lr": one_file.Gan.lr, "betas": [0.0, 0.99]}
GAN = {
    **{"task": "gan", "batch_size": 8, "steps": 10, "seed": 3, "generator_optimizer": ADAM},
    "generator": {"z_dim": 64, "w_dim": 64, "mapping_layers": 2, "channel_base": 512, "channel_max": 128},
    "discriminator": {"channel_base": 512, "channel_max": 128},
    "loss": {"r1_gamma": one_file.Gan.r1_gamma, "r1_interval": 2, "style_mixing": 0.0},
    **{"discriminator_optimizer": ADAM, "ema": {"ema_kimg": one_file.Gan.ema_images / 1000}},
}
CLASSIFIER: dict[str, Any] = {
    **{"task": "classifier", "batch_size": 8, "steps": 200, "seed": 3, "model": {"stem": "small-stride2"}},
    "optimizer": {
        **{"name": "sgd", "lr": one_file.Classifier.lr, "weight_decay": 0.0005, "momentum": 0.9},
        **{"warmup_steps": one_file.Classifier.warmup, "schedule": "cosine"},
    },
}


@pytest.fixture(autouse=True, scope="module")
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made(folder: Path, kind: Any, tree: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A task of the program on random images, and two loaders of the same batches."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 1, 32, 32), dtype=np.uint8), np.arange(40) % 10
    pack_arrays(folder / "data.lmdb", images, labels=labels, classes=[f"c{n}" for n in range(10)])
    config: Any = build_run_config(tree | {"data": {"path": str(folder / "data.lmdb")}}, [], "test")
    reader = Dataset(config.data.path)
    return kind(config, reader, None, CPU), make_loader(config, reader, CPU), make_loader(config, reader, CPU)


def assert_equal(name: str, mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert float((mine[key] - value).abs().max()) < 1e-9 * max(1.0, float(value.abs().max())), f"{name} {key}"


def test_the_gan_is_the_programs(tmp_path, monkeypatch):
    task, loader, again = made(tmp_path, GanTask, GAN)
    reference, gan = GanReference(task, GAN), one_file.Gan()
    monkeypatch.setattr(gan, "r1_interval", 2)
    for mine, theirs in ((gan.g, task.generator), (gan.d, task.discriminator), (gan.ema, task.ema.model)):
        mine.load_state_dict(theirs.state_dict())
    labels, noise = torch.arange(20) % 10, [torch.zeros(20, *shape) for shape in task.generator.noise_shapes()]
    torch.manual_seed(0)
    typical = gan.sample(labels, psi=0.0)  # of each class one image, as noise does not count yet
    assert torch.equal(typical[:10], typical[10:])
    torch.manual_seed(0)
    z, program = torch.randn(1000, 64), task.ema.model
    means = torch.stack([program.mapping(z, torch.full([1000], label)).mean(0) for label in range(10)])[labels]
    expected = program.synthesis(means[:, None].expand(-1, program.num_ws, -1), noise).clamp(-1, 1)
    torch.testing.assert_close(typical, expected, rtol=0, atol=0.501 / 127.5)  # rounded to the values of a file
    spread = program.class_styles(labels)[1].square().mean().sqrt()  # of one w; a mean of 1,000 lies that much nearer
    assert (program.class_styles(labels)[0] - means).norm(dim=1).max() < 3 * spread / 1000**0.5
    batches = list(zip(range(STEPS), again, strict=False))
    for step, batch in batches:
        draws = task.context.draws.latents(step, "generator", 8, 64)
        noise = task.context.draws.noise(step, "generator", 8, task.generator.noise_shapes())
        w = gan.g.mapping(draws.z, draws.labels)
        assert [m.shape for m in gan.g.noise(8)] == [m.shape for m in noise]
        images = task.generator(draws.z, draws.labels, noise=noise)
        torch.testing.assert_close(gan.g(w, noise), images, rtol=1e-9, atol=1e-9)
        logits = task.discriminator(images, draws.labels)
        torch.testing.assert_close(gan.d(images, draws.labels), logits, rtol=1e-9, atol=1e-9)
        metrics = task.step(loader, step)
        losses = gan.step(batch.images / 127.5 - 1, batch.labels, draws.z, draws.labels, noise, step)
        assert losses == pytest.approx([float(metrics[f"loss/{n}"]) for n in ("generator", "discriminator")], abs=1e-9)
        reference.step(iter([batch]), step)
        for mine, theirs, oracle in (
            (gan.g, task.generator, reference.g),
            (gan.d, task.discriminator, reference.d),
            (gan.ema, task.ema.model, reference.average),
        ):
            for name, other in (("program", theirs), ("reference", oracle)):
                assert_equal(f"step {step}, {name}:", mine.state_dict(), other.state_dict())
    assert len(batches) == STEPS


def test_the_classifier_is_the_programs(tmp_path):
    task, loader, again = made(tmp_path, ClassifierTask, CLASSIFIER)
    reference, classifier = ClassifierReference(task, CLASSIFIER | {"data": {}}), one_file.Classifier()
    for mine, theirs in ((classifier.model, task.model), (classifier.ema, task.ema.model)):
        mine.load_state_dict(theirs.network.state_dict())
    batches = list(zip(range(STEPS), again, strict=False))
    for step, batch in batches:
        metrics = task.step(loader, step)
        loss = classifier.step(batch.images / 127.5 - 1, batch.labels, step, CLASSIFIER["steps"])
        assert loss == pytest.approx(float(metrics["loss/classifier"]), abs=1e-9)
        reference.step(batch, step)
        for mine, theirs, oracle in (
            (classifier.model, task.model, reference.model),
            (classifier.ema, task.ema.model, reference.average),
        ):
            for name, other in (("program", theirs), ("reference", oracle)):
                assert_equal(f"step {step}, {name}:", mine.state_dict(), other.network.state_dict())
    features, predicted = classifier.look(batches[0][1].images / 127.5 - 1)
    torch.testing.assert_close(features, task.ema.model.features(batches[0][1].images / 127.5 - 1))
    assert predicted.tolist() == task.ema.model(batches[0][1].images / 127.5 - 1).argmax(1).tolist()
    assert len(batches) == STEPS


def test_the_distance_is_that_of_the_matrix_root():
    a, b = torch.randn(60, 9).numpy(), torch.randn(50, 9).numpy() * 2 + 1
    first, second = np.cov(a.T), np.cov(b.T)
    root = scipy.linalg.sqrtm(first @ second).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(first + second - 2 * root)
    assert one_file.frechet(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(expected, rel=1e-9)


def test_it_runs_and_needs_torch_alone(tmp_path, monkeypatch, capsys):
    source = Path(one_file.__file__).read_text()
    assert source.count("\n") <= 450
    names = {n.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for n in node.names}
    names |= {str(n.module) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(one_file, "load", lambda split: (torch.rand(64, 1, 32, 32) * 2 - 1, torch.arange(64) % 10))
    picture = tmp_path / "grid.png"
    monkeypatch.setattr(sys, "argv", ["one_file.py", "--gan-steps=2", "--classifier-steps=2", f"--out={picture}"])
    one_file.main()
    torch.set_default_dtype(torch.float64)
    from PIL import Image

    with Image.open(picture) as image:
        assert (image.size, image.mode) == ((320, 320), "L")
    assert "recognised as the class asked for" in capsys.readouterr().out


def test_samples_are_what_a_file_can_hold():
    """Black was -128 / 127.5 once, and white in the picture."""
    gan = one_file.Gan()
    last: Any = gan.ema.blocks[-1]
    with torch.no_grad():
        last.to_rgb.bias.fill_(-1.0)
    levels = (gan.sample(torch.arange(10)) + 1) * 127.5
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
    assert 0 <= float(levels.min()) < 1
    assert float(levels.max()) <= 255


def test_it_reads_the_sample():
    images, labels = one_file.load("t10k")
    assert (tuple(images.shape), float(images.min()), float(images.max())) == ((2000, 1, 32, 32), -1.0, 1.0)
    assert sorted(set(labels.tolist())) == list(range(10))
