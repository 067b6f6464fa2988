"""Folders of images below a URL."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from duetgan.data.packing.sources import open_source
from duetgan.extras.urls import source as remote
from duetgan.utils.errors import UserError
from duetgan.utils.files import FileLimit
from tests.data.conftest import save
from tests.data.packing.sources.source_files import contents, item_refused, refused


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """fsspec's files in memory, empty."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return fsspec.filesystem("memory")


def test_url(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cat/a.png", "dog/deep/b.png", "dog/notes.txt", ".hidden/c.png"):
        store.pipe(f"/pets/{name}", name.encode())
    store.makedirs("/pets/emu")
    with open_source("memory://pets/") as source:
        assert (source.name, source.classes, source.ignored) == ("memory://pets", ["cat", "dog"], ["dog/notes.txt"])
        (problem,) = source.problems
        assert str(problem) == "memory://pets/emu is a class folder without images (it is empty)"
        assert contents(source) == [b"cat/a.png", b"dog/deep/b.png"]
        assert source.item_name(1) == "memory://pets/dog/deep/b.png"
        store.pipe("/pets/cat/a.png", b"shorter")
        item_refused(source, 0, r"7 of 9 bytes arrived")
        with monkeypatch.context() as small:
            small.setattr("duetgan.utils.files.IMAGE", FileLimit("an image file", 1))
            assert isinstance(source, remote.RemoteSource)
            source._sizes["cat/a.png"] = 1 + (1 << 20)
            item_refused(source, 0, "has 1,048,577 bytes, more than the 1 MiB for an image file")
        store.rm("/pets/cat/a.png")
        item_refused(source, 0, "cannot be read")


def test_local_url_and_stylegan_manifest(tmp_path: Path, store: Any) -> None:
    for name in ("cat", "dog"):
        save(tmp_path / name / "a.png")
    with open_source(f"file://{tmp_path}") as source:
        assert source.classes == ["cat", "dog"]
        assert source.content(1) == (tmp_path / "dog" / "a.png").read_bytes()
    store.pipe("/x/dataset.json", json.dumps({"labels": [["a.png", 0], ["b.png", 1]]}).encode())
    store.pipe({"/x/a.png": b"a", "/x/b.png": b"b"})
    assert open_source("memory://x").labels().tolist() == [0, 1]
    store.pipe("/x/dataset.json", b"no")
    refused("memory://x", r"memory://x: dataset\.json is not")


def test_urls_that_cannot_be_read(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_implementations, "nos", {"class": "nosuchfs.X", "err": "Install nosuchfs to access X"})
    store.pipe("/x/a.zip", b"a")
    for url, message in (
        ("nos://key:secret@bucket/x?token=secret", r"^nos://bucket/x cannot be listed \(Install nosuchfs"),
        ("what://bucket", "cannot be listed .Protocol not known: what"),
        ("memory://nothing", "memory://nothing"),
        ("memory://x/a.zip", "holds no images"),
        ("memory://x", r"holds no images \(only 1 \.zip\)"),
        ("zip://::memory://x/a.zip", "chained URLs are not read"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            open_source(url)
        assert "secret" not in str(caught.value)
    text = "403 for 'http://me:secret@host/a.png?token=secret' (http://host/x?secret), what?"
    assert remote.without_secrets(text) == "403 for 'http://host/a.png' (http://host/x), what?"
