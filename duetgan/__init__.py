"""Duet as a library: `duetgan.load("runs/classifier").predict("cat.jpg")`; docs/library.md
describes it.

Importing `duetgan` imports no torch; the first use of a name does.
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
    from duetgan.utils.errors import UserError

__all__ = [
    "Classifier",
    "Generator",
    "Predictions",
    "Samples",
    "Transform",
    "UserError",
    "__version__",
    "load",
    "load_classifier",
    "load_generator",
]

__getattr__ = lazily("duetgan", {"library": __all__, "utils.errors": ["UserError"]})
