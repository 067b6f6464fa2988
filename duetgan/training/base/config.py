"""What both tasks' configurations share. A recipe's YAML sets only what differs from the defaults
here.
"""

import re
from fractions import Fraction
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Interval
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from duetgan.training.base.monitors import EarlyStoppingConfig, SpikesConfig
from duetgan.utils.config.model import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
)
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.image_spec import ImageSpec, Resolution


def in_updates(value: Any, info: ValidationInfo) -> Any:
    """A length in epochs, `90ep`, in updates, where the context of the validation is a function
    that tells them.
    """
    epochs = isinstance(value, str) and re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)ep", value)
    return info.context(float(epochs[1])) if epochs and info.context else value


# how a recipe may give a length, whose model has updates
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


class SyntheticConfig(Config):
    """Synthetic images that training mixes with those of data.path."""

    # LMDB of samples, made by `generate.py dataset` or duet pack; null: none
    path: str | None = None
    # instead: a GAN's run or checkpoint, from which new samples are drawn in every epoch
    checkpoint: str | None = None
    share: Share | None = None  # of each global batch; null: as many as balance fill needs
    weight: NonNegativeFloat = 1.0  # of their loss; a real image's is 1. Classifiers only
    # from here on training is on real images alone: a share of the steps, or (above 1) a step
    until: PositiveFloat = 1.0
    # fill: samples of rare classes, to bring them up to the largest
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
        return self.path is not None or self.checkpoint is not None

    def last_step(self, steps: int) -> int | None:
        """The step of a training of `steps` steps before which images are mixed; None: in all of
        them.
        """
        end = ceil(Fraction(str(self.until)) * steps) if self.until <= 1 else int(self.until)
        return end if end < steps else None


class DataConfig(Config):
    """Where the images are and how they are read."""

    # LMDB made by `duet pack`, a folder or zip of images, or webdataset's tar files: a file, a
    # folder of tar files, or a pattern for several as one data set: "train-*.lmdb",
    # "train-{0000..0146}.tar"
    path: str = ""
    val_path: str | None = None  # held-out images, for evaluation; likewise
    resolution: Resolution | None = None  # px, or 96x64; None: the largest that is stored
    # of training images; random: crop_area and crop_aspect
    crop: Literal["centre", "random"] = "centre"
    crop_area: tuple[Share, Share] = (0.08, 1.0)  # share of the image that a random crop shows
    # its width / height before it is made square
    crop_aspect: tuple[PositiveFloat, PositiveFloat] = (0.75, 4 / 3)
    # decoding threads; auto: measured. Raw images need none
    workers: Annotated[int, Interval(ge=0, le=1024)] | Literal["auto"] = "auto"
    # skip: the next whole record takes a damaged one's place
    on_damage: Literal["stop", "skip"] = "stop"
    # balanced: every class is seen equally often
    sampling: Literal["uniform", "balanced"] = "uniform"
    # how often images of a class are seen; others: 1
    class_rates: dict[str, NonNegativeFloat] = {}
    # file with a number per record: how often it is seen (.npy or text)
    sample_weights: str | None = None
    prefetch: Annotated[int, Interval(ge=0, le=1024)] = 2  # batches prepared ahead on accelerators
    synthetic: SyntheticConfig = SyntheticConfig()

    @model_validator(mode="before")
    @classmethod
    def _of_older_runs(cls, values: Any) -> Any:
        """Without the key `cache`, which is gone, where it was off."""
        old = isinstance(values, dict) and values.get("cache") == "off"
        return {key: value for key, value in values.items() if key != "cache"} if old else values

    def check(self) -> None:
        for name, (low, high) in (("crop_area", self.crop_area), ("crop_aspect", self.crop_aspect)):
            if low > high:
                raise UserError(f"{name} {low}, {high}: the first must be at most the second")


class LogConfig(Config):
    """What is logged during training, and how often (in steps)."""

    every: PositiveInt = 50  # rows of metrics.jsonl
    samples_every: NonNegativeInt = 500  # image grids; 0 switches them off
    tensorboard: bool = True  # curves, grids and the network's graph in RUN/tensorboard
    # gets the rows too, at each checkpoint
    tracker: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    layers: list[str] = []  # whose statistics go to TensorBoard: names or patterns
    layers_every: PositiveInt = 100  # steps from one look at these layers to the next

    def check(self) -> None:
        if self.layers and not self.tensorboard:
            raise UserError("layers go to TensorBoard, which is off; set log.tensorboard true")


