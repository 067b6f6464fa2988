"""Entries that extras add to the prediction of an image, such as a heat map.

predict.py's option `--KIND DIR` requests the addition called KIND. The addition writes files into
the folder DIR and adds the entry KIND to the prediction of each image.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from duetgan.utils import extras

if TYPE_CHECKING:  # imports of torch take seconds, so the options are checked first
    from duetgan.inference.inputs import Inputs
    from duetgan.models.classifier import Classifier

Answer = dict[str, Any]  # a prediction, or an addition to it, as a JSON object


@dataclass(frozen=True)
class Addition:
    """An entry that an extra can add to predictions: its options, computation and text."""

    add_options: Callable[[Callable[..., object]], None]  # takes a parser's `add_argument`
    # (options, images, class names, classifier) -> None if the options do not request the addition,
    # else a function (image name, prediction) -> entry; an entry that failed has `error`
    prepare: Callable[
        [Namespace, "Inputs", list[str], "Classifier"], Callable[[str, Answer], Answer] | None
    ]
    failure: str  # completes "error: 3 of 9 images ..." for entries with an error
    text: Callable[[Answer], str]  # text of an entry, behind the prediction's line


ADDITIONS: dict[str, Addition] = {}
extras.attach(__name__)
