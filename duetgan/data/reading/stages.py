"""Load batches for progressive growing: their resolution and size change with the step."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, InfiniteLoader
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.utils.errors import UserError, refuse


class Stage(NamedTuple):
    """The resolution and the batch size of a part of the training.

    The part begins at `first_step` and ends before the first step of the next stage.
    """

    first_step: int
    resolution: int  # px of the shorter side
    batch_size: int  # global


class StagedLoader(InfiniteLoader):
    """An InfiniteLoader whose batches have the resolution and the batch size of the current stage.

    It changes the batch size of `sampler`. The order of samples continues across stages. The files
    of a stage are open from its first batch to its last.
    """

    saves_step = True

    def __init__(
        self,
        dataset: Dataset,  # at the full resolution
        sampler: GlobalSampler,
        *,
        stages: Sequence[tuple[int, int, int]],  # (first step, px, global batch size), ascending
        **options: Any,  # of InfiniteLoader
    ) -> None:
        super().__init__(dataset, sampler, **options)
        self.stages = [Stage(*stage) for stage in stages]
        self._stage: Stage | None = None  # the open stage

    def __next__(self) -> Batch:
        stage = max(stage for stage in self.stages if stage.first_step <= self.step)
        if stage != self._stage:
            self.close()
            self.sampler.batch_size = stage.batch_size
            self._dataset = at_resolution(self.dataset, stage.resolution)
            self._stage = stage
        return super().__next__()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. The stages may have changed since it was saved.

        Raises UserError for the state of a run without stages, or of a run whose steps had more
        batches than this loader's.
        """
        refuse(
            (
                "step" not in state,
                "the order cannot be resumed in stages: the run has been trained without "
                "progressive growing; set progressive.start to null, or use a new run folder",
            ),
            (
                state.get("batch", 0) >= self.batches_per_step,
                f"the order cannot be resumed: a step took more than {self.batches_per_step} "
                "batches; use the same loss.objective, or a new run folder",
            ),
        )
        super().load_state_dict(state)

    def close(self) -> None:
        super().close()
        if self._dataset is not self.dataset:
            self._dataset.close()
        self._dataset = self.dataset
        self._stage = None


def at_resolution(dataset: Dataset, side: int) -> Dataset:
    """Return a data set of the same files, with images scaled to a shorter side of `side` px.

    If the images of `dataset` have this side already, return `dataset` itself. Raises UserError if
    the files have changed since `dataset` was opened.
    """
    if side == dataset.spec.side:
        return dataset
    scaled = Dataset(
        [shard.path for shard in dataset.shards],
        name=dataset.path,
        resolution=dataset.spec.at(side).resolution,
        crop=dataset.crop,
        workers=dataset.workers,
    )
    if scaled.meta.content_hash != dataset.meta.content_hash:
        raise UserError(
            f"{dataset.path}: was changed during the training; put it back, or use a new run folder"
        )
    return scaled