class CheckpointConfig(Config):
    """Saving; the last step is always saved."""

    every: PositiveInt = 500  # steps
    keep: PositiveInt = 2  # newest checkpoints kept; the best one is kept besides
    # steps; checkpoints at its multiples are kept as long as this stands
    keep_every: PositiveInt | None = None
    # written by a thread while training continues; the files are the same
    asynchronous: bool = True
    # stop: a checkpoint that cannot be written ends the run, exit 4
    on_disk_full: Literal["warn", "stop"] = "warn"

    def check(self) -> None:
        if self.keep_every is not None and self.keep_every % self.every:
            raise UserError(
                f"keep_every {self.keep_every}: must be a multiple of checkpoint.every {self.every}, or "
                "other steps would never be saved; or null"
            )

    def most(self, steps: int) -> int:
        """Checkpoints that a run of `steps` steps has on the disk at most, with the best and one
        being written.
        """
        return self.keep + 2 + (steps // self.keep_every if self.keep_every else 0)


class EvaluationConfig(Config):
    """Evaluation during training; it chooses the best checkpoint."""

    every: NonNegativeInt = 1000  # steps; 0: only at the end
    n: Annotated[int, Ge(2)] = 1000  # GAN: generated images; fewer than for a final figure
    extractor: str = "pixels"  # GAN: pixels, classifier:RUN, resnet50 or inception
    weights: str | None = None  # weights file of the extractor
    # images that a process takes at a time, in whole chunks (docs/evaluation.md)
    batch_size: PositiveInt = 100


class DistributedConfig(Config):
    """Several processes: how long they wait for each other, and how often their numbers are
    compared.
    """

    # seconds an operation may take until the first step is done (compiling, first reads)
    start_timeout: Seconds = 600.0
    # and afterwards; what rank 0 does alone is waited for as long as it is alive
    timeout: Seconds = 180.0
    # bf16: gradients travel in half the bytes, rounded to bfloat16
    compress: Literal["off", "bf16"] = "off"
    # steps from one comparison of weights and averages over the processes to the next; 0: never
    check_every: NonNegativeInt = 100


class RunConfig(Config):
    """The keys every task has."""

    # whether the task's micro-batches can be cut up where memory runs out
    can_halve: ClassVar[bool] = False

    task: str  # gan or classifier
    seed: int = 0  # of every random draw (docs/randomness.md)
    # code of one's own: [my_losses.py], or installed modules; with digests in a run
    imports: Imports = {}
    init_from: str | None = None  # checkpoint or run whose weights this run starts from
    # length of the training and of its schedules; a step is one update of each network; 90ep: as
    # many as 90 epochs have
    steps: Updates = 10_000
    batch_size: PositiveInt = 64  # global: over all processes and micro-batches
    # samples a forward pass per process, at most; None: its whole share; auto: that, and halved
    # where memory runs out
    micro_batch: PositiveInt | Literal["auto"] | None = None
    # of convolutions and matrix products, weights stay in fp32; auto: measured (CPU) or native
    # (accelerator), then kept
    precision: PrecisionName = "auto"
    # of a CPU; auto: as many as other programs leave cores for, then kept; adapt: follows them; {0:
    # 2, 120: 1}: by first step
    threads: Threads = "auto"
    channels_last: bool = True  # memory layout of images; faster in nearly every case
    # deterministic kernels only: the same bits run after run on accelerators, slower
    deterministic: bool = False
    # updates skipped for non-finite gradients before training stops itself
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
        """Whether each process uses all of its devices instead of one."""
        return False

    def spans(self, resolution: int | str) -> list[tuple[int, int, int]]:
        """(first step, px of the shorter side, global batch) of the training's parts, for images of
        `resolution`.
        """
        return [(0, ImageSpec.of(1, resolution).side, self.batch_size)]

    @property
    def schedule_steps(self) -> int:
        """Steps over which rates go from their start to their end."""
        return self.steps

    @property
    def batches_per_step(self) -> int:
        return 1

    @property
    def smallest_batch(self) -> int:
        """Samples of the smallest forward pass that is tried; larger ones hold a multiple of it."""
        return 2  # BatchNorm has no statistics of one, and pairs are mixed

    def shape(self, reader: Any) -> dict[str, Any]:
        """What networks for the images of `reader` are built from, and a checkpoint's models again."""
        return {
            "channels": reader.meta.channels,
            "classes": len(reader.meta.classes),
            "resolution": reader.resolution,
            **({} if (pixels := reader.spec.pixel_format) is None else {"pixel_format": pixels}),
        }

    def for_trial(self, samples: int) -> Self:
        """The config of a task that makes a few steps of so many samples, beyond the run's, to be
        measured.
        """
        return self.changed(
            batch_size=samples,
            micro_batch=self.micro_limit,
            steps=self.steps + 1000,  # so that a step beyond the run's is one of this
            init_from=None,
            evaluation=EvaluationConfig(),
            early_stopping=EarlyStoppingConfig(),
        )

    def batch_unit(self, world_size: int) -> int:
        """Return the number of samples that a global batch must be a multiple of."""
        return world_size

    def share(self, world_size: int) -> int:
        """Samples of the global batch that each process holds. Raises UserError when that is no
        whole number.
        """
        if self.batch_size % world_size:
            raise UserError(
                f"batch_size {self.batch_size} cannot be shared by {world_size} processes; make it a multiple of "
                f"{world_size}"
            )
        return self.batch_size // world_size

    @property
    def micro_limit(self) -> int | None:
        """Samples per forward pass and process that are asked for; None: the whole share."""
        return None if self.micro_batch == "auto" else self.micro_batch

    def micro(self, world_size: int) -> int:
        """Samples per forward pass, at most; raises UserError as `share` does."""
        share = self.share(world_size)
        return min(self.micro_limit or share, share)
