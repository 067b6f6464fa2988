"""Images of any depth and number of channels, from their files to batches, and what is refused."""

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from duetgan.commands.pack import main
from duetgan.data.errors import ImageError
from duetgan.data.images import fit
from duetgan.data.images.values import Values, bring, channels_last, kind, native
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import InfiniteLoader
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import visible
from tests.conftest import assert_raises
from tests.data.conftest import as_file
from tests.data.images.values_files import FLOATS, NUMBERS, ODD, npy, png

MOST = {"uint8": 255, "uint16": 65535, "float32": 1}


def folder_of(place: Path, files: dict[str, bytes]) -> Path:
    place.mkdir()
    for name, content in files.items():
        (place / name).write_bytes(content)
    return place


def packed(place: Path, files: dict[str, bytes], **options: Any) -> Dataset:
    folder = folder_of(place, files)
    with open_source(str(folder)) as source:
        pack(source, place.with_suffix(".lmdb"), duplicates=False, workers=0, **options)
    return Dataset(place.with_suffix(".lmdb"))


# --- an obvious, slow implementation


def slow_half(image: np.ndarray, alpha: bool) -> np.ndarray:
    """The mean of 2x2 pixels [C, H, W], one after the other; colours weighed by their alpha."""
    channels, height, width = image.shape
    smaller = np.zeros((channels, height // 2, width // 2))
    for c, y, x in np.ndindex(smaller.shape):
        four = image[c, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(float)
        weights = np.ones((2, 2))
        if alpha and c < channels - 1:
            weights = image[-1, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(float)
        total = weights.sum()
        smaller[c, y, x] = (four * weights).sum() / total if total else 0
    return smaller


@st.composite
def image_sets(draw: st.DrawFn) -> dict[str, Any]:
    depth = draw(st.sampled_from(["uint8", "uint16", "float32"]))
    kind = draw(st.sampled_from(["png", "npy"] if depth != "float32" else ["npy"]))
    channels = draw(st.integers(1, 4) if kind == "png" else st.sampled_from([1, 2, 3, 5, 7, 32]))
    encodings = ["raw", "png"] if depth != "float32" and channels in (1, 3, 4) else ["raw"]
    return {
        "depth": depth,
        "kind": kind,
        "channels": channels,
        "size": (2 * draw(st.integers(2, 8)), 2 * draw(st.integers(2, 8))),
        "count": draw(st.integers(2, 4)),
        "encoding": draw(st.sampled_from(encodings)),
        "seed": draw(st.integers(0, 1000)),
        "bits": draw(st.sampled_from([9, 12, 16])),
    }


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(image_sets())
def test_packed_and_read_as_an_obvious_implementation_has_it(tmp_path_factory, given):
    rng, channels, (height, width) = np.random.default_rng(given["seed"]), given["channels"], given["size"]
    shape = (given["count"], height, width, channels)
    depth, alpha = given["depth"], given["kind"] == "png" and channels in (2, 4)
    if depth == "float32":
        images = (rng.normal(size=shape) * 100).astype(np.float32)
    else:
        images = rng.integers(0, 256 if depth == "uint8" else 1 << given["bits"], shape).astype(depth)
    if alpha:
        images[..., -1][rng.random(shape[:3]) < 0.3] = 0
        images[..., -1][rng.random(shape[:3]) < 0.3] = MOST[depth]
    write: Any = {"png": png, "npy": npy}[given["kind"]]
    place = tmp_path_factory.mktemp("property") / "set"
    files = {f"{number}.{given['kind']}": write(image) for number, image in enumerate(images)}
    smallest = min(height, width) // 2 if given["encoding"] == "raw" and min(height, width) >= 8 else None
    size = f"{width}x{height}"
    more: dict[str, Any] = {"channels": channels, "depth": {"uint8": "8", "uint16": "16", "float32": "float"}[depth]}
    with packed(place, files, size=size, encoding=given["encoding"], smallest=smallest, **more) as reader:
        assert (reader.spec.channels, reader.spec.alpha, reader.spec.depth) == (channels, alpha, depth)
        wanted = images.transpose(0, 3, 1, 2)
        order = rng.permutation(len(images))
        read, _ = reader.read(order)
        assert read.dtype == depth
        np.testing.assert_array_equal(read, wanted[order])
        sampler = GlobalSampler(len(reader), batch_size=2, seed=1)
        loader = InfiniteLoader(reader, sampler, device="cpu", prefetch=0)
        for _ in range(3):
            indices, _ = sampler.batch(loader.position)
            batch = next(loader)
            assert torch.equal(batch.images, torch.from_numpy(np.ascontiguousarray(wanted[indices])))

        if smallest is not None:
            with Dataset(place.with_suffix(".lmdb"), resolution=f"{width // 2}x{height // 2}") as smaller:
                half = smaller.read(range(len(images)))[0]
            slow = np.stack([slow_half(image, alpha) for image in wanted])
            if alpha:  # what is hardly seen has no exact colour
                slow, half = slow * (slow[:, -1:] >= 0.5), half * (slow[:, -1:] >= 0.5)
            unit = 0 if depth == "float32" else 0.5001
            np.testing.assert_allclose(half, slow, atol=unit + np.abs(slow).max() * 1e-6, rtol=0)
        if depth == "uint16" and not alpha:
            assert (reader.spec.low, reader.spec.high) == (0, (1 << int(images.max()).bit_length()) - 1)
        share = (wanted.astype(float) - reader.spec.low) / (reader.spec.high - reader.spec.low)
        np.testing.assert_allclose(reader.meta.mean, share.mean((0, 2, 3)), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(reader.meta.std, share.std((0, 2, 3)), rtol=1e-5, atol=1e-7)


# --- what is asked for, and what is found


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((3, 32, 32), 3), ((1, 28, 28), 1), ((16, 8, 8), 16), ((32, 32, 3), 3), ((8, 8, 13), 13), ((4, 6, 5), 5)],
)
def test_which_axis_holds_channels(shape, channels):
    assert channels_last(np.zeros(shape)).shape[-1] == channels


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["<u2", ">u2", "<i4", "<f8"])
def test_orders_of_memory_and_bytes(order, kind):
    content = npy(np.asarray(NUMBERS[::-1].astype(kind), order=order))
    np.testing.assert_array_equal(native(content).pixels, NUMBERS[::-1])


@pytest.mark.parametrize(
    ("files", "options", "words", "told"),
    [
        ({"a.png": png(NUMBERS)}, {}, "RGB", ""),
        ({"a.png": png(NUMBERS)}, {"depth": "16"}, "RGB, 16 bits (0 to 65535)", ""),
        (
            {"a.png": png(NUMBERS), "b.png": png(NUMBERS[..., :1] >> 8)},
            {"depth": "auto"},
            "RGB, 16 bits",
            "1 of grey, 16",
        ),
        (
            {"a.png": png(NUMBERS), "b.png": png((NUMBERS >> 8).astype(np.uint8))},
            {"depth": "auto"},
            "RGB, 16 bits",
            "1 of RGB, 16",
        ),
        ({"a.npy": npy(FLOATS)}, {}, "5 channels, floats", "1 of 5 channels, floats: taken as"),
        ({"a.npy": npy(FLOATS)}, {"value_range": (-4.0, 4.0)}, "5 channels, floats (-4 to 4)", ""),
        ({"a.png": png(np.zeros((8, 8, 3), np.uint8))}, {"channels": 4}, "RGB + alpha", ""),
        ({"a.png": png(np.zeros((8, 8, 2), np.uint8)), "b.png": png(NUMBERS)}, {"channels": "auto"}, "RGB + alpha", ""),
        ({"a.npy": npy(NUMBERS), "b.png": png(NUMBERS)}, {}, "RGB", ""),  # beside images arrays are something else
    ],
)
def test_what_is_packed(files, options, words, told, tmp_path, capsys):
    with packed(tmp_path / "x", files, **options) as reader:
        assert reader.spec.words.startswith(words)
        assert len(reader) == len(files) - ("a.npy" in files and "b.png" in files)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "options", "told"),
    [
        ({"a.npy": npy(FLOATS), "b.npy": npy(NUMBERS)}, {}, "floats and whole numbers have no range in common"),
        (
            {"a.npy": npy(FLOATS), "b.npy": npy(FLOATS[..., :2])},
            {},
            "1 of 2 channels, floats: these do not go together",
        ),
        ({"a.npy": npy(FLOATS), "b.npy": npy(FLOATS[..., :2])}, {"channels": 5}, "2 channels where 5 channels, floats"),
        ({"a.npy": npy(FLOATS)}, {"depth": "8"}, "floating-point pixels; .* or pack it with --depth float"),
        ({"a.npy": npy(FLOATS)}, {"encoding": "png"}, "png does not keep images of 5 channels, floats: take raw"),
        ({"a.npy": npy(FLOATS)}, {"value_range": (3.0, 3.0)}, "--range 3,3: .* do not fit float32"),
        ({"a.png": png(NUMBERS)}, {"value_range": (0.0, 9.0)}, "--range 0,9: .* do not fit uint8"),
        ({"a.png": png(NUMBERS)}, {"channels": 4, "encoding": "source"}, "encoding source does not keep images of RGB"),
        ({"a.npy": npy(NUMBERS)}, {"encoding": "source"}, "has no files to keep: choose --encoding raw or png"),
        ({"a.png": png(NUMBERS)}, {"channels": 7}, "has 3 channels where 7 channels was expected; pass --channels 3"),
    ],
)
def test_what_does_not_go_together_is_refused(files, options, told, tmp_path):
    assert_raises(UserError, told, packed, tmp_path / "x", files, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]


