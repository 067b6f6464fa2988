"""What the rest of the program knows of a network: how it is cut into stages, where it begins and
where it ends.

A network of your own is a file with a `Backbone`, whose `network` builds it, and a line in
models/registry.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from duetgan.utils.errors import UserError

# of ImageNet, per channel, in [0, 1] units
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# (a stage's modules, its input) -> its output, as `in_turn`
Run = Callable[[Sequence[nn.Module], Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A family of networks, by the names of their modules. It is all that freezing, layer decay,
    splits, checkpointing, Grad-CAM, weights and export know of them.
    """

    names: tuple[str, ...]  # of the family's networks, as model.name has them
    # (name, channels) -> the network, an nn.Module with any number of outputs; None: torchvision's
    # of that name
    network: Callable[[str, int], nn.Module] | None = None
    # name -> its weights, each with a URL; None: torchvision's where the network is, else there are
    # none
    files: Callable[[str], dict[str, str]] | None = None
    # from the images to the features: stage -> its modules, called in turn; each child of
    # `layer1.*` is a block, which layer decay and model.split take as one, and so is each other
    # module. The first stage, the stem, is one block
    stages: dict[str, tuple[str, ...]]
    # what comes after, before the features are flattened; with the last block
    pool: tuple[str, ...]
    first: str  # the convolution that takes the images
    head: str  # the linear layer that gives the logits; a stage of its own
    maps: str  # whose output Grad-CAM looks at unless told
    shrink: str | None = None  # of the stem, what small images do without
    # gives a network He's own strides, if it can
    he_strides: Callable[[nn.Module], bool] | None = None
    smallest: int = 1  # px of the images over the first convolution's stride, at least
    side: int | None = None  # px, where images must have just that
    head_bias: bool = True
    frozen: tuple[str, ...] = ()  # patterns of parameter names that never train
    # gives the first convolution's weights for training images as it takes them, in parts [n,
    # channels, H, W]; None: it begins at random
    first_filters: Callable[[Iterable[Tensor]], Tensor] | None = None
    # the first convolution can be exchanged, for small images and other channels
    stems: bool = True
    # the stages can be called one by one: computed again, or on several devices
    in_turn: bool = True
    # that torchvision builds the networks with. Dropout and stochastic depth are off: what they
    # draw would depend on how a batch is cut up
    options: dict[str, Any] = field(default_factory=dict)
    # that its weights were made for: px, of the shorter side before the middle is taken, filter;
    # None: torchvision says
    images: tuple[int, int, str] | None = None
    mean: tuple[float, ...] = MEAN  # of the images that the family's weights have seen
    std: tuple[float, ...] = STD

    def build(
        self, name: str, *, channels: int = 3, stem: str = "imagenet", he_strides: bool = False
    ) -> Any:
        """The network, an nn.Module, without weights. Raises UserError for a stem or strides that
        it cannot have.
        """
        if stem != "imagenet" and not self.stems:
            raise UserError(
                f"model.stem is not for {name}: set --model.stem null; model.input_size enlarges images"
            )
        network: Any = (
            make(name, **self.options) if self.network is None else self.network(name, channels)
        )
        self._check(name, network)
        if he_strides and not (self.he_strides and self.he_strides(network)):
            raise UserError(
                f"model.he_strides is for bottlenecks (resnet50 and larger); {name} has none: leave it out"
            )
        first = network.get_submodule(self.first)
        if self.stems and (stem != "imagenet" or channels != first.in_channels):
            network.set_submodule(self.first, _first(first, channels, stem))
        if stem != "imagenet" and self.shrink is not None:
            network.set_submodule(self.shrink, nn.Identity())
        for parameter, value in network.named_parameters() if self.frozen else ():
            value.requires_grad_(
                not any(fnmatchcase(parameter, pattern) for pattern in self.frozen)
            )
        return network

    def _check(self, name: str, network: nn.Module) -> None:
        """Raise UserError, naming the family, where the description does not fit the network."""
        modules = dict(network.named_modules())
        paths = [
            self.first,
            self.head,
            self.maps,
            self.shrink or "",
            *self.pool,
            *sum(self.stages.values(), ()),
        ]
        wrong = [f"it has no {path}" for path in paths if path.removesuffix(".*") not in modules]
        if not wrong:
            kinds: dict[str, type] = {
                self.first: nn.Conv2d if self.stems else nn.Module,
                self.head: nn.Linear,
            }
            wrong = [
                f"its {path} is no {k.__name__}"
                for path, k in kinds.items()
                if not isinstance(modules[path], k)
            ]
            held = self.block_of(network)
            wrong += [
                f"no stage holds its {path}"
                for path, _ in network.named_parameters()
                if path not in held
            ]
        if wrong:
            raise UserError(
                f"the description of {', '.join(self.names)} (models/backbones/) does not fit {name}: {wrong[0]}; mend "
                "it"
            )

    def blocks(self, network: nn.Module) -> dict[str, tuple[str, ...]]:
        """Block (`stem`, `layer1.0`, ..., `head`; its stage before the dot) -> its modules, from
        images to logits.
        """
        stem, *stages = self.stages
        blocks = {stem: self.stages[stem]}
        for stage in stages:
            modules: list[str] = []
            for name in self.stages[stage]:
                parent, every, _ = name.partition(".*")
                children = network.get_submodule(parent).named_children()
                modules += [f"{parent}.{child}" for child, _ in children] if every else [name]
            blocks |= {f"{stage}.{number}": (module,) for number, module in enumerate(modules)}
        blocks[next(reversed(blocks))] += self.pool
        return blocks | {"head": (self.head,)}

    def block_of(self, network: nn.Module) -> dict[str, str]:
        """Parameter -> its block, from the images to the logits."""
        return {
            f"{module}.{name}": block
            for block, modules in self.blocks(network).items()
            for module in modules
            for name, _ in network.get_submodule(module).named_parameters()
        }

    def published(self, name: str) -> dict[str, str]:
        """Where the network's weights are: name -> URL."""
        if self.files or self.network:
            return self.files(name) if self.files else {}
        # a second and a half, of which a GAN's processes need nothing
        from torchvision import models

        return {
            key: weights.url for key, weights in models.get_model_weights(name).__members__.items()
        }

    def images_of(self, name: str, file: str) -> tuple[int, int, str]:
        """`images` of the network's published weights, for torchvision's the ones in `file`, else
        its first.
        """
        if self.images is not None:
            return self.images
        from torchvision import models

        every = list(models.get_model_weights(name))
        how = next(
            (weights for weights in every if weights.url.endswith(f"/{file}")), every[0]
        ).transforms()
        return how.crop_size[0], how.resize_size[0], how.interpolation.value

    def features(
        self, network: nn.Module, x: Tensor, run: Run, begin: int = 0, end: int | None = None
    ) -> Tensor:
        """What the head takes, [N, F], for images [N, channels, H, W] as the first convolution
        takes them. `begin`: x has been through so many stages already; `end`: what comes out of so
        many instead.
        """
        stages = list(self.stages.values())
        for names in stages[begin:end]:
            x = run([network.get_submodule(name.removesuffix(".*")) for name in names], x)
        if begin == len(stages) or end not in (None, len(stages)):
            return x
        return in_turn([network.get_submodule(name) for name in self.pool], x).flatten(1)


def in_turn(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The last of the modules' output, each having taken that of the one before."""
    for module in modules:
        x = module(x)
    return x


def make(name: str, **options: Any) -> Any:
    """torchvision's network of that name, without weights."""
    from torchvision import models  # see `published`

    return models.get_model(name, weights=None, **options)


def normalize(images: Tensor) -> Tensor:
    """[n, 1 or 3, H, W] in [0, 1] -> [n, 3, H, W] as ImageNet's networks take them; grey is
    repeated.
    """
    mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images.expand(-1, 3, -1, -1) - mean) / std


def _first(old: nn.Conv2d, channels: int, stem: str) -> nn.Conv2d:
    """A first convolution for other channels, or 3x3 for small images, initialised as He did."""
    shape: Any = {"kernel_size": old.kernel_size, "stride": old.stride, "padding": old.padding}
    if stem != "imagenet":
        shape = {"kernel_size": 3, "stride": 2 if stem == "small-stride2" else 1, "padding": 1}
    conv = nn.Conv2d(channels, old.out_channels, **shape, bias=old.bias is not None)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv
