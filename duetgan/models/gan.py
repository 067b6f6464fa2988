"""What a GAN's networks can do: all that training, sampling and export ask of them, whichever they
are.

A new architecture is one file with a generator and a discriminator of these classes, and their
configurations, and one line in models/registry.py. A network is built as `cls(config, resolution=,
channels=, classes=)`; `classes` 0 means unconditional. A discriminator that can grow also takes
`progressive=`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from duetgan.models.layers import convolution
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec, premultiplied
from duetgan.utils.memory import upload
from duetgan.utils.seeding import generator as keyed_generator
from duetgan.utils.text import set_names

NoiseMode = Literal["random", "const", "none"]
TruncationMean = Literal["class", "global"]  # what styles are truncated towards
# weight of a stage's new layers, 0 to 1: a number, or a 0-d tensor on the device
Alpha = float | Tensor


MEAN_LATENTS = 10_000  # from which the mean w of a class is taken
LARGEST_START = 256  # pixels that networks begin with: squares with 16 of them


class ImageNetwork(nn.Module):
    """A network of images of one size: `resolution`, the side of squares in px, or text of
    rectangles: "96x64".
    """

    channels: int
    resolution: int | str
    # of the images that it was built for, see utils/image_spec.py
    pixel_format: Mapping[str, Any] | None = None

    @property
    def spec(self) -> ImageSpec:
        return ImageSpec.of(self.channels, self.resolution, self.pixel_format)


class ImageGenerator(ImageNetwork):
    """`forward(z [N, z_dim], labels, noise=, truncation_psi=, truncation_cutoff=,
    truncation_mean=)` -> images [N, channels, H, W] in about [-1, 1].

    `labels`: int64 [N], or weights of the classes [N, classes] for mixtures and several labels an
    image; None without classes. `noise`: a map [N, 1, H, W] for each of `noise_shapes()`, "const"
    for stored ones, "none". Truncation is for those that have styles. What the last layer gives
    goes through `finished`.
    """

    has_styles: ClassVar[bool] = False  # there is a w between z and the image: see StyledGenerator
    # forward (with styles: synthesis, num_ws_at), noise_shapes and the
    can_grow: ClassVar[bool] = False
    # discriminator's hidden take a stage of progressive growing: `resolution` (px of the shorter
    # side), `alpha`

    z_dim: int
    classes: int
    # of classes that its images have, the most frequent first; None: one
    sets: Sequence[Sequence[int]] | None = None

    @property
    def kinds(self) -> int:
        """How many different labels there are to ask for: classes or sets of them; 0:
        unconditional.
        """
        return self.classes if self.sets is None else len(self.sets)

    def label_names(self, classes: Sequence[str]) -> list[str]:
        """What each of them is called."""
        return list(classes) if self.sets is None else set_names(classes, self.sets)

    def conditions(self, labels: Tensor) -> Tensor:
        """What `forward` takes for labels int64 [N], numbers of classes or of sets: themselves, or
        [N, classes].
        """
        if self.sets is None:
            return labels
        hot = torch.zeros(len(labels), self.classes)
        for row, label in zip(hot, labels.tolist(), strict=True):
            row[list(self.sets[label])] = 1
        return hot

    def noise_shapes(self, resolution: int | None = None) -> list[tuple[int, int, int]]:
        """(1, H, W) of each noise map, in the order they are taken; an empty list for a generator
        without noise.
        """
        return []

    def finished(self, x: Tensor) -> Tensor:
        """Images of the last layer's values, with alpha straight colours: what is transparent need
        not be black.
        """
        return premultiplied(x) if (self.pixel_format or {}).get("alpha") else x


class PlainGenerator(ImageGenerator):
    """Without styles and noise: `images` of what `linear` makes, without autocast, of z and the
    label's embedding.
    """

    title: ClassVar[str]  # for messages
    linear: Any  # of z and the embedding, a layer with a weight
    embed: nn.Module | None  # of one-hot labels [N, classes]; None without classes
    images: Callable[[Tensor], Tensor]

    def forward(
        self,
        z: Tensor,
        labels: Tensor | None = None,
        *,
        truncation_psi: float = 1.0,
        **_: Any,  # what other generators take: noise, truncation_cutoff, truncation_mean
    ) -> Tensor:
        """Raises UserError for a `truncation_psi` other than 1."""
        if truncation_psi != 1:
            raise UserError(
                f"truncation_psi {truncation_psi}: {self.title} has no w to truncate; leave it at 1"
            )
        with torch.autocast(z.device.type, enabled=False):
            x = z.to(self.linear.weight.dtype)
            if self.embed is not None:
                x = torch.cat([x, self.embed(one_hot(labels, self.classes, x.dtype))], dim=1)
            x = self.linear(x)
        return self.finished(self.images(x))


class StyledGenerator(ImageGenerator):
    """A generator in two halves: `mapping(z, labels)` -> w [N, w_dim], `synthesis(ws [N, num_ws,
    w_dim], noise)` -> images. `w_avg` [w_dim] is the moving mean of w, a buffer without a graph.
    """

    has_styles = True

    num_ws: int
    w_avg: Tensor
    w_avg_beta: float  # decay of w_avg
    mapping: nn.Module
    synthesis: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self._class_styles: dict[str, tuple[Tensor, Tensor]] = {}
        self._weights_version: list[tuple[int, int]] = []

    def num_ws_at(self, resolution: int | None = None) -> int:
        """Styles that a stage takes."""
        return self.num_ws

    @torch.no_grad()
    def update_w_avg(self, w_mean: Tensor) -> None:
        """Move `w_avg` towards the mean w [w_dim] of a (global) batch: w_avg = beta w_avg + (1 -
        beta) w_mean.
        """
        self.w_avg.lerp_(w_mean.to(self.w_avg.dtype), 1 - self.w_avg_beta)

    @torch.inference_mode(False)
    @torch.no_grad()
    def class_styles(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean w [N, w_dim] of each label's class and the root mean squared distance [N]
        of w from it.

        Labels as `forward` takes them; None gives one row, of an unconditional generator. Both are
        of MEAN_LATENTS latents, the same for every class, and are computed once for the network's
        present weights.
        """
        version = [(weight.data_ptr(), weight._version) for weight in self.parameters()]
        if version != self._weights_version:
            self._class_styles.clear()
            self._weights_version = version
        rows, places = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
        if labels is not None:
            rows, places = labels.unique(dim=0, return_inverse=True)
        keys = [str(row) for row in rows.tolist()]
        if missing := [
            (key, row) for key, row in zip(keys, rows, strict=True) if key not in self._class_styles
        ]:
            z = torch.randn(
                MEAN_LATENTS, self.z_dim, generator=keyed_generator(0, "class mean")
            ).to(self.w_avg)
        for key, row in missing:
            w = self.mapping(z, None if labels is None else row.expand(MEAN_LATENTS, *row.shape))
            mean = w.mean(dim=0)
            self._class_styles[key] = mean, (w - mean).square().sum(dim=1).mean().sqrt()
        means, spreads = zip(*(self._class_styles[key] for key in keys), strict=True)
        places = places.to(self.w_avg.device)
        return torch.stack(means)[places], torch.stack(spreads)[places]

    def truncation_centre(self, labels: Tensor | None, mean: TruncationMean = "class") -> Tensor:
        """Return what w is truncated towards: the mean of its class, [N, w_dim], or `w_avg`,
        [w_dim].

        Towards `w_avg` a sample loses its class with its variety; towards the mean of the class it
        keeps it (conditional truncation, 2202.11777). Without classes both are `w_avg`.
        """
        return self.w_avg if mean == "global" or not self.classes else self.class_styles(labels)[0]

    def truncate(
        self,
        ws: Tensor,
        psi: float,
        cutoff: int | None = None,
        *,
        labels: Tensor | None = None,
        mean: TruncationMean = "class",
    ) -> Tensor:
        """Return centre + psi (w - centre) for the first `cutoff` layers (all when None).

        Args: ws [N, layers, w_dim], and the labels that they were made with; centre: see
        `truncation_centre`.
        """
        if cutoff is not None and cutoff < 0:
            raise ValueError(f"truncation cutoff {cutoff} is a number of layers: 0 or more")
        if mean not in get_args(TruncationMean):
            raise ValueError(f"truncation mean {mean!r} is class or global")
        if psi == 1:
            return ws
        cutoff = ws.shape[1] if cutoff is None else cutoff
        centre = self.truncation_centre(labels, mean)[..., None, :]
        return torch.cat([centre.lerp(ws[:, :cutoff], psi), ws[:, cutoff:]], dim=1)