def test_from_one_form_to_another():
    eight, sixteen = (NUMBERS >> 8).astype(np.uint8), NUMBERS
    for values, spec, wanted in (
        (Values(eight), ImageSpec.of(3, 0, {"depth": "uint16"}), eight.astype(int) * 257),
        (Values(sixteen), ImageSpec(3, 0, 0), eight),
        (Values(sixteen), ImageSpec.of(3, 0, {"depth": "float32"}), sixteen),
        (Values(eight[..., :1]), ImageSpec(3, 0, 0), np.repeat(eight[..., :1], 3, 2)),
        (Values(eight), ImageSpec(4, 0, 0, alpha=True), np.dstack([eight, np.full((8, 8), 255)])),
        (
            Values(sixteen),
            ImageSpec.of(4, 0, {"depth": "uint16", "alpha": True}),
            np.dstack([sixteen, np.full((8, 8), 65535)]),
        ),
    ):
        np.testing.assert_array_equal(bring(values, spec), wanted)
    grey = bring(Values(sixteen), ImageSpec.of(1, 0, {"depth": "uint16"}))
    np.testing.assert_allclose(grey[..., 0], sixteen @ [0.299, 0.587, 0.114], atol=0.5001)
    rgba = np.random.default_rng(0).integers(0, 256, (8, 8, 4), dtype=np.uint8)
    pillow = Image.alpha_composite(Image.new("RGBA", (8, 8), "white"), Image.fromarray(rgba)).convert("RGB")
    on_white = bring(Values(rgba, True), ImageSpec(3, 0, 0)).astype(int)
    assert np.abs(on_white - np.asarray(pillow)).max() <= 1
    far = np.array([[[0.5, 2.0]] * 8] * 8, np.float32)
    assert_raises(
        ImageError,
        "alpha outside 0 to 1",
        bring,
        Values(far, True),
        ImageSpec.of(2, 0, {"depth": "float32", "alpha": True}),
    )


