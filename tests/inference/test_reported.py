"""What predict.py, generate.py, export.py and the library hand out, from the networks alone: the best checkpoint of a run
whose last is another, with options that are no defaults.
"""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

import duetgan
import export
import generate
import predict
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.grad_cam import overlay
from duetgan.models.restore import classifier_from, generator_from, read
from duetgan.utils.images import grid
from duetgan.utils.script import run_cli
from duetgan.utils.seeding import numpy_generator
from tests.inference.test_video import gif_frames
from tests.metrics.trained import (
    BEST,
    COUNT,
    NAMES,
    Trained,
    as_bytes,
    assert_pixels,
    pictures,
    samples_of,
    styles_of,
    to_float,
    trained,
)

__all__ = ["pictures", "trained"]  # fixtures
HOW = ["--which", "best", "--batch-size", "3"]


@pytest.fixture
def call(capsys):
    def run(script, *options):
        """What a command prints."""
        capsys.readouterr()
        assert run_cli(script.main, [str(option) for option in options]) == 0
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
    hook = network.network.layer3.register_forward_hook(lambda *given: maps.append(given[2].requires_grad_()) or maps[0])
    slopes = torch.autograd.grad(network(to_float(image[None]))[0, label], maps[0])[0]
    hook.remove()
    heat = (slopes.mean((2, 3), keepdim=True) * maps[0].detach())[0].sum(0).relu()
    return heat / heat.max().clamp(min=1e-30)


def test_predictions(trained, files, pictures, call, tmp_path):
    images, paths = files
    with torch.no_grad():
        views = [trained.network(to_float(each)) for each in (images, images.flip(3))]
    shares = (sum(views) / 2).double().softmax(1)
    order = shares.argsort(1, descending=True).tolist()
    rows = [{NAMES[k]: pytest.approx(float(row[k]), abs=1e-6) for k in best} for row, best in zip(shares, order, strict=True)]
    labels = [next(iter(row)) for row in rows]
    common = ["--checkpoint", trained["classifier"], *HOW, "--tta", "flip", *paths]
    found = json.loads(call(predict, *common, "--json"))
    expected = [{"file": str(path), "label": label, "probabilities": row} for path, label, row in zip(paths, labels, rows, strict=True)]
    assert found == expected
    assert [list(row["probabilities"]) for row in found] == [list(row) for row in rows]
    for top, names in ((None, [NAMES] * 7), (4, [[NAMES[k] for k in best[1:4]] for best in order])):
        more = ["--top", top, "--json"] if top else []
        printed = call(predict, *common, "--csv", tmp_path / "x.csv", "--sort-into", tmp_path / "sorted", *more)
        head, *table = csv.reader((tmp_path / "x.csv").read_text().splitlines())
        assert head == ["file", "label", "probability", *(["label_2", "probability_2", "label_3", "probability_3", "label_4", "probability_4"] if top else NAMES)]
        for line, path, row, several in zip(table, paths, rows, names, strict=True):
            values = [cell for name in several for cell in ([name, row[name]] if top else [row[name]])]
            cells = [float(cell) if isinstance(cell, str) and cell[:1].isdigit() else cell for cell in line]
            assert cells == [str(path), next(iter(row)), next(iter(row.values())), *values]
    assert [list(row["probabilities"]) for row in json.loads(printed)] == [[NAMES[k] for k in best[:4]] for best in order]
    placed = {path.relative_to(tmp_path / "sorted"): path.resolve() for path in (tmp_path / "sorted").rglob("*.png")}
    assert placed == {path.relative_to(tmp_path).parent / label / path.name: path for path, label in zip(paths, labels, strict=True)}
    lines = [f"{path}: {', '.join(f'{name} {float(share.expected):.3f}' for name, share in [*row.items()][:3])}" for path, row in zip(paths, rows, strict=True)]
    assert call(predict, *common).splitlines() == lines

    for name in (None, "bee"):
        pictures.clear()
        more = ["--gradcam", tmp_path / "maps", "--gradcam-layer", "layer3", *(["--gradcam-class", name] if name else [])]
        call(predict, *common, *more)
        assert len(pictures) == 7
        for image, path, label, row in zip(images, paths, labels, rows, strict=True):
            drawn, words = pictures[f"{path.stem}-gradcam.png"]
            asked = name or label
            heat = heat_of(trained.network, image, NAMES.index(asked))
            what = f"evidence for {asked} {row[asked].expected:.3f}" if heat.any() else f"no evidence for {asked}"
            assert words == [f"predicted {label} {row[label].expected:.3f}", what, "layer3"]
            assert_pixels(drawn, overlay(image, heat))


