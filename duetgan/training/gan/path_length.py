"""StyleGAN2's path-length penalty (1912.04958, section 3.2) of a step, and its moving mean."""

from collections.abc import Iterator

import torch
from torch import Tensor

from duetgan.training.gan import losses
from duetgan.training.gan.context import Context, StepSlice
from duetgan.utils.distributed import collectives


class PathLength(torch.nn.Module):
    """The penalty, with the moving mean of the path lengths, which is the same on all ranks."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.mean = torch.nn.Buffer(torch.zeros([]))

    @torch.no_grad()
    def update(self, batch_mean: Tensor) -> Tensor:
        """Move the mean towards the mean length of a global batch, 0-d, and return the result.

        A result that is not finite is not stored.
        """
        moved = self.mean.lerp(batch_mean.to(self.mean.dtype), self.decay)
        self.mean.copy_(torch.where(torch.isfinite(moved), moved, self.mean))
        return moved

    def penalties(
        self, context: Context, step_slice: StepSlice, *, is_trial: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and the weighted penalty of each micro-batch of half a batch.

        The moving mean is updated first, from the lengths of the whole global half batch. If that
        is more than one micro-batch a rank, lengths are computed twice: without a graph for the
        mean, and with one for the penalty. A penalty is multiplied by its interval. If `is_trial`,
        the mean stays as it is afterwards.
        """
        half = step_slice.half()
        latents, maps = context.latents(half, "path")

        def path_lengths(rows: slice, *, create_graph: bool) -> Tensor:
            samples = context.sample(latents, maps, rows)
            assert samples.ws is not None  # the config refuses path lengths without styles
            noise = context.draws.path_noise(half.step, half.batch_size, samples.images.shape[1:])
            scale = context.precision.scale()
            return losses.path_lengths(
                samples.images, samples.ws, noise[rows], scale, create_graph=create_graph
            )

        micro_batches = half.micro_batches()
        is_single = len(micro_batches) == 1
        lengths = [path_lengths(rows, create_graph=is_single) for rows in micro_batches]
        total = torch.stack([part.detach().sum() for part in lengths]).sum()
        batch_mean = collectives.all_reduce_sum_(total) / half.batch_size
        previous = self.mean.clone()
        mean = self.update(batch_mean)
        if is_trial:
            self.mean.copy_(previous)
        step_slice.metrics["path_length/mean"] = mean / collectives.world_size()
        loss = context.config.loss
        for rows, part in zip(micro_batches, lengths, strict=True):
            if not is_single:
                part = path_lengths(rows, create_graph=True)
            penalty = losses.path_length_penalty(
                part, mean, batch_mean, self.decay, half.batch_size
            )
            step_slice.add("loss/path_length", penalty)
            yield rows, penalty * (loss.path_length_weight * loss.path_length_interval)
