"""The explorer over HTTP: its answers are those of generate.py and predict.py, and bad requests get one line."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.editing.editor import Editor
from duetgan.extras.explorer import models
from duetgan.extras.explorer.models import FRAMES, Source, address
from duetgan.extras.influence.scores import gradient_batches, influence, snapshot
from duetgan.inference.samples import Sampler
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.utils.checkpoint import resolve
from tests.extras.explorer.conftest import CLASSIFIER, GAN, PLAIN, grey, one_line, pixels, png, sample, two
from tests.metrics.conftest import CLASSES


def test_page_loads_nothing_from_elsewhere_and_its_headers_forbid_it(client):
    found = client.get("/")
    policy = found.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'self';" in policy
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    assert found.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    addresses = re.findall(r'(?:src|href)="([^"#]+)"', found.text)
    assert {"page.js", "page.css", "report.css"} <= set(addresses)
    for place in addresses:
        if place != "data:,":
            assert client.get(f"/{place}").status_code == 200
    for name in ("page.js", "page.css", "page.html"):
        text = (Path(models.__file__).parent / name).read_text()
        assert "//" not in re.sub(r"^\s*//.*|\s//\s.*", "", text, flags=re.M)


def test_a_sample_is_that_of_generate(client, shown):
    for mean in ("class", "global"):
        images = client.get("/api/draw", query_string=sample(1, seed=5, psi=0.7, mean=mean, count=2)).json["images"]
        assert [image["seed"] for image in images] == [5, 6]
        for image in images:
            how = {"seed": image["seed"], "truncation_psi": 0.7, "truncation_mean": mean}
            sampler = Sampler(generator=shown[GAN].model, chosen=[1], **how)
            assert (pixels(image["address"]) == sampler.images([0])[0, 0].numpy()).all()
    images = client.get("/api/draw", query_string=sample(seed=2**32 - 1, count=3)).json["images"]
    assert [image["seed"] for image in images] == [2**32 - 3, 2**32 - 2, 2**32 - 1]


def test_mixtures_and_walks_go_from_a_to_b(client, shown):
    last = shown[GAN].model.num_ws - 1
    drawn = {which: client.get("/api/draw", query_string=sample(label, seed=seed)).json["images"][0]["address"]
             for which, label, seed in (("a", 0, 3), ("b", 2, 4))}  # fmt: skip
    for layers, same in (("", "a"), (f"0-{last}", "b"), (f"{last}", None)):
        made = client.get("/api/mix", query_string=two(layers=layers)).json
        assert (made["a"], made["b"]) == (drawn["a"], drawn["b"])
        assert [which for which in ("a", "b") if made[which] == made["mixed"]] == ([same] if same else [])
    frames = [pixels(frame).astype(int) for frame in client.get("/api/walk", query_string=two()).json["frames"]]
    assert len(frames) == FRAMES + 1
    a = pixels(client.get("/api/draw", query_string=sample(0, seed=3)).json["images"][0]["address"]).astype(int)
    assert np.abs(frames[0] - a).max() <= 1
    sampler = Source(3, 0).sampler(shown[GAN])
    generator, noise = shown[GAN].model, sampler.latents([0]).noise
    z, label, _ = vars(Source(4, 2).sampler(shown[GAN]).latents([0])).values()
    end = generator(z, label, noise=noise)[0, 0] * 127.5 + 127.5
    assert np.abs(frames[-1] - end.round().clamp(0, 255).numpy()).max() <= 1
    steps = [np.abs(after - before).mean() for before, after in itertools.pairwise(frames)]
    assert max(steps) < 0.3 * np.abs(frames[-1] - frames[0]).mean()


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("draw", sample(seed=2**32), "is not a whole number"),
        ("draw", sample(seed="9" * 5000), "is not a whole number from 0 to 4,294,967,295"),
        ("draw", sample(seed="²"), "is not a whole number"),
        ("draw", sample(psi="x\ny"), "is not a finite number from 0 to 2"),
        ("draw", sample(mean="all"), "mean 'all': give class or global"),
        ("draw", {**sample(), "class": "<script>\x1b" + "x" * 9999}, "/gan"),
        ("draw", {**sample(), "run": "../../gan"}, "run '../../gan' is not"),
        ("draw", {"run": PLAIN, "seed": 1, "psi": 0.5}, "works on w"),
        ("edit", sample(by=GAN, target="dark"), "gan is a GAN; a classifier is needed"),
        ("mix", two(layers="0-99"), "is no layer or range within 0-3"),
    ],
)
def test_bad_questions(client, path, query, words):
    assert words in one_line(client.get(f"/api/{path}", query_string=query))


def test_an_edit_begins_at_the_sample_and_moves_as_the_editor_does(client, shown, monkeypatch):
    monkeypatch.setattr(
        Editor,
        "starts",
        lambda editor, label, count, seed=None: editor.start(Source(seed or 0, label).sampler(shown[GAN]), range(4)),
    )  # an untrained pair agrees on nothing
    query = sample(0, seed=5, by=CLASSIFIER, target=CLASSES[2])
    found = client.get("/api/edit", query_string=query).json
    assert (found["source"], found["target"], found["space"]) == (CLASSES[0], CLASSES[2], "w")
    frames = {frame["step"]: frame for frame in found["frames"]}
    drawn = client.get("/api/draw", query_string=sample(0, seed=5)).json["images"][0]["address"]
    assert frames[0]["address"] == drawn
    assert len({frame["address"] for frame in found["frames"]}) > 2
    row = judge_images(shown[CLASSIFIER].model, torch.from_numpy(pixels(drawn).copy())[None, None])[0]
    assert [frames[0]["from"], frames[0]["to"]] == pytest.approx([float(row[0]), float(row[2])])
    monkeypatch.setattr(Editor, "_sensitivity", lambda *_: pytest.fail("searched again"))
    assert client.get("/api/edit", query_string=query).json == found


def test_names_as_predict_does(client, shown):
    found = client.post("/api/classify", query_string={"run": CLASSIFIER}, data=grey(90)).json
    row = judge_images(shown[CLASSIFIER].model, torch.full((1, 1, 8, 8), 90, dtype=torch.uint8))[0]
    told = {entry["name"]: entry["probability"] for entry in found["classes"]}
    assert told == {name: float(row[label]) for label, name in enumerate(CLASSES)}
    assert list(told.values()) == sorted(told.values(), reverse=True)
    assert (pixels(found["image"])[..., 0] == 90).all()
    assert pixels(found["evidence"]).shape == pixels(found["image"]).shape


def test_training_images_that_spoke(client, shown, folder):
    found = client.post("/api/influence", query_string={"run": CLASSIFIER}, data=grey()).json
    image = torch.full((1, 8, 8), 128, dtype=torch.uint8)
    label = int(judge_images(shown[CLASSIFIER].model, image[None])[0].argmax())
    assert found["class"] == CLASSES[label]
    last = snapshot(resolve(folder / "classifier"), torch.device("cpu"))
    with Dataset(folder / "data" / "train.lmdb") as reader:
        scores = influence(gradient_batches([last], reader), len(reader), image, label)
        best = int(scores.argmax())
        assert (pixels(found["images"][0]["address"]) == reader.read([best])[0][0, 0]).all()
        assert found["images"][0]["class"] == CLASSES[reader.labels()[best]]
    assert found["images"][0]["record"] == best
    told = [entry["score"] for entry in found["images"]]
    assert told == sorted(told, reverse=True)
    assert min(told) > 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no image was sent"),
        (b"<svg onload='alert(1)'/>", "is not an image"),
        (grey()[:60], "is truncated or damaged"),
        (png(np.zeros((2, 2), np.uint8)), "is only 2x2 px"),
        (b"P6 100000 100000 255 ", "pixels"),
    ],
)
def test_what_is_no_image(client, content, words):
    for path in ("classify", "influence"):
        assert words in one_line(client.post(f"/api/{path}", query_string={"run": CLASSIFIER}, data=content))


def test_an_image_above_the_limit_and_large_ones_sent_as_jpeg(client, monkeypatch):
    monkeypatch.setenv("DUET_MAX_UPLOAD_MIB", "1")
    response = client.post("/api/classify", query_string={"run": CLASSIFIER}, data=bytes((1 << 20) + 1))
    assert "more than the 1 MiB" in one_line(response)
    assert client.get("/api/runs").json["upload"] == 1 << 20
    assert address(torch.zeros(3, 128, 128, dtype=torch.uint8)).startswith("data:image/png;")
    assert address(torch.zeros(3, 256, 256, dtype=torch.uint8)).startswith("data:image/jpeg;")
