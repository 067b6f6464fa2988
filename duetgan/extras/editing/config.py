"""Settings of edits."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EditConfig:
    """Settings of the search for a direction between classes, and of the edits along it."""

    space: Literal["w", "z"] | None = None  # None: w if the generator has one, else z
    samples: int = 100  # samples of each of the two classes to compute a direction from
    pixel_weight: float = 0.1  # weight of the penalty on changes of pixels
    keep_weight: float = 0.1  # weight of the penalty on changes of other classes' logits
    reach: float = 0.5  # probability of the target class that an edit aims at
    limit: float = 4.0  # the largest step, in units of the samples' spread