def test_every_png_is_read_as_it_was_written():
    rng = np.random.default_rng(5)
    for depth in ("uint8", "uint16"):
        for channels in (1, 2, 3, 4):
            pixels = rng.integers(0, MOST[depth] + 1, (6, 5, channels)).astype(depth)
            found = native(png(pixels))
            np.testing.assert_array_equal(found.pixels, pixels)
            assert found.alpha == (channels in (2, 4))
            spec = kind(png(pixels))
            assert (spec.channels, spec.alpha, spec.depth) == (channels, channels in (2, 4), depth)
    palette = Image.fromarray(rng.integers(0, 4, (6, 5), dtype=np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 1, 2, 3])
    found = native(as_file(palette, transparency=2))
    assert found.alpha
    np.testing.assert_array_equal(found.pixels[..., 3] == 0, np.asarray(palette) == 2)
    assert (found.pixels[np.asarray(palette) == 1] == (40, 50, 60, 255)).all()


def test_transparent_colours_do_not_bleed_where_images_are_scaled(tmp_path):
    """A red disc whose surroundings are green but transparent stays red to its edge."""
    pixels = np.zeros((32, 32, 4), np.uint8)
    inside = np.hypot(*(np.indices((32, 32)) - 15.5)) < 10
    pixels[inside], pixels[~inside] = (255, 0, 0, 255), (0, 255, 0, 0)
    for size in (12, 20, 48):
        scaled = fit(pixels, size, "crop", alpha=True)
        seen = scaled[..., 3] > 20
        assert scaled[seen][:, 1].max() <= 2
        assert scaled[seen][:, 0].min() >= 250
    ways: dict[str, dict[str, Any]] = {"raw": {}, "png": {"encoding": "png"}, "smaller": {"size": 12}}
    for name, options in ways.items():  # also where images are scaled while they are packed or read
        packed(tmp_path / name, {"a.png": png(pixels)}, channels=4, **options).close()
        with Dataset(tmp_path / f"{name}.lmdb", resolution=12) as dataset:
            (scaled,), _ = dataset.read([0])
        seen = scaled[3] > 20
        assert seen.sum() > 20
        assert scaled[1, seen].max() <= 2
        assert scaled[0, seen].min() >= 250


