"""Sources in other processes."""

import multiprocessing
import os
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from data.pack import pack
from data.sources import open_source
from tests.data.sources.source_files import cells, contents, manifest, parquet, pickled, rosinality


def test_arrays_are_pickled() -> None:
    source = open_source("sample", split="test")
    np.testing.assert_array_equal(pickled(source).item(7).content, source.item(7).content)


def test_sources_in_a_spawned_process(photos: Path, tmp_path: Path) -> None:
    pack(open_source(str(photos)), tmp_path / "packed.lmdb")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(photos / "cat" / "a.png", "a.png")
    specs = [str(photos), str(tmp_path / "packed.lmdb"), str(tmp_path / "x.zip"), f"file://{photos}"]
    specs += [manifest(tmp_path, "path\na.png\n"), str(rosinality(tmp_path / "faces"))]
    specs += [str(parquet(tmp_path / "x.parquet", {"image": cells(1, 2, 3)}))]
    sources = [open_source(spec) for spec in specs]
    for source in sources:
        source.item(0)  # something is open
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
        for source in sources:
            for here, there in zip(contents(source), pool.submit(contents, source).result(), strict=True):
                np.testing.assert_array_equal(here, there)
