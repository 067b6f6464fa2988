"""What predict.py, generate.py, export.py and the library hand out, from the networks alone.

It is of the best checkpoint of a run whose last is another, with options that are no defaults.
"""

import csv
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import duetgan
from duetgan.commands import export, generate, predict
from duetgan.data.reading.dataset import Dataset
from duetgan.inference import predictions
from duetgan.metrics.grad_cam import overlay
from duetgan.models.restore import classifier_from, read
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.images import grid
from duetgan.utils.seeding import numpy_generator
from tests.inference.test_video import gif_frames
from tests.metrics.trained import (
    BEST,
    COUNT,
    NAMES,
    as_bytes,
    assert_pixels,
    centres,
    pictures,
    samples_of,
    styles_of,
    to_float,
    trained,
)

__all__ = ["pictures", "trained"]  # fixtures


@pytest.fixture
def call(capsys):
    """What a command prints."""

    def run(script, command, *extra):
        capsys.readouterr()
        assert run_cli(script.main, [*command.split(), *map(str, extra), "--which", "best"]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def files(trained, tmp_path):
    """Seven test images, and their files."""
    images = trained.images["test"][::10][:7]
    paths = [tmp_path / f"{name}.png" for name in NAMES]
    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image[0].numpy()).save(path)
    return images, paths


def heat_of(network, image, label):
    """Grad-CAM at layer3, scaled."""
    maps = []
    hook = network.network.layer3.register_forward_hook(lambda *arguments: maps.append(arguments[2].requires_grad_()))
    (slopes,) = torch.autograd.grad(network(to_float(image[None]))[0, label], maps)
    hook.remove()
    heat = (slopes.mean((2, 3), keepdim=True) * maps[0].detach())[0].sum(0).relu()
    return heat / heat.max().clamp(min=1e-30)


def test_predictions(trained, files, pictures, call, tmp_path):
    images, paths = files
    with torch.no_grad():
        views = [trained.network(to_float(view)) for view in (images, images.flip(3))]
    rows = []  # of each image its classes and their probabilities, likeliest first
    for row in (sum(views) / 2).double().softmax(1).tolist():
        rows.append(dict(sorted(zip(NAMES, row, strict=True), key=lambda pair: -pair[1])))
    answers, labels = list(zip(paths, rows, strict=True)), [next(iter(row)) for row in rows]
    common = f"--checkpoint {trained['classifier']} --batch-size 3 --tta flip {' '.join(map(str, paths))}"

    def assert_answers(printed, most):
        for answer, (path, row), label in zip(json.loads(printed), answers, labels, strict=True):
            assert [answer["file"], answer["label"], *answer["probabilities"]] == [str(path), label, *[*row][:most]]
            assert [*answer["probabilities"].values()] == pytest.approx([*row.values()][:most], abs=1e-6)

    assert_answers(call(predict, common, "--json"), 7)
    table, folder = tmp_path / "x.csv", tmp_path / "sorted"
    assert_answers(call(predict, common, "--csv", table, "--sort-into", folder, "--top", 3, "--json"), 3)
    head, *lines = csv.reader(table.read_text().splitlines())
    assert head == ["file", "label", "probability", "label_2", "probability_2", "label_3", "probability_3"]
    for line, (path, row) in zip(lines, answers, strict=True):
        assert [line[0], *line[1::2]] == [str(path), *[*row][:3]]
        assert [float(cell) for cell in line[2::2]] == pytest.approx([*row.values()][:3], abs=1e-6)
    placed = {path: path.resolve() for path in folder.rglob("*.png")}
    assert placed == {folder / label / path.name: path for path, label in zip(paths, labels, strict=True)}
    call(predict, common, "--csv", table)
    head, *lines = csv.reader(table.read_text().splitlines())
    assert head == ["file", "label", "probability", *NAMES]
    for line, (path, row) in zip(lines, answers, strict=True):
        assert line[:2] == [str(path), next(iter(row))]
        expected = [max(row.values()), *(row[name] for name in NAMES)]
        assert [float(cell) for cell in line[2:]] == pytest.approx(expected, abs=1e-6)
    words = [", ".join(f"{name} {share:.3f}" for name, share in [*row.items()][:3]) for row in rows]
    assert call(predict, common).splitlines() == [f"{path}: {text}" for path, text in zip(paths, words, strict=True)]

    lit = set()  # classes that some image is not of by its prediction, and shows evidence for
    for image, label in zip(images, labels, strict=True):
        lit |= {name for k, name in enumerate(NAMES) if name != label and heat_of(trained.network, image, k).any()}
    for name in (None, "bee", *sorted(lit)[:1]):
        pictures.clear()
        extra = ["--gradcam-class", name] if name else []
        call(predict, common, "--gradcam", tmp_path / "maps", "--gradcam-layer", "layer3", *extra)
        for image, (path, row), label in zip(images, answers, labels, strict=True):
            drawn, words = pictures[f"{path.stem}-gradcam.png"]
            target = name or label
            heat = heat_of(trained.network, image, NAMES.index(target))
            evidence = f"evidence for {target} {row[target]:.3f}" if heat.any() else f"no evidence for {target}"
            assert words == [f"predicted {label} {row[label]:.3f}", evidence, "layer3"]
            assert_pixels(drawn, overlay(image, heat))


