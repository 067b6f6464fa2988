"""Configuration that both tasks share. A recipe's YAML file sets what differs from the defaults."""

import re
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Interval
from pydantic import BeforeValidator, Field, ValidationInfo

from duetgan.training.base.graphs import GraphSetting
from duetgan.training.base.monitors import EarlyStoppingConfig, SpikesConfig
from duetgan.utils.config.model import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.image_spec import ImageSpec, Resolution

if TYPE_CHECKING:
    from duetgan.data.reading.dataset import Dataset


def in_updates(value: object, info: ValidationInfo) -> object:
    """Convert a length in epochs, such as `90ep`, into updates; return other values unchanged.

    `info.context` is the function from epochs to updates. Without it nothing is converted.
    """
    if not isinstance(value, str) or not info.context:
        return value
    epochs = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)ep", value)
    return info.context(float(epochs[1])) if epochs else value


# a number of updates that a recipe gives in epochs, such as "90ep"
Epochs = Annotated[str, Field(pattern=r"^\d+(\.\d+)?ep$")]
Updates = Annotated[
    PositiveInt, BeforeValidator(in_updates, json_schema_input_type=PositiveInt | Epochs)
]
Imports = Annotated[
    dict[str, str], BeforeValidator(dict, json_schema_input_type=list[str] | dict[str, str])
]
Seconds = Annotated[float, Interval(ge=1e-3, le=1e9)]
PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
# channels, classes, resolution: the arguments from which networks are built
Shape = dict[str, Any]


class SyntheticConfig(Config):
    """Synthetic images that training mixes with those of data.path."""

    # LMDB of samples, made by `generate.py dataset` or duet pack; null: none
    path: str | None = None
    # instead of path: a GAN's run or checkpoint; new samples are drawn from it in every epoch
    checkpoint: str | None = None
    # fraction of each global batch that is synthetic; null: computed, with balance fill
    share: PositiveFraction | None = None
    weight: NonNegativeFloat = 1.0  # weight of a synthetic image's loss (real: 1); classifiers only
    # end of the synthetic images: a fraction of the steps, or a step if above 1
    until: PositiveFloat = 1.0
    # fill: only samples of rare classes, until all classes are as frequent as the largest
    balance: Literal["off", "fill"] = "off"

    def check(self) -> None:
        refuse(
            (
                self.on and self.share is None and self.balance == "off",
                "share is not set; give the share of each batch, such as 0.5",
            ),
            (
                not self.on and self != SyntheticConfig.model_construct(),
                "has settings but no images; give data.synthetic.path FILE",
            ),
            (
                self.path is not None and self.checkpoint is not None,
                "path and checkpoint are both set; give a file or a generator",
            ),
            (
                self.until > 1 and self.until != int(self.until),
                f"until {self.until}: give a share of the steps, up to 1, or a whole step",
            ),
        )

    @property
    def on(self) -> bool:
        """Return True if there are synthetic images."""
        return self.path is not None or self.checkpoint is not None

    def last_step(self, steps: int) -> int | None:
        """Return the step at which synthetic images end, in a training of `steps` steps.

        From this step on, all images are real. Return None if synthetic images are used up to the
        end.
        """
        end = ceil(Fraction(str(self.until)) * steps) if self.until <= 1 else int(self.until)
        return end if end < steps else None


class DataConfig(Config):
    """Location of the images and settings for reading them."""

    old_keys = {"cache": "off", "on_damage": "stop", "sample_weights": None}

    # LMDB made by `duet pack`, a folder or zip of images, or webdataset's tar files: a file, a
    # folder of tar files, or a pattern for several as one data set: "train-*.lmdb"
    path: str = ""
    val_path: str | None = None  # held-out images for evaluation, in any form that path allows
    resolution: Resolution | None = None  # size in px, or 96x64; null: the largest in the file
    # crop of training images; random: according to crop_area and crop_aspect
    crop: Literal["centre", "random"] = "centre"
    # range of the area of a random crop, as a fraction of the image's area
    crop_area: tuple[PositiveFraction, PositiveFraction] = (0.08, 1.0)
    # range of the width / height of a random crop, before it is resized to a square
    crop_aspect: tuple[PositiveFloat, PositiveFloat] = (0.75, 4 / 3)
    # number of decoding threads; auto: one per core. Raw images need no threads
    workers: Annotated[int, Interval(ge=0, le=1024)] | Literal["auto"] = "auto"
    # balanced: all classes are sampled equally often
    sampling: Literal["uniform", "balanced"] = "uniform"
    # sampling weights of classes; 1 for classes that are not listed
    class_rates: dict[str, NonNegativeFloat] = {}
    prefetch: Annotated[int, Interval(ge=0, le=1024)] = 2  # batches prepared ahead on accelerators
    synthetic: SyntheticConfig = SyntheticConfig()

    def check(self) -> None:
        for name, (low, high) in (("crop_area", self.crop_area), ("crop_aspect", self.crop_aspect)):
            if low > high:
                raise UserError(f"{name} {low}, {high}: the first must be at most the second")


