"""Description of a classifier's network: its stages, its first convolution and its head.

To add a network, write a file that defines a `Backbone`, such as airbench.py; its field `network`
is the function that builds the network. Then add the `Backbone` to `FAMILIES` in
models/registry.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from duetgan.utils.errors import UserError

# Mean and deviation of ImageNet's images, per channel, for values in [0, 1].
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
# function that runs a stage, as `in_turn`: (its modules, its input) -> its output
Run = Callable[[Sequence[nn.Module], Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Description of a family of networks by the names of their modules.

    Freezing, layer decay, splits, checkpointing, Grad-CAM, weights and export know a network only
    by this description.
    """

    names: tuple[str, ...]  # the family's values of model.name
    # (name, channels) -> the network, an nn.Module with any number of outputs; None: torchvision's
    # network of that name
    network: Callable[[str, int], nn.Module] | None = None
    # name of the network -> names of its published weights with their URLs; None: those of
    # torchvision if `network` is None, else no weights
    files: Callable[[str], dict[str, str]] | None = None
    # Stage -> names of its modules, called one after another, from the images to the features.
    # Each module is a block, the unit of layer decay and model.split; `layer1.*` stands for the
    # children of layer1. The first stage, the stem, is a single block.
    stages: dict[str, tuple[str, ...]]
    # modules between the last stage and the flattened features; they belong to the last block
    pool: tuple[str, ...]
    first: str  # the convolution that takes the images
    head: str  # the linear layer that gives the logits; a separate stage
    maps: str  # the module whose output Grad-CAM uses by default
    shrink: str | None = None  # the stem's pooling, which the stems for small images leave out
    # changes a network to He's original strides; returns False if it has none
    he_strides: Callable[[nn.Module], bool] | None = None
    smallest: int = 1  # least side of the images in px, divided by the first convolution's stride
    side: int | None = None  # side of the images in px, if only one is possible
    head_bias: bool = True
    frozen: tuple[str, ...] = ()  # patterns of parameter names that never train
    # Computes the first convolution's weights from batches of training images [n, channels, H, W]
    # as the convolution takes them. None: random initial weights.
    first_filters: Callable[[Iterable[Tensor]], Tensor] | None = None
    # True if the first convolution can be replaced, for small images or other channels.
    stems: bool = True
    # True if stages can be called one by one, for checkpointing and several devices.
    in_turn: bool = True
    # Arguments of torchvision's function. They switch dropout and stochastic depth off, whose draws
    # would depend on how a batch is divided.
    options: dict[str, object] = field(default_factory=dict)
    # Images that the published weights were trained on: side in px, shorter side in px before the
    # centre crop, filter; None: as torchvision states.
    images: tuple[int, int, str] | None = None
    mean: tuple[float, ...] = MEAN  # of the images that the published weights were trained on
    std: tuple[float, ...] = STD

    def build(
        self, name: str, *, channels: int = 3, stem: str = "imagenet", he_strides: bool = False
    ) -> nn.Module:
        """Build the network `name` with initial weights and return it.

        `stem` and `he_strides` are as in `ModelConfig`. Raises UserError if the network does not
        support them.
        """
        if stem != "imagenet" and not self.stems:
            raise UserError(
                f"model.stem is not for {name}: set --model.stem null; "
                "model.input_size enlarges images"
            )
        if self.network is None:
            network = make(name, **self.options)
        else:
            network = self.network(name, channels)
        if he_strides and not (self.he_strides and self.he_strides(network)):
            raise UserError(
                f"model.he_strides is for bottlenecks (resnet50 and larger); {name} has none: "
                "leave it out"
            )
        first = network.get_submodule(self.first)
        is_new = stem != "imagenet"
        if (
            self.stems
            and isinstance(first, nn.Conv2d)
            and (is_new or channels != first.in_channels)
        ):
            network.set_submodule(self.first, _first(first, channels, stem))
        if stem != "imagenet" and self.shrink is not None:
            network.set_submodule(self.shrink, nn.Identity())
        for name in self.pool:
            pool = network.get_submodule(name)
            if isinstance(pool, nn.AdaptiveAvgPool2d) and pool.output_size in (1, (1, 1)):
                network.set_submodule(name, GlobalMean())
        if self.frozen:
            for path, parameter in network.named_parameters():
                is_frozen = any(fnmatchcase(path, pattern) for pattern in self.frozen)
                parameter.requires_grad_(not is_frozen)
        return network

    def blocks(self, network: nn.Module) -> dict[str, tuple[str, ...]]:
        """Return a dict from block name to module names, ordered from the images to the logits.

        For a ResNet, the blocks are called `stem`, `layer1.0`, ..., `head`. The part of a block's
        name before the dot is its stage.
        """
        stem, *stages = self.stages
        blocks = {stem: self.stages[stem]}
        for stage in stages:
            modules: list[str] = []
            for name in self.stages[stage]:
                parent, wildcard, _ = name.partition(".*")
                if wildcard:
                    children = network.get_submodule(parent).named_children()
                    modules += [f"{parent}.{child}" for child, _ in children]
                else:
                    modules.append(name)
            blocks |= {f"{stage}.{number}": (module,) for number, module in enumerate(modules)}
        blocks[next(reversed(blocks))] += self.pool
        return blocks | {"head": (self.head,)}

    def block_of(self, network: nn.Module) -> dict[str, str]:
        """Return a dict from parameter name to block name, ordered from images to logits."""
        block_of: dict[str, str] = {}
        for block, modules in self.blocks(network).items():
            for module in modules:
                for name, _ in network.get_submodule(module).named_parameters():
                    block_of[f"{module}.{name}"] = block
        return block_of

    def published(self, name: str) -> dict[str, str]:
        """Return the published weights of the network `name`: a dict from weights name to URL."""
        if self.files or self.network:
            return self.files(name) if self.files else {}
        # imported here: it takes 1.5 s, and a GAN's processes do not need it
        from torchvision import models

        return {
            key: weights.url for key, weights in models.get_model_weights(name).__members__.items()
        }

    def images_of(self, name: str, file: str) -> tuple[int, int, str]:
        """Return the sizes and the filter of the images that published weights were trained on.

        The result is the field `images`. If the field is None, the result comes from torchvision,
        in the same form, for the weights of the network `name` whose file is called `file`. If
        there are no such weights, it is that of the first published weights of the network.
        """
        if self.images is not None:
            return self.images
        from torchvision import models

        weights = list(models.get_model_weights(name))
        match = next((entry for entry in weights if entry.url.endswith(f"/{file}")), weights[0])
        transforms = match.transforms()
        return (
            transforms.crop_size[0],
            transforms.resize_size[0],
            transforms.interpolation.value,
        )

    def features(
        self, network: nn.Module, x: Tensor, run: Run, begin: int = 0, end: int | None = None
    ) -> Tensor:
        """Return the features [N, F] that the head takes.

        Args:
            network: The network; its head is not called.
            x: Images [N, channels, H, W] as the first convolution takes them; if `begin` is above
                0, the output of the first `begin` stages.
            run: Function that calls the modules of a stage, see `Run`.
            begin: Number of stages that have been computed already.
            end: Number of stages; None for all. If it is below their total, return the output of
                the first `end` stages instead of the features.
        """
        stages = list(self.stages.values())
        for names in stages[begin:end]:
            x = run([network.get_submodule(name.removesuffix(".*")) for name in names], x)
        if begin == len(stages) or end not in (None, len(stages)):
            return x
        return in_turn([network.get_submodule(name) for name in self.pool], x).flatten(1)


