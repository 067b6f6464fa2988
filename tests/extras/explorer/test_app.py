"""The explorer over HTTP: its answers are those of generate.py and predict.py, and bad requests get one line."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from duetgan.extras.editing.editor import Editor
from duetgan.extras.explorer import models
from duetgan.extras.explorer.models import Source, address
from duetgan.inference.samples import Sampler, truncated_styles
from duetgan.metrics.evaluate_gan import judge_images
from tests.extras.explorer.conftest import CLASSIFIER, GAN, PLAIN, grey, one_line, pixels, png, sample
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
    images = client.get("/api/draw", query_string=sample(1, seed=5, psi=0.7, count=2)).json["images"]
    assert [image["seed"] for image in images] == [5, 6]
    for image in images:
        sampler = Sampler(generator=shown[GAN].model, chosen=[1], seed=image["seed"], truncation_psi=0.7)
        assert (pixels(image["address"]) == sampler.images([0])[0, 0].numpy()).all()
    images = client.get("/api/draw", query_string=sample(seed=2**32 - 1, count=3)).json["images"]
    assert [image["seed"] for image in images] == [2**32 - 3, 2**32 - 2, 2**32 - 1]


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("draw", sample(seed=2**32), "is not a whole number"),
        ("draw", sample(seed="9" * 5000), "is not a whole number from 0 to 4,294,967,295"),
        ("draw", sample(seed="²"), "is not a whole number"),
        ("draw", sample(psi="x\ny"), "is not a finite number from 0 to 2"),
        ("draw", {**sample(), "class": "<script>\x1b" + "x" * 9999}, "/gan"),
        ("draw", {**sample(), "run": "../../gan"}, "run '../../gan' is not"),
        ("draw", {"run": PLAIN, "seed": 1, "psi": 0.5}, "works on w"),
        ("edit", sample(by=GAN, target="dark"), "gan is a GAN; a classifier is needed"),
    ],
)
def test_bad_questions(client, path, query, words):
    assert words in one_line(client.get(f"/api/{path}", query_string=query))


def test_an_edit_begins_at_the_sample_and_moves_as_the_editor_does(client, shown, monkeypatch):
    monkeypatch.setattr(
        Editor,
        "starts",
        lambda _, label, count, seed=None: truncated_styles(Source(seed or 0, label).sampler(shown[GAN]), range(4)),
    )  # an untrained pair agrees on nothing
    query = sample(0, seed=5, by=CLASSIFIER, target=CLASSES[2])
    found = client.get("/api/edit", query_string=query).json
    assert (found["source"], found["target"]) == (CLASSES[0], CLASSES[2])
    frames = {frame["step"]: frame for frame in found["frames"]}
    drawn = client.get("/api/draw", query_string=sample(0, seed=5)).json["images"][0]["address"]
    assert frames[0]["address"] == drawn
    assert len({frame["address"] for frame in found["frames"]}) > 2
    row = judge_images(shown[CLASSIFIER].model, torch.from_numpy(pixels(drawn).copy())[None, None])[0]
    assert [frames[0]["from"], frames[0]["to"]] == pytest.approx([float(row[0]), float(row[2])])
    monkeypatch.setattr(Editor, "_direction", lambda *_: pytest.fail("searched again"))
    assert client.get("/api/edit", query_string=query).json == found


def test_names_as_predict_does(client, shown):
    found = client.post("/api/classify", query_string={"run": CLASSIFIER}, data=grey(90)).json
    row = judge_images(shown[CLASSIFIER].model, torch.full((1, 1, 8, 8), 90, dtype=torch.uint8))[0]
    told = {entry["name"]: entry["probability"] for entry in found["classes"]}
    assert told == {name: float(row[label]) for label, name in enumerate(CLASSES)}
    assert list(told.values()) == sorted(told.values(), reverse=True)
    assert (pixels(found["image"])[..., 0] == 90).all()
    assert pixels(found["evidence"]).shape == pixels(found["image"]).shape


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
    assert words in one_line(client.post("/api/classify", query_string={"run": CLASSIFIER}, data=content))


def test_an_image_above_the_limit_and_large_ones_sent_as_jpeg(client, monkeypatch):
    monkeypatch.setenv("DUET_MAX_UPLOAD_MIB", "1")
    response = client.post("/api/classify", query_string={"run": CLASSIFIER}, data=bytes((1 << 20) + 1))
    assert "more than the 1 MiB" in one_line(response)
    assert client.get("/api/runs").json["upload"] == 1 << 20
    assert address(torch.zeros(3, 128, 128, dtype=torch.uint8)).startswith("data:image/png;")
    assert address(torch.zeros(3, 256, 256, dtype=torch.uint8)).startswith("data:image/jpeg;")
