"""Containers for the data of a GAN step: slice of the batch, images, discriminator outputs."""

from typing import NamedTuple

from torch import Tensor

from duetgan.utils.distributed import collectives


class StepSlice(NamedTuple):
    """A step number, with the slice of the step's global batch that this rank computes.

    The rank computes the slice in micro-batches. The row numbers in `first` and in the result of
    `micro_batches` count from the start of the global batch.
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
        """Return this rank's slice of a global batch of half the size, for the same step.

        Micro-batches keep their size, or shrink to this rank's samples if these are fewer.
        """
        size = self.size // 2
        first = collectives.rank() * size
        micro = min(self.micro, size)
        return self._replace(batch_size=self.batch_size // 2, size=size, micro=micro, first=first)

    def add(self, name: str, value: Tensor) -> None:
        """Add the contribution of a micro-batch, 0-d, to the metric `name`."""
        value = value.detach()
        self.metrics[name] = self.metrics[name] + value if name in self.metrics else value


class Images(NamedTuple):
    """A micro-batch of real images or samples, before adaptive augmentation."""

    images: Tensor  # float [n, C, H, W], mostly in [-1, 1]
    labels: Tensor  # int64 [n]
    ws: Tensor | None = None  # styles of samples [n, num_ws, w_dim]; None without styles
    w: Tensor | None = None  # the first style of samples [n, w_dim]

    def detached(self) -> "Images":
        """Return the micro-batch with tensors detached from their graph, and without `ws`."""
        w = None if self.w is None else self.w.detach()
        return Images(self.images.detach(), self.labels, w=w)


class DiscriminatorOutput(NamedTuple):
    """Inputs and outputs of the discriminator for one micro-batch."""

    name: str  # kind of the images, part of the seed keys of their draws: "real", "fake", ...
    images: Tensor  # [N, C, H, W]: all images of the pass, before adaptive augmentation
    labels: Tensor  # int64 [n]
    hidden: Tensor  # [n, H]: the last activations
    features: Tensor  # [n, F]: multiplied by the label's embedding for the logits
    logits: Tensor  # [n]

    def split(self, *names: str) -> list["DiscriminatorOutput"]:
        """Split the output of a pass over several kinds of images into an output for each kind.

        `names` are the kinds, such as "real" and "fake". The pass must hold equally many images of
        each kind, in this order.
        """
        columns = (self.labels, self.hidden, self.features, self.logits)
        parts = zip(*(column.chunk(len(names)) for column in columns), strict=True)
        return [
            DiscriminatorOutput(name, self.images, *part)
            for name, part in zip(names, parts, strict=True)
        ]
