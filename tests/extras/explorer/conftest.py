"""An explorer of untrained runs, and a browser's requests to it."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from werkzeug.test import Client

from duetgan.extras.explorer.app import App
from duetgan.extras.explorer.models import open_runs
from tests.inference.conftest import gan_run, styled, without_w
from tests.metrics.conftest import CLASSES, classifier_run

GAN, PLAIN, CLASSIFIER = 0, 1, 2  # the runs' numbers


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with the runs `gan`, `classifier` and `plain`."""
    folder = tmp_path_factory.mktemp("explorer")
    gan_run(folder / "gan", styled())
    classifier_run(folder / "classifier")
    gan_run(
        folder / "plain",
        without_w(classes=0),
        architecture="r3gan",
        sizes={"z_dim": 4, "width": 8, "cardinality": 2, "blocks": 1},
    )
    return folder


@pytest.fixture(scope="session")
def shown(folder):
    """The runs, opened: GAN, PLAIN, CLASSIFIER."""
    names = [str(folder / name) for name in ("gan", "classifier", "plain")]
    return open_runs(names, which="last", device=torch.device("cpu"))


@pytest.fixture
def app(shown):
    return App(shown, token="secret")


@pytest.fixture
def client(app):
    return signed_in(app)


def signed_in(app: App) -> Client:
    """A browser that has opened the address with the token."""
    client = Client(app)
    assert client.get("/", query_string={"token": app.token}).status_code == 303
    return client


def pixels(address: str) -> np.ndarray:
    """The image uint8 [H, W] or [H, W, 3] of a `data:` address."""
    head, _, content = address.partition(";base64,")
    assert head in ("data:image/png", "data:image/jpeg")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def grey(value: int = 128) -> bytes:
    """An image file."""
    return png(np.full((8, 8), value, np.uint8))


def sample(label: int = 0, **more) -> dict:
    """The query of a request for a sample."""
    return {"run": GAN, "class": CLASSES[label], "seed": 0, **more}


def one_line(response, status=400) -> str:
    """The text of a refusal."""
    assert response.status_code == status
    assert response.mimetype == "text/plain"
    assert response.text
    assert "\n" not in response.text
    return response.text
