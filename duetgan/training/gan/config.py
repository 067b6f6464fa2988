"""Configuration of a GAN's training."""

from functools import cache
from math import lcm
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from annotated_types import Ge
from pydantic import create_model

from duetgan.data.augment.transforms import Augment
from duetgan.models.layers.fused import KernelSetting
from duetgan.models.registry import DEFAULT, architecture_of
from duetgan.models.stylegan2 import DiscriminatorConfig, GeneratorConfig
from duetgan.training.base.compiled import CompileSetting
from duetgan.training.base.config import RunConfig, Shape
from duetgan.training.gan.ada import AdaConfig
from duetgan.training.gan.diagnostics import WatchConfig
from duetgan.training.gan.growth import ProgressiveConfig, Stages
from duetgan.training.gan.losses import OBJECTIVES, Objective
from duetgan.training.optim.updater import OptimizerConfig
from duetgan.utils.config.cli import entry
from duetgan.utils.config.model import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Probability,
)
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.image_spec import ImageSpec

if TYPE_CHECKING:
    from duetgan.data.reading.dataset import Dataset


class GanLossConfig(Config):
    """The objective, its penalties, and further losses of the generator."""

    # nonsaturating, relativistic (pairs as in R3GAN), hinge or wasserstein
    objective: str = "nonsaturating"
    # relativistic: both networks learn from the same pairs, in one pass of D; false: D gets new
    # pairs, as in R3GAN
    same_pairs: bool = False
    # strength of R1, the gradient penalty on real images; rule of thumb: 0.0002 * resolution^2 /
    # batch_size; try x2, x4, /2, /4
    r1_gamma: NonNegativeFloat = 1.0
    r2_gamma: NonNegativeFloat = 0.0  # strength of R2, at samples; R3GAN: as r1_gamma
    # final value of r1_gamma and r2_gamma, by a cosine over schedule_kimg; null: constant
    gamma_final: NonNegativeFloat | None = None
    # weight of (norm of D's gradient between images and samples - 1)^2; WGAN-GP: 10
    gradient_penalty_weight: NonNegativeFloat = 0.0
    # steps between penalties of D, which are multiplied by this interval; 0: no penalties
    r1_interval: NonNegativeInt = 16
    style_mixing: Probability = 0.9  # probability of a second style in a sample
    # weight of real images with a wrong label, as if they were samples (1605.05396), if conditional
    mismatch_weight: NonNegativeFloat = 0.0
    path_length_weight: NonNegativeFloat = 0.0  # weight of the path-length penalty; StyleGAN2: 2
    # steps between path-length penalties, which are multiplied by this interval
    path_length_interval: PositiveInt = 4
    path_length_decay: PositiveFraction = 0.01  # update rate of the moving mean of path lengths
    # run or checkpoint of a classifier that must recognise the class of the samples
    classifier: str | None = None
    classifier_weight: NonNegativeFloat = 1.0  # weight of loss.classifier's cross entropy
    # weight of the cross entropy of a classification head on D, for both networks, if conditional;
    # 0: no head (1610.09585)
    auxiliary_weight: NonNegativeFloat = 0.0
    # the classification head learns from samples too, as in AC-GAN, unlike ReACGAN (2111.01118)
    auxiliary_fakes: bool = False
    # weight of the distance between mean D features of images and samples (1606.03498)
    feature_matching_weight: NonNegativeFloat = 0.0
    # number of consecutive samples in a mean of D features
    feature_matching_group: Annotated[int, Ge(2)] = 8
    # steps between logs of the norms and cosines of each loss's own gradient; 0: never
    gradients_every: NonNegativeInt = 0

    def check(self) -> None:
        refuse(
            (
                self.functions.paired and self.mismatch_weight,
                f"mismatch_weight: the {self.objective} objective has pairs only; set it to 0",
            ),
            (
                self.same_pairs and not self.functions.paired,
                f"same_pairs: the {self.objective} objective has no pairs; leave it out",
            ),
            (
                self.auxiliary_fakes and not self.auxiliary_weight,
                "auxiliary_fakes is of the head that loss.auxiliary_weight adds; set a weight",
            ),
            (
                not self.functions.bounded
                and not (self.gradient_penalty_weight and self.r1_interval),
                f"objective {self.objective} needs a bound of the discriminator's slope: set "
                "loss.gradient_penalty_weight (1704.00028: 10) and loss.r1_interval 1 or more",
            ),
        )

    @property
    def functions(self) -> Objective:
        """The loss functions of the configured objective.

        Raises UserError if no objective has this name; the message suggests the most similar one.
        """
        return entry(OBJECTIVES, self.objective, "objective")

    @property
    def same_images(self) -> bool:
        """True if both networks learn from the same samples and the same batch of real images."""
        return self.same_pairs or not self.functions.paired

    def path_length_due(self, step: int) -> bool:
        return self.path_length_weight > 0 and step % self.path_length_interval == 0

    def penalty_due(self, step: int) -> bool:
        has_penalty = max(self.r1_gamma, self.r2_gamma, self.gradient_penalty_weight) > 0
        return has_penalty and self.r1_interval > 0 and step % self.r1_interval == 0

    def gradients_due(self, step: int) -> bool:
        return self.gradients_every > 0 and step % self.gradients_every == 0


