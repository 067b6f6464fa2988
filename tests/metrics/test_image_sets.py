"""`duet compare-images`: for an evaluation's images it gives the evaluation's figures; what it adds has an oracle."""

import json
import re
import tarfile
import zipfile
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.distance import cdist

import duetgan
from duetgan.commands import compare_images as script
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.evaluate_gan import evaluate_generator
from duetgan.metrics.features.extractors import build, pixel_features
from duetgan.metrics.features.selection import Selection
from duetgan.metrics.figures import UNLABELLED, Figure
from duetgan.metrics.image_sets import near_copies
from duetgan.metrics.intervals import Measured, wilson
from duetgan.metrics.samples import memorisation
from duetgan.metrics.samples.frechet import frechet_distance
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.seeding import numpy_generator
from tests.conftest import assert_raises
from tests.metrics.conftest import SIDE, pack
from tests.metrics.test_document import formatted

SEED = 3


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Where copies of folders and indices of tars are kept."""
    monkeypatch.setenv("DUET_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def generator(runs):
    return generator_from(load(resolve(runs["gan"])))


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Images like the real ones as a packed file, a folder, a zip and a tar, by name."""
    folder = tmp_path_factory.mktemp("samples")
    with Dataset(pack(folder / "packed.lmdb", seed=7)) as images:
        pixels, _ = images.read(range(len(images)))
    (folder / "folder").mkdir()
    with zipfile.ZipFile(folder / "x.zip", "w") as archive, tarfile.open(folder / "x.tar", "w") as tar:
        for number, image in enumerate(pixels):
            path = folder / "folder" / f"{number:03}.png"
            Image.fromarray(image[0]).save(path)
            archive.write(path, path.name)
            tar.add(path, path.name)
    return {path.stem if path.suffix == ".lmdb" else path.suffix or "folder": path for path in folder.iterdir()}


def features_of(path: Any, seed: int | None = None, role: str = "test") -> torch.Tensor:
    """The pixel features of a packed file, in the order of a seed's draw."""
    with Dataset(path) as images:
        order = np.arange(len(images))
        if seed is not None:
            order = numpy_generator(seed, "eval", role).permutation(len(images))
        return pixel_features(images.spec)(torch.from_numpy(images.read(order)[0])).double()


