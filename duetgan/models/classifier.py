"""The classifier: a backbone and a head for the classes of the data set.

The first layers of the backbone can be adapted to small images and to any number of channels.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
import torch.fx
import torch.nn.functional as F
from annotated_types import Interval
from pydantic import BeforeValidator
from torch import Tensor, nn

from duetgan.models.backbones.base import Backbone, in_turn
from duetgan.models.batchnorm import recomputed
from duetgan.models.gan import ImageNetwork
from duetgan.models.preparation import normalisation, scaled
from duetgan.models.registry import TRAINED_BACKBONES, backbone_of
from duetgan.utils import extras
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.config.model import Config, PositiveInt
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.errors import UserError, refuse

Stem = Literal["imagenet", "small", "small-stride2"]


def _without_parts(split: object) -> object:
    """Return the config value `split`; replace a dict, which old checkpoints have, by "auto"."""
    return "auto" if isinstance(split, dict) else split


class ModelConfig(Config):
    """Choice of the classifier's network and its options."""

    # name in models/registry.py or timm:NAME; discriminator: that of the GAN run in weights
    name: str = "resnet18"
    # the discriminator's architecture, config and image size; set from the run in weights
    discriminator: Tree | None = None
    # first layers; small: 3x3, no pooling (32 px); small-stride2: also with stride 2, four times
    # cheaper; imagenet, null: the network's original ones
    stem: Stem | None = "imagenet"
    # a bottleneck's first 1x1 convolution has its stride of 2, as in He's original ImageNet weights
    he_strides: bool = False
    # number of outputs of the head; null: one per class of the data
    classes: PositiveInt | None = None
    # linear: one layer; hidden: linear, ReLU, linear; readout: linear, on maps of several stages
    head: Literal["linear", "hidden", "readout"] = "linear"
    readout_stages: PositiveInt | None = None  # readout: number of last stages to use; null: all
    # readout: parts per side of each map; the largest value of each part is a feature
    readout_parts: PositiveInt = 4
    head_width: PositiveInt = 128  # hidden: number of hidden units
    # initial weights: torchvision's IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT, or a file or run
    weights: str | None = None
    # symmetric: [-1, 1]; imagenet: ImageNet's normalisation; auto: as weights need, else symmetric
    normalise: Literal["auto", "symmetric", "imagenet"] = "auto"
    # px to which the network scales the shorter side of images; null: no scaling
    input_size: Annotated[int, Interval(ge=8, le=8192)] | None = None
    # recompute activations in the backward pass: less memory, more time
    activation_checkpointing: bool = False
    inplace: bool = True  # ReLUs overwrite their input
    # divide the network over a process's devices (extras/model_parallel); auto: by memory
    split: Annotated[Literal["off", "auto"], BeforeValidator(_without_parts)] = "off"

    def check(self) -> None:
        """Set `discriminator` from the GAN's run; raise UserError for conflicting options."""
        trained = TRAINED_BACKBONES.get(self.name)
        if (trained is None) != (self.discriminator is None):
            if trained is None or self.weights is None:
                raise UserError(
                    "name discriminator and weights with a GAN's run belong together: give both"
                )
            self.discriminator = trained.describe(self.weights)
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
        """True if images are normalised by ImageNet's mean and deviation, not left in [-1, 1]."""
        has_imagenet_weights = self.weights is not None and self.name not in TRAINED_BACKBONES
        return self.normalise == "imagenet" or (self.normalise == "auto" and has_imagenet_weights)

    @property
    def backbone(self) -> Backbone:
        """Description of the network's modules."""
        if self.discriminator is None:
            return backbone_of(self.name)
        return TRAINED_BACKBONES[self.name].backbone(self.discriminator)