class GanEmaConfig(Config):
    """The moving average of the generator: the network that is sampled and evaluated."""

    # half-life in thousand images; null: batch_size * 10 / 32
    ema_kimg: NonNegativeFloat | None = None
    # initial half-life, which a cosine over schedule_kimg changes to ema_kimg (R3GAN: 0)
    ema_kimg_start: NonNegativeFloat | None = None
    # limit of the half-life, as a fraction of the images seen; null: no limit
    ema_rampup: NonNegativeFloat | None = 0.05


ADAM = OptimizerConfig(name="adam", lr=0.0025, betas=[0.0, 0.99])


class GanConfig(RunConfig):
    """Configuration of a GAN with the networks of StyleGAN2.

    `config_of` returns the class for other architectures.
    """

    task: Literal["gan"] = "gan"
    architecture: str = DEFAULT  # architecture of both networks: stylegan2, r3gan or dcgan
    # condition both networks on the images' classes, if any; false: ignore labels
    conditional: bool = True
    generator: GeneratorConfig = GeneratorConfig()
    discriminator: DiscriminatorConfig = DiscriminatorConfig()
    loss: GanLossConfig = GanLossConfig()
    generator_optimizer: OptimizerConfig = ADAM
    discriminator_optimizer: OptimizerConfig = ADAM
    # torch.compile where no double backward is needed; auto: on accelerators only
    compile: CompileSetting = "auto"
    # fused Triton kernels for FIR resampling and activations; auto: on CUDA devices that run them
    kernels: KernelSetting = "auto"
    # thousand images after which learning rates, gamma, ada.p and the half-life of the average
    # reach their final values; null: all of the run
    schedule_kimg: PositiveFloat | None = None
    ema: GanEmaConfig = GanEmaConfig()
    augment: Augment = Augment()  # augmentation of real images only; samples may look augmented too
    ada: AdaConfig = AdaConfig()  # augmentation of all images that the discriminator sees
    progressive: ProgressiveConfig = ProgressiveConfig()
    watch: WatchConfig = WatchConfig()

    def check(self) -> None:
        super().check()
        architecture = architecture_of(self.architecture)
        refuse(
            (
                not architecture.generator.has_styles
                and (self.loss.path_length_weight or self.loss.style_mixing),
                f"architecture {self.architecture} has no styles: set loss.path_length_weight, loss.style_mixing to 0",
            ),
            (
                not architecture.growing and self.progressive.start is not None,
                f"architecture {self.architecture} cannot grow: progressive.start must be null",
            ),
            (
                self.ada.mode == "adaptive" and not self.loss.functions.signed,
                f"ada.mode adaptive reads the sign of D(real), which means nothing with loss.objective "
                f"{self.loss.objective}: take ada.mode fixed or scheduled",
            ),
        )
        for key in ("classifier", "auxiliary_weight"):
            if getattr(self.loss, key) and not self.conditional:
                raise UserError(f"conditional false: loss.{key} needs the classes; leave it out")
        refuse(
            (
                "muon" in (self.generator_optimizer.name, self.discriminator_optimizer.name),
                "optimizer muon is for classifiers: take adam or muon-adam for a GAN",
            ),
            (
                self.generator_optimizer.schedule_free
                or self.discriminator_optimizer.schedule_free,
                "schedule-free optimizers are for classifiers: a GAN has an average of its own (ema)",
            ),
            (
                self.data.synthetic.weight != 1,
                "data.synthetic.weight is of a classifier's loss; leave it out, a GAN has the share alone",
            ),
            (
                self.data.synthetic.on and self.progressive.start is not None,
                "data.synthetic cannot be combined with growing: set progressive.start to null",
            ),
        )

    def stages(self, resolution: int | str) -> Stages:
        """Return the stages of progressive growing for images of `resolution`.

        Without growth there is a single stage.
        """
        return Stages(
            self.progressive, ImageSpec.of(1, resolution).side, self.steps, self.batch_size
        )

    def spans(self, resolution: int | str) -> list[tuple[int, int, int]]:
        return [
            (stage.first_step, stage.resolution, stage.batch_size)
            for stage in self.stages(resolution).all
        ]

    def schedule_images(self, resolution: int | str) -> int:
        """Return the number of images after which scheduled settings reach their final values."""
        if self.schedule_kimg is None:
            return self.stages(resolution).images_at(self.steps)
        return max(1, round(self.schedule_kimg * 1000))

    def schedule_steps(self, resolution: int | str) -> int:
        if self.schedule_kimg is None:
            return self.steps
        return self.stages(resolution).steps_of(self.schedule_images(resolution))

    @property
    def batches_per_step(self) -> int:
        return 1 if self.loss.same_images else 2

    @property
    def smallest_batch(self) -> int:
        matching = self.loss.feature_matching_group if self.loss.feature_matching_weight else 1
        return lcm(self.discriminator.group, matching, 2)  # Path lengths use half a batch.

    def shape(self, dataset: "Dataset") -> Shape:
        shape = super().shape(dataset)
        return shape if self.conditional else shape | {"classes": 0}

    def for_trial(self, samples: int) -> Self:
        """Return this config, changed for timing a few steps with a global batch of `samples`.

        The steps are those of the full networks, without growth.
        """
        return super().for_trial(samples).changed(progressive=ProgressiveConfig())

    def check_batches(self, stages: Stages, world_size: int) -> None:
        """Raise UserError if a batch size cannot be divided into ranks, micro-batches and groups.

        The batch size of every stage is checked.
        """
        matching = self.loss.feature_matching_group if self.loss.feature_matching_weight else 1
        half = 2 if self.loss.path_length_weight else 1
        for stage in stages.all:
            name = f"batch_size {stage.batch_size} of the stage of {stage.resolution} px"
            rank_batch = stage.batch_size // world_size
            micro = min(self.micro_limit or rank_batch, rank_batch)
            # what divides what, and the config key or option that says so
            divisions = (
                ("the number of processes", world_size, stage.batch_size),
                ("micro_batch", micro, rank_batch),
                ("loss.path_length_weight (half a batch):", half, rank_batch),
                ("discriminator.minibatch_std_group", self.discriminator.group, micro),
                ("loss.feature_matching_group", matching, micro),
            )
            for key, divisor, samples in divisions:
                if divisor == 0 or samples % divisor:
                    raise UserError(
                        f"{name}: {key} {divisor} does not divide {samples} samples "
                        f"({world_size} processes, micro-batches of {micro}); change one of them"
                    )


@cache
def config_of(architecture: str = DEFAULT) -> type[GanConfig]:
    """Return the config class of an architecture, a subclass of `GanConfig`.

    Its sections for the networks are those of the architecture, and its defaults are the
    architecture's recipe. Raises UserError for an architecture that is not in the registry.
    """
    entry = architecture_of(architecture)
    sections: dict[str, Any] = {
        name: field.annotation for name, field in GanConfig.model_fields.items()
    }
    networks = {"generator": entry.generator_config, "discriminator": entry.discriminator_config}
    fields: dict[str, Any] = {"architecture": (str, architecture)}
    for name in {**networks, **entry.recipe}:
        section = networks.get(name) or sections[name]
        fields[name] = (section, section(**entry.recipe.get(name, {})))
    return create_model("GanConfig", __base__=GanConfig, __module__=__name__, **fields)