@pytest.mark.parametrize("form", ["packed", "folder", ".zip", ".tar"])
def test_the_figures_are_those_of_an_evaluation_of_the_same_images(form, samples, generator, runs, files, monkeypatch):
    classifier = f"classifier:{runs['classifier']}"
    names = ["pixels", classifier] if form == "packed" else [classifier]  # others are read as RGB
    with ExitStack() as stack:
        paths = samples["packed"], files["val_path"], files["path"]
        drawn, test, train = (stack.enter_context(Dataset(path)) for path in paths)
        draw = lambda *arguments, seed: torch.from_numpy(drawn.read(arguments[2])[0])  # noqa: E731
        monkeypatch.setattr("duetgan.metrics.evaluate_gan.draw_samples", draw)
        extractors = build(names, device=torch.device("cpu"), spec=test.spec)
        expected = evaluate_generator(generator, test, n=5000, seed=SEED, extractors=extractors, train_dataset=train)
    result = duetgan.compare_images(
        samples[form], files["val_path"], training=files["path"], extractors=names, seed=SEED, device="cpu"
    ).document
    assert (result["n"], result["seed"], result["size"]) == (60, SEED, f"{SIDE}x{SIDE}")
    keys = [row.key for row in UNLABELLED]
    assert keys[:2] == ["frechet", "kernel"]
    assert {"precision", "recall", "density", "coverage"} <= set(keys)
    for row, theirs in zip(result["distances"], expected["distances"], strict=True):
        for key in ("extractor", "weights", "n"):
            assert row[key] == theirs[key]
        for key in keys:
            assert theirs[key] not in (0, 1) or theirs[f"{key}_interval"], f"{key} tells nothing"
            assert row[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key
            interval = theirs[f"{key}_interval"]
            assert row[f"{key}_interval"] == (interval and pytest.approx(interval, rel=1e-5, abs=1e-7)), key
        assert row["floors"]["frechet"] == pytest.approx(theirs["floor"], rel=1e-5)
        assert row["floors"]["kernel"] == pytest.approx(theirs["kernel_floor"], rel=1e-5, abs=1e-7)
    if form == "packed":
        for pair in chain(*(expected["memorisation"][name] for name in ("closest", "first"))):
            pair["label"] = pair["sample"] // 20  # of the image that was given, 20 of each class
        assert result["memorisation"] == expected["memorisation"]
    else:  # in 8x8 px of RGB, distances are larger by the root of 3
        for key in ("share", "expected", "near", "p_value"):
            assert result["memorisation"][key] == pytest.approx(expected["memorisation"][key])


@pytest.mark.parametrize("n", [24, 60])
def test_without_training_images_floors_are_of_halves_and_copies_are_of_the_reference(n, samples, files, tmp_path):
    """Nine images of the reference are among those compared, with hardly visible changes."""
    with Dataset(files["path"]) as reference:
        order = numpy_generator(SEED, "eval", "test").permutation(90)[:9]
        copies = reference.read(order)[0] ^ 1
    with Dataset(samples["packed"]) as images:
        pixels = np.concatenate([copies, images.read(range(n - 9))[0]])
    pack_arrays(tmp_path / "x.lmdb", pixels, np.zeros(n, np.int64), ["x"])
    result = duetgan.compare_images(tmp_path / "x.lmdb", files["path"], extractors=["pixels"], seed=SEED)
    (row,) = result.document["distances"]
    fake, real = features_of(tmp_path / "x.lmdb"), features_of(files["path"], SEED)
    assert row["frechet"] == pytest.approx(frechet_distance(fake, real[:n])[0], rel=1e-6)
    half = min(n, 45)
    assert row["floors"]["n"] == half
    assert row["floors"]["frechet"] == pytest.approx(frechet_distance(real[half : 2 * half], real[:half])[0], rel=1e-6)
    within = cdist(real[:n], real[:n])
    np.fill_diagonal(within, np.inf)
    near = cdist(fake, real[:n]).min(1) < within.min(1).min()
    found = result.document["memorisation"]
    assert near.sum() >= 9
    assert (found["share"], found["share_interval"]) == (near.mean(), wilson(int(near.sum()), n))
    assert (found["expected"], found["searched"]) == (1 / (n + 1), n)
    closest = {(pair["sample"], pair["train"]) for pair in found["closest"][:9]}
    assert closest == set(enumerate(order.tolist()))


def test_an_image_that_is_as_near_as_the_bound_is_no_copy():
    """Twins in the reference are at distance 0, and so is a copy."""
    real = torch.tensor([[0.0], [0.0], [1.0], [3.0]])
    reference = memorisation.RealImages(None, Selection(np.arange(4) + 7, np.array([0, 1, 2, 0]), ""), real)  # type: ignore[arg-type]
    found = near_copies(pixel_features(ImageSpec(1, 8, 8)), torch.tensor([[1.0], [2.5], [0.0]]), reference)
    closest = [(0, 0, 9, 0.0), (2, 2, 7, 0.0), (1, 1, 9, 1.5)]
    keys = ("sample", "label", "train", "distance")
    assert found.pop("closest") == [dict(zip(keys, pair, strict=True)) for pair in closest]
    about = {"extractor": "pixels", "weights": "", "searched": 3, "expected": 0.25}
    assert found == about | {"share": 0.0, "share_interval": wilson(0, 3)}


def test_sets_of_more_than_eight_bits_are_compared_as_they_are_stored(tmp_path):
    """In one channel, and from the same values to the same ones."""
    draw = np.random.default_rng(0)
    for name, channels, high in (("a", 1, 4095), ("b", 1, 4095), ("c", 1, 65535), ("d", 3, 4095)):
        values = draw.integers(0, 4096, (11, channels, 8, 8)).astype(np.uint16)
        values[0, 0, 0, :2] = 0, high  # the range is that of the values
        pack_arrays(tmp_path / f"{name}.lmdb", values)
    compare = partial(duetgan.compare_images, tmp_path / "a.lmdb", extractors=["pixels"])
    document = compare(tmp_path / "b.lmdb").document
    (row,) = document["distances"]
    assert (row["floors"]["density"], "density" in document["notes"]) == (None, False)  # half of 11 are too few
    fake, real = (features_of(tmp_path / f"{name}.lmdb", seed) for name, seed in (("a", None), ("b", 0)))
    assert row["frechet"] == pytest.approx(frechet_distance(fake, real)[0], rel=1e-6)
    for other in "cd":
        assert_raises(duetgan.UserError, "or pack them alike", compare, tmp_path / f"{other}.lmdb")


def test_results_are_typed_and_a_table(samples, files, monkeypatch):
    """Of a larger set, n images are drawn by the seed."""
    shown: list[Any] = []

    def noted(**named: Any) -> Bar:
        shown.append((named["desc"], named["total"], named["disable"]))
        return Bar(**named | {"disable": True})

    monkeypatch.setattr("duetgan.metrics.features.extractors.Bar", noted)
    settings: dict[str, Any] = {"extractors": ["pixels"], "n": 30, "seed": SEED}
    result = duetgan.compare_images(samples["packed"], files["val_path"], **settings)
    assert duetgan.compare_images(samples["packed"], files["val_path"], **settings, progress=True) == result
    sizes = (30, 60)  # as many again of the reference, for the floors
    assert shown == [(words, count, not words) for words in ("", "images") for count in sizes]
    row = result.document["distances"][0]
    fake, real = features_of(samples["packed"], SEED, "images")[:30], features_of(files["val_path"], SEED)[:30]
    assert row["frechet"] == pytest.approx(frechet_distance(fake, real)[0], rel=1e-6)
    place = int(cdist(fake, real).min(1).argmin())
    record = numpy_generator(SEED, "eval", "images").permutation(60)[place]  # packed in the order of classes
    closest = result.document["memorisation"]["closest"][0]
    assert (closest["sample"], closest["label"]) == (record, record // 20)
    metric = result["recall"]
    assert (metric.value, [metric.low, metric.high]) == (row["recall"], row["recall_interval"])
    assert (metric.floor, metric.extractor) == (row["floors"]["recall"], "pixels")
    with pytest.raises(KeyError):
        result["recal"]
    frame = result.to_pandas()
    assert frame["name"].tolist() == [row.key for row in UNLABELLED]
    assert frame.set_index("name").loc["kernel", "value"] == row["kernel"]
    bright = Figure("x", "x", "x", lambda record: Measured(float(record.pixels[0].mean())), interval=False)
    monkeypatch.setattr("duetgan.metrics.image_sets.UNLABELLED", [bright])
    (row,) = duetgan.compare_images(samples["packed"], files["val_path"], **settings).document["distances"]
    means = float(fake.mean()), float(features_of(files["val_path"], SEED)[30:].mean())
    assert (row["x"], row["floors"]["x"]) == pytest.approx(means)


def test_the_command_prints_a_table_or_the_document(samples, files, capsys, refused, monkeypatch):
    hidden: list[bool] = []

    def noted(**named: Any) -> Bar:
        hidden.append(named["disable"])
        return Bar(**named | {"disable": True})

    monkeypatch.setattr("duetgan.metrics.features.extractors.Bar", noted)
    arguments = [str(samples["packed"]), files["val_path"], "--extractor", "pixels", "--n", "40"]
    assert run_cli(script.main, [*arguments, "--json"]) == 0
    assert hidden == [False, False]
    document = json.loads(capsys.readouterr().out)
    assert document == duetgan.compare_images(*arguments[:2], extractors=["pixels"], n=40).document
    cases: list[tuple[list[str], str, int]] = [([], "one half of the reference", 30)]
    cases.append((["--training", files["path"]], files["path"], 40))
    for more, origin, floor_n in cases:
        assert run_cli(script.main, [*arguments, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        options = {"training": files["path"]} if more else {}
        document = duetgan.compare_images(*arguments[:2], extractors=["pixels"], n=40, **options).document
        assert lines[:3] == [" compared with ".join(arguments[:2]), f"n 40 of each, {SIDE}x{SIDE} px, seed 0", ""]
        (row,), copies = document["distances"], document["memorisation"]
        table = [["pixels", "value", f"floor (n {floor_n})"]]
        for figure in UNLABELLED:
            value, floor = (formatted(figure.key, values[figure.key]) for values in (row, row["floors"]))
            if row[f"{figure.key}_interval"]:
                low, high = (formatted(figure.key, end) for end in row[f"{figure.key}_interval"])
                value += f" (95 % interval {low.removesuffix(' %')} to {high})"
            table.append([figure.title, value, floor])
        assert [re.split(r" {2,}", line) for line in lines[3:-4]] == table
        assert lines[-4:-2] == ["", f"floor: the metric between {origin} and the other images of the reference"]
        share, expected = (formatted("recall", copies[key]) for key in ("share", "expected"))
        words = f"copies: {share} of the images .*{expected}.*pixels"
        if more:
            words = f"copies: no sign of copies: {share} of the samples .*{expected}"
            words += f".* p-value {formatted('p', copies['p_value'])} .*pixels, 90 "
        assert re.match(words, lines[-2])
        assert lines[-1].startswith("Few test images (40): distances")


def test_refusals_are_one_line(samples, files, tmp_path, refused):
    for name, sizes in (("mixed", [(8, 8), (9, 12), (8, 8), (8, 8)]), ("few", [(8, 8)] * 3)):
        (tmp_path / name).mkdir()
        for number, size in enumerate(sizes):
            Image.fromarray(np.full(size, 40 * number, np.uint8)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no image")
    large = pack(tmp_path / "large.lmdb", side=16, count=9)
    four = pack(tmp_path / "four.lmdb", channels=4, count=9)
    (tmp_path / "damaged.lmdb").write_bytes(Path(files["path"]).read_bytes()[:5000])
    for images, told in (
        (large, f"test.lmdb: its images have {SIDE} px, grey, those of {large} 16 px, grey; give --size for one size"),
        (four, f"test.lmdb: its images have 8 px, grey, those of {four} 8 px, 4 channels; give"),
        (tmp_path / "mixed", "mixed: its images have 2 sizes, 8x8 to 12x9; give one with --size"),
        (tmp_path / "few", "a comparison needs at least 4 images of each set, not 3"),
        (tmp_path / "absent", "absent"),
        (tmp_path / "broken", "a.png"),
        (tmp_path / "damaged.lmdb", "damaged.lmdb"),
    ):
        assert told in refused(script.main, str(images), files["val_path"], "--extractor", "pixels")
    mixed = duetgan.compare_images(tmp_path / "mixed", large, extractors=["pixels"], size=8)
    assert (mixed.document["n"], mixed.document["size"]) == (4, "8x8")
    wide = duetgan.compare_images(tmp_path / "mixed", large, extractors=["pixels"], size="16x8")
    assert wide.document["size"] == "16x8"
    assert mixed.document["distances"][0]["density"] is None
    assert "more than 5" in mixed.document["notes"]["density"]
