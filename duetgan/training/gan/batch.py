"""The data of a GAN's step: its slice of the global batch, images, the discriminator's output."""

from typing import NamedTuple

from torch import Tensor

from duetgan.utils.distributed import collectives


class StepSlice(NamedTuple):
    """A step, and the slice of its global batch that this rank computes, in micro-batches.

    `first` and the slices from `micro_batches` are row numbers of the global batch.
    """

    step: int
    batch_size: int  # samples of all ranks
    size: int  # samples of this rank
    micro: int  # samples per forward pass
    first: int  # this rank's first row
    metrics: dict[str, Tensor]  # 0-d values that the step reports; they add up over the ranks

    def micro_batches(self) -> list[slice]:
        stop = self.first + self.size
        return [
            slice(start, min(start + self.micro, stop))
            for start in range(self.first, stop, self.micro)
        ]

    def is_last(self, rows: slice) -> bool:
        return rows.stop == self.first + self.size

    def half(self) -> "StepSlice":
        """Return the step with half the global batch, on every rank; micro-batches do not grow."""
        size = self.size // 2
        first = collectives.rank() * size
        micro = min(self.micro, size)
        return self._replace(batch_size=self.batch_size // 2, size=size, micro=micro, first=first)

    def add(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's contribution, 0-d, to the metric `name`."""
        value = value.detach()
        self.metrics[name] = self.metrics[name] + value if name in self.metrics else value


class Images(NamedTuple):
    """A micro-batch of real images or samples, before adaptive augmentation."""

    images: Tensor  # float [n, C, H, W], mostly in [-1, 1]
    labels: Tensor  # int64 [n]
    ws: Tensor | None = None  # styles of samples [n, num_ws, w_dim]; None without styles
    w: Tensor | None = None  # the first style of samples [n, w_dim]

    def detached(self) -> "Images":
        """Return the micro-batch without graphs, and without `ws`."""
        w = None if self.w is None else self.w.detach()
        return Images(self.images.detach(), self.labels, w=w)


class DiscriminatorOutput(NamedTuple):
    """Inputs and outputs of the discriminator for one micro-batch."""

    name: str  # kind of the images, part of the seed keys of their draws: "real", "fake", ...
    images: Tensor  # [all of the pass, C, H, W], before adaptive augmentation
    labels: Tensor  # int64 [n]
    hidden: Tensor  # [n, H]: the last activations
    features: Tensor  # [n, F]: multiplied by the label's embedding for the logits
    logits: Tensor  # [n]

    def split(self, *names: str) -> list["DiscriminatorOutput"]:
        """Split the output of a pass over several kinds of images, one after another, by kind."""
        columns = (self.labels, self.hidden, self.features, self.logits)
        parts = zip(*(column.chunk(len(names)) for column in columns), strict=True)
        return [
            DiscriminatorOutput(name, self.images, *part)
            for name, part in zip(names, parts, strict=True)
        ]
