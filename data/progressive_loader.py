"""The training loader of a run whose resolution and batch size change with the steps (progressive growing)."""

import copy
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from data.dataset import Dataset
from data.loader import Batch, InfiniteLoader
from data.sampler import GlobalSampler
from utils.errors import UserError


class Span(NamedTuple):
    """From a step on, up to the next span's: images of one resolution in batches of one size."""

    first_step: int
    resolution: int  # px
    batch_size: int  # global


class ProgressiveLoader:
    """Endless iterator over a rank's batches on the device, to be used as InfiniteLoader is.

    Every span has an infinite loader of its own over the same files, at its own resolution and batch size. It is opened
    when its first batch is asked for and closed after its last one, and reads ahead as far as its span goes. The order
    of samples is one for all of them: each takes it up where the one before has left it, so that every image comes
    once in an epoch, whatever resolution that epoch's parts are shown at. Which span is on follows from the number of
    batches handed out, `batches_per_step` of them a step.

    `reader` reads the full resolution; the levels below are read as it does (crop, threads, cache, damage). `sampler`
    stands where the batches handed out end; its batch size is the current span's. Raises UserError for a batch size
    that the ranks cannot share, ValueError for spans that are not ordered from step 0 on.
    """

    def __init__(
        self,
        reader: Dataset,
        sampler: GlobalSampler,
        spans: Sequence[tuple[int, int, int]],  # (first step, px, global batch size) each
        *,
        device: torch.device | str,
        prefetch: int = 2,
        batches_per_step: int = 1,
    ) -> None:
        self.reader, self.device, self.prefetch = reader, torch.device(device), prefetch
        self.spans = [Span(*span) for span in spans]
        self.batches_per_step = batches_per_step
        self.wait_seconds = 0.0
        self._check(sampler.world_size)
        self.sampler = _resized(sampler, self.spans[0].batch_size)
        self._batches = 0  # handed out
        self._open: tuple[int, InfiniteLoader] | None = None  # the current span's number and its loader
        self._damaged: set[int] = set()  # records replaced in levels that are closed

    def _check(self, world_size: int) -> None:
        firsts = [span.first_step for span in self.spans]
        if not firsts or firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts)):
            raise ValueError(f"spans that begin at steps {firsts}")
        for span in self.spans:
            if span.batch_size < 1 or span.batch_size % world_size:
                raise UserError(
                    f"the batches of {span.batch_size} images of {span.resolution} px are not divisible by "
                    f"{world_size} processes; make progressive.batch_sizes and batch_size multiples of {world_size}"
                )

    @property
    def step(self) -> int:
        """The step that the next batch belongs to."""
        return self._batches // self.batches_per_step

    @property
    def span(self) -> Span:
        """Where the next batch comes from."""
        return self.spans[self._number()]

    def _number(self) -> int:
        return max(number for number, span in enumerate(self.spans) if span.first_step <= self.step)

    def __iter__(self) -> "ProgressiveLoader":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = next(self._loader())
        self._batches += 1  # only now: a read that failed is not counted
        self.wait_seconds += time.perf_counter() - started
        return batch

    def _loader(self) -> InfiniteLoader:
        """The current span's loader, opened if it is not open yet; the one before is closed."""
        number = self._number()
        if self._open is not None and self._open[0] == number:
            return self._open[1]
        self.close()
        span, end = self.spans[number], None
        self.sampler = _resized(self.sampler, span.batch_size)
        if number + 1 < len(self.spans):
            left = self.spans[number + 1].first_step * self.batches_per_step - self._batches
            end = self.sampler.consumed + left * span.batch_size
        level = level_of(self.reader, span.resolution)
        loader = InfiniteLoader(level, self.sampler, device=self.device, prefetch=self.prefetch, end=end)
        self._open = (number, loader)
        return loader

    @property
    def damaged_records(self) -> set[int]:
        """Records that this process has replaced because they are damaged, at any resolution."""
        current = self.reader if self._open is None else self._open[1].reader
        return self._damaged.union(current.damaged)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out: the sampler's, the step and the batch within it."""
        step, batch = divmod(self._batches, self.batches_per_step)
        return self.sampler.state_dict() | {"step": step, "batch": batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; what was read ahead is dropped. The spans may have changed: the step counts.

        Raises UserError as the sampler does, and for the state of a run without stages.
        """
        if "step" not in state:
            raise UserError(
                "the order cannot be resumed in stages: the run has been trained without progressive growing; set "
                "progressive.start to null, or use a new run folder"
            )
        if state["batch"] >= self.batches_per_step:
            raise UserError(
                f"the order cannot be resumed: a step took more than {self.batches_per_step} batches; use the same "
                "loss.objective, or a new run folder"
            )
        self.close()
        self.sampler.load_state_dict(state)
        self._batches = int(state["step"]) * self.batches_per_step + int(state["batch"])

    def close(self) -> None:
        """Stop the thread and let the level's files go; the next batch opens them again."""
        if self._open is None:
            return
        loader = self._open[1]
        self._open = None
        loader.close()
        self._damaged |= set(loader.reader.damaged)
        if loader.reader is not self.reader:
            loader.reader.close()


def _resized(sampler: GlobalSampler, batch_size: int) -> GlobalSampler:
    """The same order from the same position on, in batches of another size; epochs that were drawn are shared."""
    changed = copy.copy(sampler)
    changed.batch_size = batch_size
    return changed


def level_of(reader: Dataset, resolution: int) -> Dataset:
    """The images of `reader` at another resolution, read in the same manner; itself at its own.

    Raises UserError if the files have changed since `reader` was opened.
    """
    if resolution == reader.resolution:
        return reader
    whole = reader.cache if reader.cache is not None and reader.cache.whole else None
    level = Dataset(
        [shard.path for shard in reader.shards],
        resolution=resolution,
        crop=reader.crop,
        workers=reader.workers,
        cache=reader.cache is not None and whole is None,
        on_damage=reader.on_damage,
    )
    if level.meta.content_hash != reader.meta.content_hash:
        raise UserError(f"{reader.path}: was changed during the training; put it back, or use a new run folder")
    if whole is not None:  # whole images serve every resolution
        level.cache = whole
    return level


def levels_text(reader: Dataset, resolutions: Sequence[int]) -> str:
    """What the plan says of the levels that are read: stored ones, and those that are scaled while training."""
    stored = reader.meta.resolutions
    if reader.crop is not None or stored == [0]:
        what = "random crops" if reader.crop is not None else "images of sizes of their own"
        return f"{_sides(resolutions)} scaled from {what}"
    found = [side for side in resolutions if side in stored]
    texts = [f"{_sides(found)} as stored"] if found else []
    missing = [side for side in resolutions if side not in stored]
    for source, sides in itertools.groupby(missing, lambda side: min(level for level in stored if level > side)):
        texts.append(f"{_sides(list(sides))} scaled from {source} px while reading")
    hint = f" (data.pack --pyramid {min(missing)} stores them)" if missing else ""
    return ", ".join(texts) + hint


def _sides(resolutions: Sequence[int]) -> str:
    return ", ".join(map(str, resolutions)) + " px"
