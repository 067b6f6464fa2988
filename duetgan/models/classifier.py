"""A classifier: a backbone with a stem for small images, any number of input channels and a head
that fits.
"""

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.fx
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from duetgan.models.backbones import discriminator as gans
from duetgan.models.backbones.base import Backbone, in_turn
from duetgan.models.batchnorm import statistics_kept
from duetgan.models.gan import ImageNetwork
from duetgan.models.registry import backbone_of
from duetgan.utils.config.model import Config, PositiveInt
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.provenance import Lineage

Stem = Literal["imagenet", "small", "small-stride2"]


class ModelConfig(Config):
    """Which network."""

    # one of models/registry.py; discriminator: that of the GAN's run in weights
    name: str = "resnet18"
    discriminator: dict[str, Any] | None = None  # its form, which the run of weights says
    # small: 3x3, no pooling (32 px); small-stride2: the same with stride 2, four times cheaper;
    # null: the network's own
    stem: Stem | None = "imagenet"
    # stride 2 in a bottleneck's first 1x1, as in He's own ImageNet weights
    he_strides: bool = False
    classes: PositiveInt | None = None  # outputs of the head; None: as many as the data has
    # hidden: linear, ReLU, linear; readout: linear, of stages' maps (`read_out`)
    head: Literal["linear", "hidden", "readout"] = "linear"
    readout_stages: PositiveInt | None = None  # the last so many; None: all
    readout_parts: PositiveInt = 4  # of each map, a side; the largest value of each is read
    head_width: PositiveInt = 128  # of the hidden head's layer
    # to start from: torchvision's IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT, or a file or run
    weights: str | None = None
    # auto: as with the weights, else [-1, 1] as it is
    normalise: Literal["auto", "symmetric", "imagenet"] = "auto"
    # px that shorter sides are scaled to inside the network; None: as they come
    input_size: Annotated[int, Interval(ge=8, le=8192)] | None = None
    # compute each stage again in the backward pass instead of keeping it
    activation_checkpointing: bool = False
    inplace: bool = True  # ReLUs overwrite their input
    # training over all of a process's devices (models/model_parallel.py); auto: memory shared
    # evenly; or where each further device begins: {layer3: 1}
    split: Literal["off", "auto"] | dict[str, int] = "off"

    def check(self) -> None:
        if (self.name == gans.NAME) != (self.discriminator is not None):
            if self.name != gans.NAME or self.weights is None:
                raise UserError(
                    f"name {gans.NAME} and weights with a GAN's run belong together: give both"
                )
            self.discriminator = gans.read_form(self.weights)
        refuse(
            (
                not self.backbone.in_turn
                and (self.activation_checkpointing or self.split != "off"),
                f"activation_checkpointing and split are not for {self.name}: leave them out; "
                "micro_batch saves memory too",
            ),
            (
                self.head == "readout" and not (self.backbone.in_turn and self.split == "off"),
                f"head readout takes the maps of stages: not of {self.name}, or with model.split",
            ),
        )

    @property
    def imagenet_normalised(self) -> bool:
        """Whether images are normalised by ImageNet's mean and deviation; otherwise they stay in
        [-1, 1].
        """
        of_others = self.weights is not None and self.name != gans.NAME
        return self.normalise == "imagenet" or (self.normalise == "auto" and of_others)

    @property
    def backbone(self) -> Backbone:
        return (
            backbone_of(self.name)
            if self.discriminator is None
            else gans.discriminator_backbone(self.discriminator)
        )