def test_samples(trained, pictures, call, tmp_path, monkeypatch):
    generator, seed, chosen = trained.generator, 5, [2, 0, 5]
    common = ["--checkpoint", trained["gan"], *HOW, "--seed", seed, "--classes", ",".join(NAMES[k] for k in chosen)]
    table = [*common, "--latents", "numpy", "--truncation-cutoff", 2, "--noise-mode", "const"]
    labels, indices = [chosen[i % 3] for i in range(11)], [i // 3 * 7 + chosen[i % 3] for i in range(11)]
    numpy_seeds = [seed + i // 3 for i in range(11)]
    how = {"psi": 0.6, "cutoff": 2, "noise": "const"}
    expected = samples_of(generator, labels, indices, seed, **how, numpy_seeds=numpy_seeds)
    call(generate, "grid", *table, "--truncation-psi", 0.6, "--n", 11, "--out", tmp_path / "grid.png")
    assert_pixels(pictures["grid.png"][0], expected[[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8]])
    call(generate, "grid", *table, "--truncation-psi", 0.6, "--n", 11, "--out", tmp_path / "folder")
    for image, label, index in zip(expected, labels, indices, strict=True):
        with Image.open(tmp_path / "folder" / f"seed{seed}-index{index}-{NAMES[label]}.png") as file:
            assert_pixels(np.asarray(file)[None], image)
    call(generate, "truncation", *table, "--psis", "0.2,-0.7", "--n", 5, "--out", tmp_path / "truncation.png")
    rows = [samples_of(generator, labels[:5], indices[:5], seed, **how | {"psi": psi}, numpy_seeds=numpy_seeds[:5]) for psi in (0.2, -0.7)]
    assert_pixels(pictures["truncation.png"][0], torch.cat(rows))
    assert pictures["truncation.png"][1] == ["psi 0.2", "psi -0.7", *(NAMES[k] for k in labels[:5])]

    call(generate, "mix", *common, "--truncation-psi", 0.6, "--layers", "1,3", "--n", 2, "--out", tmp_path / "mix.png")
    (a, a_maps), (b, b_maps) = (styles_of(generator, chosen[:2], [k * 7 + c for c in chosen[:2]], seed) for k in (0, 1))
    a, b = (generator.w_avg + 0.6 * (each - generator.w_avg) for each in (a, b))
    cells = [*generator.synthesis(b, b_maps)]
    for i in range(2):
        ws, maps = a[[i, i]].clone(), [b_maps[k] if k == 1 else level[[i, i]] for k, level in enumerate(a_maps)]
        ws[:, [1, 3]] = b[:, [1, 3]]
        cells += [*generator.synthesis(a, a_maps)[[i]], *generator.synthesis(ws, maps)]
    assert_pixels(pictures["mix.png"][0], as_bytes(torch.stack(cells)))

    film = ["--truncation-psi", 0.6, "--truncation-cutoff", 2, "--n", 3, "--frames", 4, "--fps", 25, "--scale", 2]
    call(generate, "interpolate", *common, *film, "--out", tmp_path / "x.gif")
    ws, maps = styles_of(generator, chosen, chosen, seed)
    ws = torch.stack([ws[k // 4].lerp(ws[(k // 4 + 1) % 3], k % 4 / 4) for k in range(12)])
    ws[:, :2] = generator.w_avg + 0.6 * (ws[:, :2] - generator.w_avg)
    frames = as_bytes(generator.synthesis(ws, [level[:1].expand(12, -1, -1, -1) for level in maps]))
    film, delays = gif_frames(tmp_path / "x.gif")
    assert delays == [40] * 12
    assert_pixels(film[:, ::2, ::2, 0], frames[:, 0])

    options = ["--truncation-psi", 0.6, "--n", 11, "--encoding", "png", "--out", tmp_path / "x.lmdb"]
    call(generate, "dataset", *table, *options)
    with Dataset(tmp_path / "x.lmdb") as reader:
        images, found = reader.read(np.arange(11))
        assert (reader.classes, found.tolist()) == (NAMES, labels)
        assert_pixels(images, expected)


def test_the_library(trained, files):
    images, paths = files
    classifier, generator = (duetgan.load(trained[name], which="best", device="cpu") for name in ("classifier", "gan"))
    assert isinstance(classifier, duetgan.Classifier)
    assert isinstance(generator, duetgan.Generator)
    with torch.no_grad():
        logits = trained.network(to_float(images))
    torch.testing.assert_close(classifier(torch.stack([classifier.transform(path) for path in paths])), logits)
    for load in (duetgan.load, duetgan.load_classifier):
        labels, probabilities = load(trained["classifier"], which="best", device="cpu").predict(paths)
        torch.testing.assert_close(probabilities, logits.double().softmax(1))
        assert labels == [NAMES[k] for k in logits.argmax(1)]
    chosen = [4, 1]
    indices = [i // 2 * 7 + chosen[i % 2] for i in range(5)]
    expected = samples_of(trained.generator, [4, 1, 4, 1, 4], indices, 3, psi=0.4, noise="none")
    options = {"seed": 3, "psi": 0.4, "noise": "none", "classes": ["elk", "ant"]}
    for load in (duetgan.load, duetgan.load_generator):
        found = load(trained["gan"], which="best", device="cpu").sample(5, **options)
        assert_pixels(found.images, expected)
        assert found[1:] == (["elk", "ant", "elk", "ant", "elk"], 3, indices)
    assert_pixels(np.asarray(generator.grid(5, columns=3, **options)), grid(expected, columns=3)[:, :, 0])
    assert_pixels(np.asarray(generator.grid(5, **options)), grid(expected, columns=2)[:, :, 0])


def test_an_export(trained, call, tmp_path):
    """Its document's values, and that the file is of the checkpoint that was named."""
    out, path = tmp_path / "x.safetensors", trained["classifier"] / "checkpoints" / f"step-{BEST:08d}.pt"
    options = ["--which", "best", "--n", 29, "--data", trained["test.lmdb"], "--repeats", 1, "--batch-size", 5, "--json"]
    document = json.loads(call(export, "--checkpoint", trained["classifier"], "--format", "safetensors", "--out", out, *options))
    records = numpy_generator(0, "eval", "export").permutation(COUNT)[:29]
    images, labels = trained.images["test"][records], trained.labels["test"][records]
    with torch.no_grad():
        logits = trained.network(to_float(images))
        torch.testing.assert_close(classifier_from(read(out))(to_float(images)), logits, rtol=1e-4, atol=1e-5)
    accuracy = float((logits.argmax(1).numpy() == labels).mean())
    size, file = sum(tensor.nbytes for tensor in trained.network.state_dict().values()), out.stat().st_size
    same = {"largest_difference": 0.0, "agreement": 1.0, "accuracy": accuracy, "accuracy_change": 0.0}
    for row in document["rows"]:
        for name in ("batch1", "batch"):
            assert row.pop(f"{name}_speedup") > 0
        assert 1e3 * row.pop("batch1_ms") > 0
        assert row.pop("images_per_second") > 0
    first, _, reduced, last = document.pop("rows")
    assert first == {"name": "fp32 eager", "bytes": size} | same
    assert last == {"name": "safetensors", "bytes": file} | same
    head = {"checkpoint": str(path), "step": BEST, "task": "classifier", "format": "safetensors", "file": str(out)}
    assert document == head | {"passed": True, "reason": None, "checked": 29, "batch_size": 5, "threads": 1}