class GlobalMean(nn.Module):
    """Mean over the pixels, [N, C, H, W] -> [N, C, 1, 1].

    It needs fewer operators than torch's AdaptiveAvgPool2d.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True)


def in_turn(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Call the modules one after another, starting with `x`, and return the last output."""
    for module in modules:
        x = module(x)
    return x


def make(name: str, **options: object) -> nn.Module:
    """Return torchvision's network `name` with initial weights."""
    from torchvision import models  # imported here as in `published`

    return models.get_model(name, weights=None, **options)


def normalize(images: Tensor) -> Tensor:
    """Normalise images [n, 1 or 3, H, W] in [0, 1] by ImageNet's mean and deviation.

    Grey is first repeated to three channels; the result is [n, 3, H, W].
    """
    mean = images.new_tensor(MEAN).view(3, 1, 1)
    std = images.new_tensor(STD).view(3, 1, 1)
    return (images.expand(-1, 3, -1, -1) - mean) / std


def _first(old: nn.Conv2d, channels: int, stem: str) -> nn.Conv2d:
    """Return a first convolution for `channels` channels, to replace the convolution `old`.

    It has the geometry of `old` for the stem "imagenet", and 3x3 kernels for the stems of small
    images. The weights are initialised as in He's ResNets.
    """
    width = old.out_channels
    has_bias = old.bias is not None
    if stem == "imagenet":
        conv = nn.Conv2d(
            channels,
            width,
            old.kernel_size,  # type: ignore[arg-type]
            old.stride,  # type: ignore[arg-type]
            old.padding,  # type: ignore[arg-type]
            bias=has_bias,
        )
    else:
        stride = 2 if stem == "small-stride2" else 1
        conv = nn.Conv2d(channels, width, 3, stride, padding=1, bias=has_bias)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv
