"""Use Duet as a library: `duetgan.load("runs/classifier").predict("cat.jpg")`.

docs/library.md describes the functions and classes. `import duetgan` does not import torch. PyTorch
is imported when a name that needs it, such as `duetgan.load`, is first used.
"""

from typing import TYPE_CHECKING

from duetgan.lazy import lazily
from duetgan.version import __version__

if TYPE_CHECKING:
    from duetgan.library import (
        Classifier,
        Generator,
        Predictions,
        Samples,
        Transform,
        load,
        load_classifier,
        load_generator,
    )
    from duetgan.metrics.image_sets import compare_images
    from duetgan.metrics.results import Evaluation, Metric
    from duetgan.utils.errors import UserError

__all__ = [
    "Classifier",
    "Evaluation",
    "Generator",
    "Metric",
    "Predictions",
    "Samples",
    "Transform",
    "UserError",
    "__version__",
    "compare_images",
    "load",
    "load_classifier",
    "load_generator",
]

_PLACES = {
    "library": __all__,
    "metrics.image_sets": ["compare_images"],
    "metrics.results": ["Evaluation", "Metric"],
    "utils.errors": ["UserError"],
}
__getattr__ = lazily("duetgan", _PLACES)