def test_a_label_at_its_threshold_counts_and_the_most_probable_classes_come_first():
    classifier: Any = SimpleNamespace(thresholds=torch.tensor([0.25, 0.5, 0.5]))
    probabilities = torch.tensor([0.25, 0.9, 0.4], dtype=torch.float64)
    answer = predictions._answer(classifier, NAMES[:3], probabilities, 2)
    assert answer == {"label": "ant;owl", "labels": ["ant", "owl"], "probabilities": {"ant": 0.9, "cat": 0.4}}
    assert (
        predictions.line(answer | {"file": "x.png", "gradcam": "y.png"})
        == "x.png: ant;owl (ant 0.900, cat 0.400) (y.png)"
    )
    none = predictions._answer(classifier, NAMES[:3], probabilities / 10, 1)
    assert predictions.line(none | {"file": "x.png"}) == "x.png: no label (ant 0.090)"


@torch.no_grad()
def test_samples(trained, pictures, call, tmp_path):
    generator, seed, chosen = trained.generator, 5, [2, 0, 5]
    labels, indices = [chosen[i % 3] for i in range(11)], [i // 3 * 7 + chosen[i % 3] for i in range(11)]
    numpy_seeds, drawn = [seed + i // 3 for i in range(11)], partial(samples_of, generator, cutoff=2, noise="const")
    expected = drawn(labels, indices, seed, psi=0.6, numpy_seeds=numpy_seeds)
    names = ",".join(NAMES[label] for label in chosen)
    common = f"--checkpoint {trained['gan']} --batch-size 3 --seed {seed} --classes {names}"
    every = f"{common} --latents numpy --truncation-cutoff 2 --noise-mode const"
    call(generate, f"grid {every} --truncation-psi 0.6 --n 11 --out", tmp_path / "grid.png")
    assert_pixels(pictures["grid.png"][0], expected[[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8]])
    call(generate, f"grid {every} --truncation-psi 0.6 --n 11 --out", tmp_path / "folder")
    for image, label, own_seed in zip(expected, labels, numpy_seeds, strict=True):
        with Image.open(tmp_path / "folder" / f"seed{own_seed:04d}-{NAMES[label]}.png") as file:
            assert_pixels(np.asarray(file), image[0])
    call(generate, f"truncation {every} --psis 0.2,-0.7 --n 5 --out", tmp_path / "truncation.png")
    rows = [drawn(labels[:5], indices[:5], seed, psi=psi, numpy_seeds=numpy_seeds[:5]) for psi in (0.2, -0.7)]
    assert_pixels(pictures["truncation.png"][0], torch.cat(rows))
    heads = [
        line for label, own_seed in zip(labels, numpy_seeds, strict=True) for line in (f"seed {own_seed}", NAMES[label])
    ]
    assert pictures["truncation.png"][1] == ["psi 0.2", "psi -0.7", *heads[:10]]
    call(generate, f"dataset {every} --truncation-psi 0.6 --n 11 --encoding png --out", tmp_path / "x.lmdb")
    with Dataset(tmp_path / "x.lmdb") as reader:
        images, stored = reader.read(np.arange(11))
        assert (reader.classes, reader.meta.encoding, stored.tolist()) == (NAMES, "png", labels)
        assert_pixels(images, expected)

    call(generate, f"mix {common} --truncation-psi 0.6 --layers 1,3 --n 2 --out", tmp_path / "mix.png")
    (a, a_maps), (b, b_maps) = (styles_of(generator, chosen[:2], chosen[:2], seed + k) for k in (0, 1))
    middle = centres(generator, chosen[:2])[:, None]
    a, b = (middle + 0.6 * (ws - middle) for ws in (a, b))
    cells = [*generator.synthesis(b, b_maps)]
    for i in range(2):
        ws, maps = a[[i, i]].clone(), [level[[i, i]] for level in a_maps]
        ws[:, [1, 3]], maps[1] = b[:, [1, 3]], b_maps[1]
        cells += [generator.synthesis(a, a_maps)[i], *generator.synthesis(ws, maps)]
    assert_pixels(pictures["mix.png"][0], as_bytes(torch.stack(cells)))

    film = "--truncation-psi 0.6 --truncation-cutoff 2 --n 3 --frames 4 --fps 25 --scale 2"
    call(generate, f"interpolate {common} {film} --out", tmp_path / "x.gif")
    ws, maps = styles_of(generator, chosen, chosen, seed)
    middle = centres(generator, chosen)[:, None]
    ws[:, :2] = middle + 0.6 * (ws[:, :2] - middle)
    ws = torch.stack([ws[k // 4].lerp(ws[(k // 4 + 1) % 3], k % 4 / 4) for k in range(12)])
    frames, delays = gif_frames(tmp_path / "x.gif")
    assert delays == [40] * 12
    expected = as_bytes(generator.synthesis(ws, [level[:1].expand(12, -1, -1, -1) for level in maps]))
    assert_pixels(frames[:, ::2, ::2, 0], expected[:, 0])
    assert frames.shape[1] == 16


@torch.no_grad()
def test_the_library(trained, files):
    images, paths = files
    of_best: Any = {"which": "best", "device": "cpu"}
    logits = trained.network(to_float(images))
    for load in (duetgan.load, duetgan.load_classifier):
        classifier: Any = load(trained["classifier"], **of_best)
        torch.testing.assert_close(classifier(torch.stack([*map(classifier.transform, paths)])), logits)
        answers = classifier.predict(paths)
        torch.testing.assert_close(answers.probabilities, logits.double().softmax(1))
        assert answers.labels == [NAMES[label] for label in logits.argmax(1)]
    indices = [i // 2 * 7 + (4, 1)[i % 2] for i in range(5)]
    expected = samples_of(trained.generator, [4, 1, 4, 1, 4], indices, 3, psi=0.4, noise="none")
    options: Any = {"seed": 3, "psi": 0.4, "noise": "none", "classes": ["elk", "ant"]}
    for load in (duetgan.load, duetgan.load_generator):
        generator: Any = load(trained["gan"], **of_best)
        samples = generator.sample(5, **options)
        assert_pixels(samples.images, expected)
        assert samples[1:] == (["elk", "ant", "elk", "ant", "elk"], [3] * 5, indices)
    for columns, extra in ((3, {"columns": 3}), (2, {})):
        assert_pixels(
            np.asarray(generator.grid(5, **extra, **options)), grid(expected, columns=columns, spec=None)[:, :, 0]
        )
    for classes, columns in ((["elk", "ant"], 2), ("elk", 1)):
        options["classes"] = classes
        eight_of_each = grid(generator.sample(8 * columns, **options).images, columns=columns, spec=None)[:, :, 0]
        assert_pixels(np.asarray(generator.grid(**options)), eight_of_each)


@torch.no_grad()
def test_an_export(trained, call, tmp_path):
    """Its document's values, and that the file is of the checkpoint that was named."""
    out, path = tmp_path / "x.safetensors", trained["classifier"] / "checkpoints" / f"step-{BEST:08d}.pt"
    options = f"--n 29 --data {trained['test.lmdb']} --format safetensors --json"
    document = json.loads(call(export, f"--checkpoint {trained['classifier']} {options} --out", out))
    records = numpy_generator(0, "eval", "export").permutation(COUNT)[:29]
    images, labels = to_float(trained.images["test"][records]), trained.labels["test"][records]
    logits = trained.network(images)
    torch.testing.assert_close(classifier_from(read(out))(images), logits, rtol=1e-4, atol=1e-5)
    same = {"largest_difference": 0.0, "agreement": 1.0, "accuracy_change": 0.0}
    same["accuracy"] = float((logits.argmax(1).numpy() == labels).mean())
    first, *later_rows = document.pop("rows")
    size = sum(tensor.nbytes for tensor in trained.network.state_dict().values())
    assert first == {"name": "fp32 eager", "bytes": size} | same
    assert later_rows[-1] == {"name": "safetensors", "bytes": out.stat().st_size} | same
    head = {"checkpoint": str(path), "step": BEST, "task": "classifier", "format": "safetensors", "file": str(out)}
    assert document == head | {"temperature": None, "passed": True, "reason": None, "checked": 29}