def test_a_range_is_that_of_the_file_that_is_packed_anew_and_of_both_parts(tmp_path):
    """Of other values than before, it is found anew."""
    floats = {f"{number}.npy": npy(np.random.default_rng(number).normal(size=(8, 8, 5))) for number in range(6)}
    ends = pytest.approx(np.quantile(NUMBERS, (0.001, 0.999)).tolist(), rel=1e-6)
    cases: tuple[Any, ...] = (
        (floats, {"value_range": (-9.0, 9.0)}, {"size": 4}, (-9, 9)),
        (floats, {"value_range": (-9.0, 9.0)}, {"val_share": 0.5}, (-9, 9)),
        ({"a.png": png(NUMBERS)}, {"depth": "16"}, {"depth": "float"}, ends),
    )
    for number, (files, options, again, expected) in enumerate(cases):
        first = packed(tmp_path / f"{number}", files, **options)
        with open_source(str(first.path)) as source:
            summary = pack(source, tmp_path / "again.lmdb", overwrite=True, **again)
        ranges = [(meta.spec.low, meta.spec.high) for meta in (summary.meta, summary.held_out) if meta]
        assert ranges == [expected] * len(ranges)
    whole, training = packed(tmp_path / "whole", floats), packed(tmp_path / "parts", floats, val_share=0.5)
    with Dataset(tmp_path / "parts-val.lmdb") as held_out:
        assert whole.spec == training.spec == held_out.spec


def test_people_see_the_range():
    spec = ImageSpec.of(5, 0, {"depth": "uint16", "low": 100.0, "high": 200.0})
    pixels = np.full((4, 4, 5), 150, np.uint16)
    pixels[0, 0] = 0, 100, 200, 9, 9
    seen = np.asarray(visible(pixels.transpose(2, 0, 1), spec, 255)).transpose(1, 2, 0)
    assert seen[0, 0].tolist() == [0, 0, 255]
    assert seen[1, 1].tolist() == [128, 128, 128]
    clear = np.asarray(visible(np.zeros((2, 4, 4), np.uint8), ImageSpec(2, 0, 0, alpha=True), 255)).transpose(1, 2, 0)
    assert clear.shape == (4, 4, 1)
    assert (clear == 255).all()


# --- odd files


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_refused_in_one_line(name, tmp_path, refused):
    make, told = ODD[name]
    content = make()
    folder = folder_of(tmp_path / "images", {name: content})
    options = ["--channels", "5", "--depth", "float"] if name.endswith("npy") else ["--depth", "16"]
    tracemalloc.start()
    try:
        line = refused(main, folder, tmp_path / "x.lmdb", *options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (32 << 20) + 4 * len(content)
    assert name in line
    assert re.search(told, line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images"]
    good = {"npy": npy(FLOATS), "png": png(NUMBERS)}[name[-3:]]
    for number in range(2):
        (folder / f"good{number}.{'npy' if name.endswith('npy') else 'png'}").write_bytes(good)
    main([str(folder), str(tmp_path / "x.lmdb"), *options, "--on-error", "skip"])
    assert len(Dataset(tmp_path / "x.lmdb")) == 2
