"""Images that several files' runs train on."""

import pytest

from tests.end_to_end.recipes import image_folders, pack_folders


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with train.lmdb, 44 encoded images of sizes of their own, and test.lmdb, 21."""
    folder = tmp_path_factory.mktemp("images")
    for split, count, seed in (("train", 44, 0), ("test", 21, 1)):
        pack_folders(image_folders(folder / split, count, seed), folder / f"{split}.lmdb")
    return folder