class LogConfig(Config):
    """Logging during training, and its intervals in steps."""

    every: PositiveInt = 50  # steps between two rows of metrics.jsonl
    samples_every: NonNegativeInt = 500  # steps between two grids of samples; 0: no grids
    tensorboard: bool = True  # curves, grids and the network's graph in RUN/tensorboard
    # service that also receives the rows of metrics.jsonl, at each checkpoint
    tracker: Literal["none", "wandb", "trackio"] = "none"
    layers: list[str] = []  # names or patterns of layers; their statistics go to TensorBoard
    layers_every: PositiveInt = 100  # steps between two computations of log.layers' statistics

    def layers_due(self, step: int) -> bool:
        """Return True if statistics of layers are due in update number `step` (from 0)."""
        return bool(self.layers) and (step + 1) % self.layers_every == 0

    def check(self) -> None:
        if self.layers and not self.tensorboard:
            raise UserError("layers go to TensorBoard, which is off; set log.tensorboard true")


class CheckpointConfig(Config):
    """Saving of checkpoints. The last step is always saved."""

    old_keys = {"on_disk_full": "warn"}

    every: PositiveInt = 500  # steps between two checkpoints
    keep: PositiveInt = 2  # number of newest checkpoints that are kept, in addition to the best
    # checkpoints at multiples of this step are never deleted; null: no such checkpoints
    keep_every: PositiveInt | None = None
    # write in a thread while training continues; the files are the same
    asynchronous: bool = True

    def check(self) -> None:
        if self.keep_every is not None and self.keep_every % self.every:
            raise UserError(
                f"keep_every {self.keep_every}: must be a multiple of checkpoint.every {self.every}, or "
                "other steps would never be saved; or null"
            )

    def max_on_disk(self, steps: int) -> int:
        """Return the largest number of checkpoints that a run of `steps` steps has on disk.

        It includes the best checkpoint and one that is being written.
        """
        permanent = steps // self.keep_every if self.keep_every else 0
        return self.keep + 2 + permanent


class EvaluationConfig(Config):
    """Evaluation during training, whose metric chooses the best checkpoint."""

    every: NonNegativeInt = 1000  # steps between two evaluations; 0: only at the end
    n: Annotated[int, Ge(2)] = 1000  # GAN: number of samples; a final evaluation needs more
    # GAN: feature extractor: pixels, classifier:RUN, resnet50 or inception
    extractor: str = "pixels"
    weights: str | None = None  # weights file of the extractor
    # images per forward pass of a process, in whole chunks (docs/evaluation.md)
    batch_size: PositiveInt = 100


class DistributedConfig(Config):
    """Settings for several processes: timeouts, and how often their weights are compared."""

    # timeout of a collective operation before the end of the first step, in seconds; compiling and
    # the first reads are slow
    start_timeout: Seconds = 600.0
    # timeout after the first step, in seconds; none while rank 0 works alone
    timeout: Seconds = 180.0
    # bf16: gradients are exchanged in half the bytes, rounded to bfloat16
    compress: Literal["off", "bf16"] = "off"
    # steps between two comparisons of weights and averages over the processes; 0: never
    check_every: NonNegativeInt = 100


