"""Configuration that both tasks share. A recipe's YAML sets only what differs from the defaults."""

import re
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Interval
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

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

    The context of the validation is a function from epochs to updates. Without it nothing is
    converted.
    """
    if not isinstance(value, str) or not info.context:
        return value
    epochs = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)ep", value)
    return info.context(float(epochs[1])) if epochs else value


# the form in which a recipe may give a number of updates
Epochs = Annotated[str, Field(pattern=r"^\d+(\.\d+)?ep$")]
Updates = Annotated[
    PositiveInt, BeforeValidator(in_updates, json_schema_input_type=PositiveInt | Epochs)
]
Imports = Annotated[
    dict[str, str], BeforeValidator(dict, json_schema_input_type=list[str] | dict[str, str])
]
Threads = PositiveInt | Literal["auto", "adapt"] | dict[NonNegativeInt, PositiveInt]
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
    # fraction of each global batch; null: as many as balance fill needs
    share: PositiveFraction | None = None
    weight: NonNegativeFloat = 1.0  # of their loss, relative to real images; classifiers only
    # training goes on with real images alone from: a fraction of the steps, or (above 1) a step
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
        """Return the step from which a training of `steps` steps uses real images alone.

        None if synthetic images are mixed in up to the end.
        """
        end = ceil(Fraction(str(self.until)) * steps) if self.until <= 1 else int(self.until)
        return end if end < steps else None


class DataConfig(Config):
    """Location of the images and the way in which they are read."""

    # LMDB made by `duet pack`, a folder or zip of images, or webdataset's tar files: a file, a
    # folder of tar files, or a pattern for several as one data set: "train-*.lmdb",
    # "train-{0000..0146}.tar"
    path: str = ""
    val_path: str | None = None  # held-out images, for evaluation; forms as for path
    resolution: Resolution | None = None  # px, or 96x64; None: the largest that is stored
    # of training images; random: with crop_area and crop_aspect
    crop: Literal["centre", "random"] = "centre"
    # range of the area of a random crop, as a fraction of the image's
    crop_area: tuple[PositiveFraction, PositiveFraction] = (0.08, 1.0)
    # range of its width / height, before it is resized to a square
    crop_aspect: tuple[PositiveFloat, PositiveFloat] = (0.75, 4 / 3)
    # decoding threads; auto: the fastest number is measured. Raw images need none
    workers: Annotated[int, Interval(ge=0, le=1024)] | Literal["auto"] = "auto"
    # skip: a damaged record is replaced by the next sound one
    on_damage: Literal["stop", "skip"] = "stop"
    # balanced: all classes are sampled equally often
    sampling: Literal["uniform", "balanced"] = "uniform"
    # sampling weights of classes; 1 for classes that are not listed
    class_rates: dict[str, NonNegativeFloat] = {}
    # file with the sampling weight of each record (.npy or text)
    sample_weights: str | None = None
    prefetch: Annotated[int, Interval(ge=0, le=1024)] = 2  # batches prepared ahead on accelerators
    synthetic: SyntheticConfig = SyntheticConfig()

    @model_validator(mode="before")
    @classmethod
    def _drop_cache(cls, values: object) -> object:
        """Accept the configs of older versions, which had a key `cache`, where it was off."""
        if not isinstance(values, dict) or values.get("cache") != "off":
            return values
        return {key: value for key, value in values.items() if key != "cache"}

    def check(self) -> None:
        for name, (low, high) in (("crop_area", self.crop_area), ("crop_aspect", self.crop_aspect)):
            if low > high:
                raise UserError(f"{name} {low}, {high}: the first must be at most the second")


class LogConfig(Config):
    """Logging during training, and its intervals in steps."""

    every: PositiveInt = 50  # rows of metrics.jsonl
    samples_every: NonNegativeInt = 500  # image grids; 0 switches them off
    tensorboard: bool = True  # curves, grids and the network's graph in RUN/tensorboard
    # receives the rows too, at each checkpoint
    tracker: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    layers: list[str] = []  # names or patterns of layers; their statistics go to TensorBoard
    layers_every: PositiveInt = 100  # steps between two computations of these statistics

    def check(self) -> None:
        if self.layers and not self.tensorboard:
            raise UserError("layers go to TensorBoard, which is off; set log.tensorboard true")


class CheckpointConfig(Config):
    """Saving. The last step is always saved."""

    every: PositiveInt = 500  # steps
    keep: PositiveInt = 2  # number of newest checkpoints that are kept, in addition to the best
    # steps; checkpoints at its multiples are not deleted
    keep_every: PositiveInt | None = None
    # a thread writes while training continues; the files are the same
    asynchronous: bool = True
    # stop: a checkpoint that cannot be written ends the run, exit 4
    on_disk_full: Literal["warn", "stop"] = "warn"

    def check(self) -> None:
        if self.keep_every is not None and self.keep_every % self.every:
            raise UserError(
                f"keep_every {self.keep_every}: must be a multiple of checkpoint.every {self.every}, or "
                "other steps would never be saved; or null"
            )

    def max_on_disk(self, steps: int) -> int:
        """Return the largest number of checkpoints that a run of `steps` steps has on the disk.

        The best checkpoint and one that is being written are included.
        """
        permanent = steps // self.keep_every if self.keep_every else 0
        return self.keep + 2 + permanent


class EvaluationConfig(Config):
    """Evaluation during training; it chooses the best checkpoint."""

    every: NonNegativeInt = 1000  # steps; 0: only at the end
    n: Annotated[int, Ge(2)] = 1000  # GAN: number of samples; a final evaluation needs more
    extractor: str = "pixels"  # GAN: pixels, classifier:RUN, resnet50 or inception
    weights: str | None = None  # weights file of the extractor
    # images per forward pass of a process, in whole chunks (docs/evaluation.md)
    batch_size: PositiveInt = 100


class DistributedConfig(Config):
    """Several processes: timeouts, and the interval at which their weights are compared."""

    # timeout of a collective operation before the end of the first step, in seconds; compiling and
    # the first reads are slow
    start_timeout: Seconds = 600.0
    # timeout after the first step; for work of rank 0 alone the others wait as long as it is alive
    timeout: Seconds = 180.0
    # bf16: gradients are exchanged in half the bytes, rounded to bfloat16
    compress: Literal["off", "bf16"] = "off"
    # steps between two comparisons of weights and averages over the processes; 0: never
    check_every: NonNegativeInt = 100


class RunConfig(Config):
    """The keys that every task has."""

    # True if the task can split its micro-batches when memory runs out
    can_halve: ClassVar[bool] = False

    task: str  # gan or classifier
    seed: int = 0  # of every random draw (docs/randomness.md)
    # your own code: [my_losses.py], or installed modules; a run's config adds their digests
    imports: Imports = {}
    init_from: str | None = None  # checkpoint or run with the initial weights
    # length of the training and of its schedules; a step is one update of each network; 90ep: the
    # steps of 90 epochs
    steps: Updates = 10_000
    batch_size: PositiveInt = 64  # global: over all processes and micro-batches
    # most samples in a forward pass of a process; None: its whole part of the batch; auto: the
    # same, halved whenever memory runs out
    micro_batch: PositiveInt | Literal["auto"] | None = None
    # of convolutions and matrix products; weights stay in fp32. auto: the fastest on a CPU, the
    # native one of an accelerator; a resumed run keeps it
    precision: PrecisionName = "auto"
    # on a CPU; auto: one for each core that other programs leave free, the same for the whole run;
    # adapt: follows other programs; {0: 2, 120: 1}: by first step
    threads: Threads = "auto"
    channels_last: bool = True  # memory layout of images; faster in nearly every case
    # use deterministic kernels only: equal bits in every run on accelerators, but slower
    deterministic: bool = False
    # most updates with non-finite gradients that are skipped; at one more training stops
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
        """Return the parts of a training on images of `resolution`.

        Each part is (first step, px of the shorter side, global batch size).
        """
        return [(0, ImageSpec.of(1, resolution).side, self.batch_size)]

    @property
    def schedule_steps(self) -> int:
        """Number of steps over which learning rates go from their start to their end."""
        return self.steps

    @property
    def batches_per_step(self) -> int:
        """Number of global batches that one step reads."""
        return 1

    @property
    def smallest_batch(self) -> int:
        """Number of samples in the smallest forward pass that is measured.

        Larger passes are multiples of it.
        """
        return 2  # BatchNorm has no statistics of one sample, and mixup needs a pair

    def shape(self, dataset: "Dataset") -> Shape:
        """Return the arguments from which networks for the images of `dataset` are built.

        Checkpoints record them, so that their models can be built again.
        """
        shape = {
            "channels": dataset.meta.channels,
            "classes": len(dataset.meta.classes),
            "resolution": dataset.resolution,
        }
        pixel_format = dataset.spec.pixel_format
        return shape if pixel_format is None else shape | {"pixel_format": pixel_format}

    def for_trial(self, samples: int) -> Self:
        """Return the config of a task for a few measured steps of `samples` samples."""
        return self.changed(
            batch_size=samples,
            micro_batch=self.micro_limit,
            steps=self.steps + 1000,  # the measured steps lie beyond the run's
            init_from=None,
            evaluation=EvaluationConfig(),
            early_stopping=EarlyStoppingConfig(),
        )

    def batch_unit(self, world_size: int) -> int:
        """Return the number of samples that a global batch must be a multiple of."""
        return world_size

    def rank_batch(self, world_size: int) -> int:
        """Return the number of samples of the global batch that each process holds.

        Raises UserError if the global batch cannot be divided evenly.
        """
        if self.batch_size % world_size:
            raise UserError(
                f"batch_size {self.batch_size} cannot be shared by {world_size} processes; "
                f"make it a multiple of {world_size}"
            )
        return self.batch_size // world_size

    @property
    def micro_limit(self) -> int | None:
        """Largest number of samples in a forward pass of a process; None: its whole batch."""
        return None if self.micro_batch == "auto" else self.micro_batch

    def micro(self, world_size: int) -> int:
        """Return the number of samples in a forward pass; raises UserError as `rank_batch` does."""
        rank_batch = self.rank_batch(world_size)
        return min(self.micro_limit or rank_batch, rank_batch)