class Classifier(ImageNetwork):
    """`forward(images [N, channels, H, W] in [-1, 1])` -> logits [N, classes]; `features` -> pooled
    features [N, F].

    Scaling to `input_size` and ImageNet's normalisation happen in here, so that whoever uses the
    network gives it the same images. Parameters carry torchvision's names below `network.`.
    `block_of` maps them to the blocks of `Backbone.blocks`, from the images to the logits. Weights
    that the config names are not read here but by `models.weights.load_pretrained`.
    """

    input_scale: Tensor | None
    input_shift: Tensor | None
    # [classes]: the probability from which on an image has a label; None: it has one label
    thresholds: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        channels: int,
        classes: int,
        resolution: int | str,
        pixel_format: Any = None,  # ImageNetwork has it
    ) -> None:
        super().__init__()
        if classes < 2:
            raise UserError(f"a classifier needs two classes or more, the data has {classes}")
        self.config = config
        self.channels, self.classes, self.resolution, self.pixel_format = (
            channels,
            classes,
            resolution,
            pixel_format,
        )
        self.lineage = Lineage.of()  # what its weights have seen before this training
        self.class_names: tuple[str, ...] = ()  # of a restored checkpoint
        self.backbone = config.backbone
        self.network: Any = self.backbone.build(
            config.name,
            channels=channels,
            stem=config.stem or "imagenet",
            he_strides=config.he_strides,
        )
        # px that images are scaled to, None: as they come; less for a while in a training with
        # progressive resizing
        self.side = config.input_size
        # stages that come first and have been computed: `forward` takes what they give, not images
        self.begin = 0
        self.check_side(self.side or self.spec.side)
        wanted = config.imagenet_normalised
        pair = (
            normalisation(channels, self.backbone.mean, self.backbone.std)
            if wanted
            else (None, None)
        )
        self.register_buffer("thresholds", None)
        for name, value in zip(("input_scale", "input_shift"), pair, strict=True):
            # the config tells them: no part of the weights
            self.register_buffer(name, value, persistent=False)
        self.feature_dim: int = self.head.in_features
        bias = self.backbone.head_bias or config.head == "readout"
        if config.head == "readout":
            with torch.no_grad():
                self.feature_dim = self.eval().features(torch.zeros(1, *self.spec.shape)).shape[1]
            self.train()
        wide = config.head_width if config.head == "hidden" else classes
        head: nn.Module = nn.Linear(self.feature_dim, wide, bias=bias)
        if config.head == "hidden":
            head = nn.Sequential(head, nn.ReLU(inplace=True), nn.Linear(config.head_width, classes))
        self.network.set_submodule(self.backbone.head, head)
        if not config.inplace:
            for module in self.network.modules():
                if hasattr(module, "inplace"):
                    module.inplace = False
        self.block_of = {
            f"network.{name}": block for name, block in self.backbone.block_of(self.network).items()
        }
        # from the images to the logits
        self.stages = list(
            dict.fromkeys(block.partition(".")[0] for block in self.block_of.values())
        )

    def add_thresholds(self) -> None:
        """Let an image have several labels or none: each one's probability is the sigmoid of its
        logit.
        """
        self.thresholds = torch.full((self.classes,), 0.5)

    def check_side(self, side: int, remedy: str | None = None) -> None:
        """Raise UserError for images of `side` px if the network cannot take them; `remedy`: if not
        another size.
        """
        backbone = self.backbone
        least = (
            backbone.smallest * self.network.get_submodule(backbone.first).stride[0]
            if backbone.smallest > 1
            else 1
        )
        bent = (
            self.side is None and self.spec.height != self.spec.width and backbone.side is not None
        )
        if bent or side != (backbone.side or max(side, least)):
            remedy = remedy or f"set model.input_size {backbone.side or least}"
            size = self.spec if bent else f"{side} px"
            raise UserError(f"{self.config.name} cannot take images of {size}: {remedy}")

    @property
    def head(self) -> Any:
        """What makes logits of the features."""
        return self.network.get_submodule(self.backbone.head)

    def stage_of(self, name: str) -> str:
        """The stage of a parameter, by its name."""
        return self.block_of[name].partition(".")[0]

    def prepare(self, x: Tensor) -> Tensor:
        """Images [N, channels, H, W] in [-1, 1] as the first convolution takes them."""
        if self.side is not None:
            x = scaled(x, (self.side, self.side) if self.backbone.side else self.side)
        if self.input_scale is None or self.input_shift is None:
            return x
        return x * self.input_scale + self.input_shift

    def features(self, x: Tensor, end: int | None = None) -> Tensor:
        """Pooled features [N, F] before the head; `end`: the output of so many of the first stages."""
        maps = [x] if self.begin else []  # the stage's before

        def stage(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
            maps.append(self._stage(modules, x))
            return maps[-1]

        found = self.backbone.features(
            self.network, x if self.begin else self.prepare(x), stage, self.begin, end
        )
        number, last = len(self.backbone.stages), self.config.readout_stages or 0
        if self.config.head != "readout" or self.begin == number or end not in (None, number):
            return found
        return torch.cat([read_out(each, self.config.readout_parts) for each in maps[-last:]], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def _stage(self, modules: Sequence[nn.Module], x: Tensor) -> Tensor:
        """The stage's output; under activation checkpointing only `x` is kept for the backward
        pass.
        """
        if not (self.config.activation_checkpointing and self.training and torch.is_grad_enabled()):
            return in_turn(modules, x)
        more: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        # a compiled graph moves the statistics once, whatever it computes again
        if not torch.compiler.is_compiling():
            more["context_fn"] = lambda: (contextlib.nullcontext(), statistics_kept(*modules))
        return checkpoint(partial(in_turn, modules), x, **more)


def normalisation(
    channels: int, means: Sequence[float], stds: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """(scale, shift), each [1, channels, 1, 1]: scale x + shift of x in [-1, 1] is ((x + 1) / 2 -
    mean) / std.

    Grey, with alpha or not, takes the mean over the channels of mean and deviation; more than three
    repeat them.
    """
    mean, std = torch.tensor(means, dtype=torch.float64), torch.tensor(stds, dtype=torch.float64)
    if channels < 3:
        mean, std = mean.mean(0, keepdim=True), std.mean(0, keepdim=True)
    index, dtype = torch.arange(channels) % len(mean), torch.get_default_dtype()
    scale, shift = 0.5 / std[index], (0.5 - mean[index]) / std[index]
    return scale.to(dtype).view(1, -1, 1, 1), shift.to(dtype).view(1, -1, 1, 1)


def scaled(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """[N, C, H, W], bilinear and antialiased, in float32 at least: torch does not do it in bf16 on
    CPUs. `size`: height and width, or the shorter side: the aspect is kept.
    """
    height, width = map(int, images.shape[-2:])  # tensors while a graph is traced
    if not isinstance(size, tuple):
        shorter = min(height, width)
        size = (round(height * size / shorter), round(width * size / shorter))
    if (height, width) == size:
        return images
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    return F.interpolate(wide, size=size, mode="bilinear", align_corners=False, antialias=True).to(
        images.dtype
    )


def read_out(maps: Tensor, parts: int) -> Tensor:
    """A readout's part of maps [N, C, H, W]: [N, F], the largest value of each of up to `parts` x
    `parts` parts.
    """
    size = [int(side) for side in maps.shape[2:]]
    return F.max_pool2d(maps, [side // math.gcd(side, parts) for side in size]).flatten(1)


torch.fx.wrap("read_out")
# folding (models/fast.py) traces the network; what depends on the size is not looked into
torch.fx.wrap("scaled")


def fit_images(images: Tensor, resolution: int | str, channels: int) -> Tensor:
    """Images [N, C, H, W] in [-1, 1] as a classifier of `resolution` and `channels` takes them;
    differentiable.

    Another size is scaled bilinearly, another aspect bent; grey is repeated, RGB weighed (ITU-R
    601: .299, .587, .114).
    """
    images = scaled(images, ImageSpec.of(channels, resolution).size)
    if channels == 1 and images.shape[1] == 3:
        images = (images * images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(
            1, keepdim=True
        )
    return images.expand(-1, channels, -1, -1)