class RunConfig(Config):
    """The config keys that every task has."""

    old_keys = {"threads": "adapt"}

    # True if the task can split its micro-batches when memory runs out
    can_halve: ClassVar[bool] = False

    task: str  # gan or classifier
    seed: int = 0  # seed of every random draw (docs/randomness.md)
    # your own code, .py files or installed modules: [my_losses.py]; the run's config.yaml adds
    # their hashes
    imports: Imports = {}
    init_from: str | None = None  # checkpoint or run with the initial weights
    # length of the training and its schedules in steps, or in epochs: 90ep; a step is one update of
    # each network
    steps: Updates = 10_000
    batch_size: PositiveInt = 64  # samples per step, over all processes and micro-batches
    # largest number of samples in a forward pass of a process; null: its whole part of the batch;
    # auto: its whole part, halved until a step fits into memory
    micro_batch: PositiveInt | Literal["auto"] | None = None
    # precision of convolutions and matrix products; weights stay in fp32. auto: bf16 if the device
    # has instructions for it, else fp32 on a CPU, fp16 on an accelerator; a resumed run keeps its own
    precision: PrecisionName = "auto"
    # number of threads on a CPU; auto: one per core that other programs leave free at the start
    threads: PositiveInt | Literal["auto"] = "auto"
    channels_last: bool = True  # memory layout of images; nearly always faster
    # use deterministic kernels only: runs on accelerators are equal to the bit, but slower
    deterministic: bool = False
    # replay training steps as CUDA graphs on GPUs
    graphs: GraphSetting = "auto"
    # largest number of skipped updates with non-finite gradients; one more stops training
    nonfinite_cap: NonNegativeInt = 20
    data: DataConfig = DataConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    spikes: SpikesConfig = SpikesConfig()
    distributed: DistributedConfig = DistributedConfig()

    def check(self) -> None:
        refuse(
            (
                self.micro_batch == "auto" and not self.can_halve,
                f"micro_batch auto is for classifiers; give a {self.task} a number that fits, or null",
            ),
            (
                self.early_stopping.patience is not None and not self.evaluation.every,
                "early_stopping.patience needs evaluations on the way; set evaluation.every, in steps",
            ),
        )

    @property
    def several_devices(self) -> bool:
        """Return True if each process uses all of its devices instead of one."""
        return False

    def spans(self, resolution: int | str) -> list[tuple[int, int, int]]:
        """Return the parts of a training that differ in resolution or batch size.

        Each part is (first step, px of the shorter side, global batch size).
        """
        return [(0, ImageSpec.of(1, resolution).side, self.batch_size)]

    def schedule_steps(self, resolution: int | str) -> int:
        """Return the number of steps in which learning rates reach their final values."""
        return self.steps

    @property
    def batches_per_step(self) -> int:
        """Number of global batches that one step reads."""
        return 1

    @property
    def smallest_batch(self) -> int:
        """Number of samples in the smallest batch that `engine.speed` times.

        Larger ones are multiples of it.
        """
        return 2  # BatchNorm has no statistics of one sample, and mixup needs a pair

    def shape(self, dataset: "Dataset") -> Shape:
        """Return the arguments that build networks for `dataset`; checkpoints record them."""
        shape = {
            "channels": dataset.meta.channels,
            "classes": len(dataset.meta.classes),
            "resolution": dataset.resolution,
        }
        pixel_format = dataset.spec.pixel_format
        return shape if pixel_format is None else shape | {"pixel_format": pixel_format}

    def for_trial(self, samples: int) -> Self:
        """Return this config, changed for measuring a few steps with a global batch of `samples`."""
        return self.changed(
            batch_size=samples,
            micro_batch=self.micro_limit,
            steps=self.steps + 1000,  # the measured steps lie beyond the run's
            init_from=None,
            evaluation=EvaluationConfig(),
            early_stopping=EarlyStoppingConfig(),
        )

    def rank_batch(self, world_size: int) -> int:
        """Return the number of samples of the global batch that each process computes.

        Raises UserError if the processes cannot have equal parts.
        """
        if self.batch_size % world_size:
            raise UserError(
                f"batch_size {self.batch_size} cannot be shared by {world_size} processes; "
                f"make it a multiple of {world_size}"
            )
        return self.batch_size // world_size

    @property
    def micro_limit(self) -> int | None:
        """Largest number of samples in a forward pass of a process; None for its whole batch."""
        return None if self.micro_batch == "auto" else self.micro_batch

    def micro(self, world_size: int) -> int:
        """Return the largest number of samples in a process's forward pass.

        Raises UserError if the processes cannot have equal parts.
        """
        rank_batch = self.rank_batch(world_size)
        return min(self.micro_limit or rank_batch, rank_batch)