class Classifier(ImageNetwork):
    """Classifier that maps images [N, channels, H, W] in [-1, 1] to logits [N, classes].

    `forward` itself scales the images to `input_size` and normalises them. `features` returns the
    features [N, F] that the head takes. Parameters are named `network.` followed by their names in
    the backbone, e.g. torchvision's. `block_of` is a dict from parameter name to block name
    (`Backbone.blocks`), ordered from the images to the logits. `models.weights.load_pretrained`
    loads the weights that the config names.
    """

    input_scale: Tensor | None
    input_shift: Tensor | None
    # Least probabilities [classes] at which an image has a label. None: one label per image.
    thresholds: Tensor | None
    # Positive number [] by which the logits are divided (`add_temperature`). None: 1.
    temperature: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        channels: int,
        classes: int,
        resolution: int | str,
        pixel_format: Any = None,
    ) -> None:
        super().__init__()
        if classes < 2:
            raise UserError(f"a classifier needs two classes or more, the data has {classes}")
        self.config = config
        self.channels = channels
        self.classes = classes
        self.resolution = resolution
        self.pixel_format = pixel_format
        self.lineage = Lineage.of()  # data that the weights were trained on before this training
        self.class_names: tuple[str, ...] = ()  # set when a checkpoint is restored
        self.parts: Sequence[object] = ()  # one part for each device, if it is split
        self.backbone = config.backbone
        self.network: Any = self.backbone.build(
            config.name,
            channels=channels,
            stem=config.stem or "imagenet",
            he_strides=config.he_strides,
        )
        # Side in px that images are scaled to; None: no scaling. Progressive resizing sets a
        # smaller one in training.
        self.side = config.input_size
        self.check_side(self.side or self.spec.side)
        scale = None
        shift = None
        if config.imagenet_normalised:
            scale, shift = normalisation(channels, self.backbone.mean, self.backbone.std)
        self.register_buffer("thresholds", None)
        self.register_buffer("temperature", None)
        # Scale and shift are not in the state dict, because the config determines them.
        self.register_buffer("input_scale", scale, persistent=False)
        self.register_buffer("input_shift", shift, persistent=False)
        self.feature_dim: int = self.head.in_features
        self.network.set_submodule(self.backbone.head, self._new_head())
        if not config.inplace:
            for module in self.network.modules():
                if hasattr(module, "inplace"):
                    module.inplace = False  # type: ignore[assignment]
        self.block_of = {
            f"network.{name}": block for name, block in self.backbone.block_of(self.network).items()
        }
        # names of the stages, from the images to the logits
        self.stages = list(
            dict.fromkeys(block.partition(".")[0] for block in self.block_of.values())
        )

    def _new_head(self) -> nn.Module:
        config, bias = self.config, self.backbone.head_bias
        if config.head == "hidden":
            return nn.Sequential(
                nn.Linear(self.feature_dim, config.head_width, bias=bias),
                nn.ReLU(inplace=True),
                nn.Linear(config.head_width, self.classes),
            )
        if config.head == "readout":
            with torch.no_grad():
                self.feature_dim = self.eval().features(torch.zeros(1, *self.spec.shape)).shape[1]
            self.train()
            bias = True
        return nn.Linear(self.feature_dim, self.classes, bias=bias)

    def add_thresholds(self) -> None:
        """Make the classifier multi-label, with sigmoids as probabilities and thresholds of 0.5."""
        self.thresholds = torch.full((self.classes,), 0.5)

    def add_temperature(self) -> None:
        """Add a temperature of 1, a number by which the network divides its logits.

        A temperature changes the probabilities, but not which class is most likely. Source: Guo et
        al. 2017, 1706.04599.
        """
        self.temperature = torch.ones(())

    def check_side(self, side: int, remedy: str | None = None) -> None:
        """Raise UserError if the network cannot take images with a shorter side of `side` px.

        The message ends with the advice `remedy`; if this is None, to set model.input_size.
        """
        backbone = self.backbone
        smallest = 1
        if backbone.smallest > 1:
            smallest = backbone.smallest * self.network.get_submodule(backbone.first).stride[0]
        is_rectangle = self.side is None and self.spec.height != self.spec.width
        needs_square = is_rectangle and backbone.side is not None
        if needs_square or side != (backbone.side or max(side, smallest)):
            remedy = remedy or f"set model.input_size {backbone.side or smallest}"
            size = self.spec if needs_square else f"{side} px"
            raise UserError(f"{self.config.name} cannot take images of {size}: {remedy}")

    @property
    def head(self) -> Any:
        """The module that maps features to logits."""
        return self.network.get_submodule(self.backbone.head)

    def stage_of(self, name: str) -> str:
        """Return the name of the stage that holds the parameter `name`."""
        return self.block_of[name].partition(".")[0]

    def prepare(self, x: Tensor) -> Tensor:
        """Scale and normalise images [N, channels, H, W] in [-1, 1] for the first convolution."""
        if self.side is not None:
            x = scaled(x, (self.side, self.side) if self.backbone.side else self.side)
        if self.input_scale is None or self.input_shift is None:
            return x
        return x * self.input_scale + self.input_shift

    def features(self, x: Tensor, end: int | None = None, begin: int = 0) -> Tensor:
        """Return the features [N, F] that the head takes.

        Args:
            x: Images; if `begin` is above 0, the output of the first `begin` stages.
            end: Number of stages. If it is below their total, return the output of the first `end`
                stages instead of the features.
            begin: Number of stages that have been computed already.
        """
        maps = [x] if begin else []  # outputs of the stages

        def stage(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
            maps.append(self._stage(modules, x))
            return maps[-1]

        features = self.backbone.features(
            self.network, x if begin else self.prepare(x), stage, begin, end
        )
        count = len(self.backbone.stages)
        if self.config.head != "readout" or begin == count or end not in (None, count):
            return features
        last = self.config.readout_stages or 0  # 0 selects all stages
        parts = self.config.readout_parts
        return torch.cat([read_out(stage_maps, parts) for stage_maps in maps[-last:]], 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.features(x))
        return logits if self.temperature is None else logits / self.temperature

    def _stage(self, modules: Sequence[nn.Module], x: Tensor) -> Tensor:
        if self.config.activation_checkpointing and self.training and torch.is_grad_enabled():
            return recomputed(modules, x)
        return in_turn(modules, x)


def read_out(maps: Tensor, parts: int) -> Tensor:
    """Divide maps [N, C, H, W] into parts and return the maxima [N, F] of all channels and parts.

    Each side is divided into gcd(side, `parts`) parts. F is C times the number of parts.
    """
    size = [int(side) for side in maps.shape[2:]]
    return F.max_pool2d(maps, [side // math.gcd(side, parts) for side in size]).flatten(1)


# models/fast.py traces the network. These functions depend on the size, so they stay calls.
torch.fx.wrap("read_out")
torch.fx.wrap("scaled")


extras.attach(__name__)
