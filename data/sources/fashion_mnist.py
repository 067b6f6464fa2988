"""Fashion-MNIST (Zalando SE, MIT licence): the full set wherever it is, and the sample that comes with the program."""

from pathlib import Path

from data.sources.base import ArraySource
from data.sources.download import cache_folder, downloading
from data.sources.idx import find_idx, idx_source
from utils.errors import UserError

CLASSES = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist
SAMPLE = Path(__file__).parents[1] / "sample"


def open_fashion_mnist(split: str, root: Path | None) -> ArraySource:
    """The full set: 60,000 training or 10,000 test images, grey, 28x28 px.

    Looked for in `root` (the four idx files there, or torchvision's sub-folder); without `root` in Debian's folder.
    What is not found is downloaded by torchvision, into `root` or the cache. Raises UserError if that fails.
    """
    for folder in [DEBIAN] if root is None else [root, root / "FashionMNIST" / "raw"]:
        if find_idx(folder, split):
            return idx_source(f"fashion-mnist {split}", folder, split, CLASSES)
    target = root or cache_folder()
    raw = target / "FashionMNIST" / "raw"
    if not find_idx(raw, split):
        _download(target)
    return idx_source(f"fashion-mnist {split}", raw, split, CLASSES)


def _download(target: Path) -> None:
    from torchvision.datasets import FashionMNIST  # slow to import, rarely needed

    remedy = "install Debian's package dataset-fashion-mnist or pass --root with a folder of its four idx files"
    with downloading("Fashion-MNIST", remedy):
        FashionMNIST(str(target), download=True)


def open_sample(split: str, root: Path | None) -> ArraySource:
    """The embedded part of Fashion-MNIST: 1,000 training or 200 test images of each class."""
    if root is not None:
        raise UserError("--root does not apply to the embedded sample: leave it out")
    return idx_source(f"sample {split}", SAMPLE, split, CLASSES)
