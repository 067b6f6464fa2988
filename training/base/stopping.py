"""Early stopping: training ends when evaluations have not improved for a while."""

import math
from typing import Any

from utils.config.model import Config, NonNegativeFloat, PositiveInt


class EarlyStoppingConfig(Config):
    """When to stop before the last step, by the figure that chooses the best checkpoint."""

    patience: PositiveInt | None = None  # evaluations in a row without a better figure; None: train to the last step
    min_delta: NonNegativeFloat = 0.0  # by more than this a figure must be better to count


class EarlyStopping:
    """Counts evaluations without a better figure. `best` is the last figure that counted as better."""

    def __init__(self, config: EarlyStoppingConfig, metric: str, *, lower_is_better: bool) -> None:
        self.config, self.metric, self.lower_is_better = config, metric, lower_is_better
        self.best: float | None = None
        self.waited = 0  # evaluations since

    def see(self, value: float) -> None:
        """Record an evaluation's figure; NaN never counts as better."""
        gain = math.inf if self.best is None else self.best - value if self.lower_is_better else value - self.best
        if not math.isnan(value) and gain > self.config.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    @property
    def reached(self) -> bool:
        """Whether training must end here."""
        return self.config.patience is not None and self.waited >= self.config.patience

    @property
    def reason(self) -> str:
        """Why, in words."""
        best = "nothing" if self.best is None else f"{self.best:.4g}"
        margin = f" by more than {self.config.min_delta:g}" if self.config.min_delta else ""
        return f"early stopping: {self.waited} evaluations without {self.metric} better than {best}{margin}"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