class StageGenerator(ImageGenerator):
    """`generator`, which can grow, at a stage of progressive growing, to sample from and to
    evaluate like any other.

    The parameters are the generator's own, not a copy. With `shown` (px) pixels are repeated up to
    that shorter side, so that the images compare with those of other stages. Raises ValueError for
    a resolution that is no stage of it.
    """

    def __init__(
        self, generator: Any, resolution: int, alpha: Alpha = 1.0, *, shown: int | None = None
    ) -> None:
        super().__init__()
        self.generator = generator
        self.z_dim, self.classes, self.channels = (
            generator.z_dim,
            generator.classes,
            generator.channels,
        )
        self.sets, self.pixel_format = generator.sets, generator.pixel_format
        self.stage, self.alpha = resolution, alpha
        self.factor = (shown or resolution) // resolution
        self.resolution = generator.spec.at(shown or resolution).resolution
        self.num_ws = generator.num_ws_at(resolution)

    def noise_shapes(self, resolution: int | None = None) -> list[tuple[int, int, int]]:
        return self.generator.noise_shapes(resolution or self.stage)

    def forward(self, z: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """`options`: noise and truncation, as the generator has them."""
        images = self.generator(z, labels, resolution=self.stage, alpha=self.alpha, **options)
        return images if self.factor == 1 else F.interpolate(images, scale_factor=self.factor)


class ImageDiscriminator(ImageNetwork):
    """`forward(images [N, channels, H, W], labels [N] or None)` -> logits [N] in the parameters'
    precision.

    In three steps, so that one pass over the images serves several labels: `hidden`, `output`,
    `project`. The last two run without autocast. `group` of the configuration: consecutive samples
    that a forward pass must hold whole.
    """

    # of images -> the last hidden activations [N, H], in the parameters' precision
    hidden: Callable[..., Tensor]
    # of the last hidden activations [N, H] -> features [N, F]; F = 1 without classes
    output: nn.Module
    embed: nn.Module | None  # of one-hot labels [N, classes] -> [N, F]; None without classes
    # stage -> module, called in turn: of images -> the last maps
    trunk: Callable[[], dict[str, nn.Module]]
    trunk_width: int  # channels of these maps
    # of the last hidden activations [N, H] -> logits of the classes [N, classes]; None without
    auxiliary: Any
    config: Any
    classes: int

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = None

    def add_auxiliary(self) -> None:
        """Give it a head that names the images' classes (AC-GAN, 1610.09585), of the kind of layer
        that `output` is.
        """
        output: Any = self.output
        self.auxiliary = type(output)(output.weight.shape[1], self.classes)

    def features(self, images: Tensor, *stage: Any, **named: Any) -> Tensor:
        """What the logits are made from, [N, F]: the label is not looked at yet. `stage` goes to
        `hidden`.
        """
        hidden = self.hidden(images, *stage, **named)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.output(hidden)

    def project(self, features: Tensor, labels: Tensor | None) -> Tensor:
        """Logits [N]: features [N, F] times the label's embedding (1802.05637); without classes the
        features.
        """
        if self.embed is None:
            return features.squeeze(1)
        with torch.autocast(features.device.type, enabled=False):
            return (features * self.embedded(one_hot(labels, self.classes, features.dtype))).sum(
                dim=1
            )

    def embedded(self, labels: Tensor) -> Tensor:
        """[N, F] of one-hot labels [N, classes]."""
        assert self.embed is not None
        return self.embed(labels)

    def check_shape(self, images: Tensor) -> None:
        """Raise ValueError for images of another shape than the network's."""
        given, own = tuple(images.shape[1:]), self.spec.shape
        if given != own:
            raise ValueError(f"images of shape {given} for a discriminator of {own}")

    def forward(
        self, images: Tensor, labels: Tensor | None = None, *stage: Any, **named: Any
    ) -> Tensor:
        return self.project(self.features(images, *stage, **named), labels)

    def after_update(self) -> None:
        """Called once after each update of the parameters, on every rank, with the same parameters."""


def one_hot(labels: Tensor | None, classes: int, dtype: torch.dtype) -> Tensor:
    """[N, classes] of labels int64 [N]; weights of the classes [N, classes] as they are. ValueError
    without labels.
    """
    if labels is None:
        raise ValueError("a conditional network needs labels")
    return (labels if labels.is_floating_point() else F.one_hot(labels, classes)).to(dtype)


def asked(labels: Tensor, sets: Tensor | None) -> Tensor:
    """What networks are conditioned on: labels int64 [n], or their rows of `sets`, float [labels,
    classes].
    """
    return labels if sets is None else sets[labels]


def label_loss(logits: Tensor, labels: Tensor, sets: Tensor | None) -> Tensor:
    """Sum over the images of the cross entropy of logits [n, classes]; of sets the binary one, the
    classes' mean.
    """
    if sets is None:
        return F.cross_entropy(logits, labels, reduction="sum")
    return F.binary_cross_entropy_with_logits(logits, sets[labels].to(logits)) * len(labels)


def told(logits: Tensor, labels: Tensor, sets: Tensor | None) -> Tensor:
    """How many images' classes are told; of sets, of each image the share of the classes that are
    told rightly.
    """
    right = (
        logits.argmax(1) == labels
        if sets is None
        else ((logits > 0) == (sets[labels] > 0)).float().mean(1)
    )
    return right.sum()


def run(function: Callable[..., Any], *arguments: Any, recompute: bool) -> Any:
    """`function(*arguments)`; with `recompute` its activations are not kept but computed again when
    they are needed.

    Nothing inside draws (noise is an argument), so there is no random state to put back.
    """
    if not (recompute and torch.is_grad_enabled()):
        return function(*arguments)
    # then the second time is as the first, whatever is penalised by then
    if not torch.compiler.is_compiling():
        function = convolution.penalised(convolution.penalty_comes())(function)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def sizes_up_to(resolution: int | str) -> list[int]:
    """The shorter sides at which networks work, each twice the one before: 4, 8, ..., 64 for 64 and
    for 96x64 px, which begin with 4x4 and 6x4 pixels; 6, 12, ..., 96 for 96. The first is 4 or more
    and as small as possible.

    Raises UserError for sizes that doubling a start of at most LARGEST_START pixels does not lead
    to.
    """
    spec = ImageSpec.of(1, resolution)
    # the largest power of two that divides both sides
    twos = math.gcd(*spec.size) & -math.gcd(*spec.size)
    while twos > 1 and spec.side < 4 * twos:
        twos //= 2
    if twos < 2 or spec.values > LARGEST_START * twos**2:
        step = max(2, 1 << max(0, spec.side.bit_length() - 3))  # what doubles a start of 4 to 7 px
        near = [
            [max(4 * step, side // step * step + more) for side in spec.size[::-1]]
            for more in (0, step)
        ]
        is_square = spec.height == spec.width
        names = dict.fromkeys(
            str(size[0]) if is_square else "x".join(map(str, size)) for size in near
        )
        smaller = (
            f"train with --data.resolution {near[0][0]}, or "
            if is_square and near[0][0] < spec.side
            else ""
        )
        raise UserError(
            f"resolution {resolution}: doubling a few pixels never gives it; {smaller}pack the data with --size "
            f"{' or '.join(names)}"
        )
    return [spec.side // twos * 2**k for k in range(twos.bit_length())]


def floor_to_two(number: int) -> int:
    """The largest power of two that is not above it."""
    return 1 << number.bit_length() - 1


# --- images: sample i depends on (seed, i), its label and nothing else


def draw(
    model: ImageGenerator,
    indices: Sequence[int],
    seed: int,
    stream: tuple[str | int, ...] = ("eval",),
    numpy_seeds: Sequence[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """z [N, z_dim] and each layer's noise maps [N, 1, H, W], drawn on the CPU with the key (seed,
    *stream, index).

    `numpy_seeds`: z is NumPy's RandomState(seed).randn(z_dim) for each of these, as in NVIDIA's
    generate.py.
    """
    shapes = model.noise_shapes()
    sizes = [model.z_dim, *(h * w for _, h, w in shapes)]
    rows = torch.stack(
        [torch.randn(sum(sizes), generator=keyed_generator(seed, *stream, int(i))) for i in indices]
    )
    z, *maps = rows.split(sizes, dim=1)
    if numpy_seeds is not None:
        z = torch.from_numpy(
            np.stack([np.random.RandomState(s).randn(model.z_dim) for s in numpy_seeds])
        ).to(z)
    return z, [m.reshape(-1, *shape) for m, shape in zip(maps, shapes, strict=True)]


@torch.no_grad()
def generate(
    model: ImageGenerator,
    *,
    labels: Tensor | None,
    indices: Sequence[int],
    seed: int,
    noise_mode: NoiseMode = "random",
    batch_size: int = 64,
    stream: tuple[str | int, ...] = ("eval",),  # of the draws' keys
    numpy_seeds: Sequence[int] | None = None,  # see `draw`
    # truncation_psi, truncation_cutoff and truncation_mean, as the model has them
    **truncation: Any,
) -> Tensor:
    """Images [N, channels, H, W] on the CPU, as files have them (`spec.from_float`), for labels [N]
    (None when unconditional) and sample indices (N of them).
    """
    device = next(model.parameters()).device
    drawn = []
    for start in range(0, len(indices), batch_size):
        part = slice(start, start + batch_size)
        z, maps = draw(
            model, indices[part], seed, stream, None if numpy_seeds is None else numpy_seeds[part]
        )
        batch_labels = None if labels is None else upload(labels[part], device)
        noise = [upload(m, device) for m in maps] if noise_mode == "random" else noise_mode
        drawn.append(
            model.spec.from_float(
                model(upload(z, device), batch_labels, noise=noise, **truncation)
            ).cpu()
        )
    return torch.cat(drawn)
