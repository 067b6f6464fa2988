"""Base classes of the GANs' networks: the interface that training, sampling and export use.

A new architecture is one file with subclasses of ImageGenerator and ImageDiscriminator and their
configurations, and one entry in models/registry.py. A network is built as
`cls(config, resolution=, channels=, classes=)`; `classes` 0 means unconditional.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from duetgan.models.layers import convolution
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec, premultiplied
from duetgan.utils.machine import upload
from duetgan.utils.seeding import generator as keyed_generator
from duetgan.utils.text import set_names

NoiseMode = Literal["random", "const", "none"]
TruncationMean = Literal["class", "global"]  # the mean that styles are truncated towards
Output = TypeVar("Output")


MEAN_LATENTS = 10_000  # latents from which the mean style w of a class is computed
LARGEST_START = 256  # maximum pixels of a network's smallest maps; 4x4 maps have 16


class ImageNetwork(nn.Module):
    """Base class of networks for images of one size.

    `resolution` is the side of square images in px, or the text WIDTHxHEIGHT for rectangles.
    """

    channels: int
    resolution: int | str
    classes: int  # number of classes; 0 if the network is unconditional
    # Format of the images that the network was built for, see utils/image_spec.py.
    pixel_format: Mapping[str, Any] | None = None

    def set_shape(self, resolution: int | str, channels: int, classes: int) -> None:
        """Set the attributes `resolution`, `channels` and `classes`."""
        self.resolution = resolution
        self.channels = channels
        self.classes = classes

    @property
    def spec(self) -> ImageSpec:
        """Size and pixel format of the network's images."""
        return ImageSpec.of(self.channels, self.resolution, self.pixel_format)


class ImageGenerator(ImageNetwork):
    """Base class of generators, which map z and labels to images in about [-1, 1].

    `forward(z [N, z_dim], labels, noise=, truncation_psi=, truncation_cutoff=, truncation_mean=)`
    returns images [N, channels, H, W]. `labels` are int64 [N], or class weights [N, classes] for
    mixtures of classes and for images with several labels. `labels` is None for an unconditional
    generator. `noise` is "const" for the stored noise maps, "none", or a list with a map [N, 1, H,
    W] for each entry of `noise_shapes()`. Only generators with styles can truncate. `forward`
    passes the output of the last layer through `finished`.
    """

    has_styles: ClassVar[bool] = False  # True for StyledGenerator, which maps z to a style w first

    z_dim: int
    # The sets of class indices of images, the most frequent first. None: one class per image.
    label_sets: Sequence[Sequence[int]] | None = None

    @property
    def num_labels(self) -> int:
        """Number of distinct labels, which are classes or sets of classes; 0 if unconditional."""
        return self.classes if self.label_sets is None else len(self.label_sets)

    def label_names(self, classes: Sequence[str]) -> list[str]:
        """Return the name of each label, given the names of the classes."""
        return list(classes) if self.label_sets is None else set_names(classes, self.label_sets)

    def conditions(self, labels: Tensor) -> Tensor:
        """Convert label indices to the form that `forward` takes.

        Args:
            labels: int64 [N], indices of classes, or of `label_sets` if these are not None.

        Returns:
            The same indices, or the label sets as multi-hot float vectors [N, classes].
        """
        if self.label_sets is None:
            return labels
        hot = torch.zeros(len(labels), self.classes)
        for row, label in zip(hot, labels.tolist(), strict=True):
            row[list(self.label_sets[label])] = 1
        return hot

    def stored_noise(self) -> list[Tensor]:
        """Return the stored noise maps [1, 1, H, W], one for each layer that takes noise."""
        return []

    def noise_shapes(self) -> list[tuple[int, int, int]]:
        """Return the shapes (1, H, W) of the noise maps, one for each layer that takes noise."""
        return [(1, *noise_map.shape[2:]) for noise_map in self.stored_noise()]

    def finished(self, x: Tensor) -> Tensor:
        """Convert the last layer's output to images: multiply the colours by alpha, if any.

        The layers output colours that are not multiplied by alpha. These need not be black where
        the image is transparent.
        """
        return premultiplied(x) if (self.pixel_format or {}).get("alpha") else x


class PlainGenerator(ImageGenerator):
    """Base class of generators without styles and noise.

    `linear` maps z, concatenated with the label's embedding, to the input of `images`, and runs
    without autocast. `images` returns the output of the last layer.
    """

    title: ClassVar[str]  # name of the architecture in messages
    linear: Any  # layer with a weight; maps z, concatenated with the embedding
    embed: nn.Module | None  # maps one-hot labels [N, classes]; None without classes
    images: Callable[[Tensor], Tensor]

    def forward(
        self,
        z: Tensor,
        labels: Tensor | None = None,
        *,
        truncation_psi: float = 1.0,
        **_: Any,  # ignored options of other generators: noise, truncation_cutoff, truncation_mean
    ) -> Tensor:
        """Return images; raise UserError for a `truncation_psi` other than 1."""
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
    """Base class of generators that consist of a mapping network and a synthesis network.

    `mapping(z, labels)` returns styles w [N, w_dim]. `synthesis(ws, noise)` returns images for the
    styles of all layers, ws [N, num_ws, w_dim]. The buffer `w_avg` [w_dim] is the moving mean of w.
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

    def forward(
        self,
        z: Tensor,
        labels: Tensor | None = None,
        *,
        noise: Sequence[Tensor] | NoiseMode = "const",
        truncation_psi: float = 1.0,
        truncation_cutoff: int | None = None,
        truncation_mean: TruncationMean = "class",
    ) -> Tensor:
        w = self.mapping(z, labels if self.classes else None)
        ws = self.truncate(
            w[:, None].expand(-1, self.num_ws, -1),
            truncation_psi,
            truncation_cutoff,
            labels=labels,
            mean=truncation_mean,
        )
        return self.synthesis(ws, noise)

    @torch.no_grad()
    def update_w_avg(self, w_mean: Tensor) -> None:
        """Move `w_avg` towards `w_mean` [w_dim], the mean w of a global batch.

        The new value is w_avg_beta * w_avg + (1 - w_avg_beta) * w_mean.
        """
        self.w_avg.lerp_(w_mean.to(self.w_avg.dtype), 1 - self.w_avg_beta)

    @torch.inference_mode(False)
    @torch.no_grad()
    def class_styles(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean w of each label, and the spread of w around this mean.

        Both are computed from MEAN_LATENTS latents, the same for every label, and cached until the
        network's weights change.

        Args:
            labels: As `forward` takes them; None for an unconditional generator (N = 1).

        Returns:
            The means [N, w_dim], and the spreads [N]: root mean squared distances of w from the
            mean.
        """
        version = [(weight.data_ptr(), weight._version) for weight in self.parameters()]
        if version != self._weights_version:
            self._class_styles.clear()
            self._weights_version = version
        rows = torch.zeros(1)
        places = torch.zeros(1, dtype=torch.int64)
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

    def truncation_centre(self, labels: Tensor | None, mean: TruncationMean) -> Tensor:
        """Return the point towards which `truncate` moves w.

        It is the mean w of each label [N, w_dim], or `w_avg` [w_dim] if `mean` is "global" or there
        are no classes. Truncation towards `w_avg` makes samples lose their class together with
        their variety; truncation towards the mean of their class preserves the class (2202.11777).
        """
        if mean == "global" or not self.classes:
            return self.w_avg
        return self.class_styles(labels)[0]

    def truncate(
        self,
        ws: Tensor,
        psi: float,
        cutoff: int | None = None,
        *,
        labels: Tensor | None = None,
        mean: TruncationMean = "class",
    ) -> Tensor:
        """Return `ws` with the first `cutoff` layers' styles moved to centre + psi (w - centre).

        Args:
            ws: Styles [N, layers, w_dim].
            psi: 1 leaves the styles unchanged, 0 moves them to the centre.
            cutoff: Number of layers; None for all.
            labels: The labels that `ws` were made with.
            mean: "class" or "global", the mean that is the centre, see `truncation_centre`.
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


class ImageDiscriminator(ImageNetwork):
    """Base class of discriminators, which map images and labels to logits [N].

    `forward(images [N, channels, H, W], labels [N] or None)` calls `hidden`, `output` and
    `project`. Only `project` uses the labels, so the result of `output` can serve several labels.
    `output` and `project` run without autocast, and the logits have the parameters' precision. Each
    group of `config.group` consecutive samples must be in the same pass.
    """

    # images -> the last hidden activations [N, H], in the parameters' precision
    hidden: Callable[..., Tensor]
    # the last hidden activations [N, H] -> features [N, F]; F = 1 without classes
    output: nn.Module
    embed: nn.Module | None  # one-hot labels [N, classes] -> [N, F]; None without classes
    # Returns stage name -> module; called in order, the modules map images to the last maps.
    trunk: Callable[[], dict[str, nn.Module]]
    trunk_width: int  # channels of the last maps
    # None, or a module: the last hidden activations [N, H] -> class logits [N, classes]
    auxiliary: Any
    config: Any
    # True if outputs depend only on groups of consecutive samples, not on the rest of the pass
    has_local_groups = True

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = None

    def add_auxiliary(self) -> None:
        """Add the head `auxiliary`, which maps hidden activations to class logits.

        The head is a layer of the same type as `output` (AC-GAN, 1610.09585).
        """
        output: Any = self.output
        self.auxiliary = type(output)(output.weight.shape[1], self.classes)

    def features(self, images: Tensor) -> Tensor:
        """Return the features [N, F] of images, which `output` computes.

        They do not depend on labels.
        """
        hidden = self.hidden(images)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.output(hidden)

    def project(self, features: Tensor, labels: Tensor | None) -> Tensor:
        """Return logits [N]: inner products of features [N, F] and label embeddings (1802.05637).

        Without classes F is 1 and the features are the logits.
        """
        if self.embed is None:
            return features.squeeze(1)
        with torch.autocast(features.device.type, enabled=False):
            return (features * self.embedded(one_hot(labels, self.classes, features.dtype))).sum(
                dim=1
            )

    def embedded(self, labels: Tensor) -> Tensor:
        """Return the embeddings [N, F] of one-hot labels [N, classes]."""
        assert self.embed is not None
        return self.embed(labels)

    def check_shape(self, images: Tensor) -> None:
        """Raise ValueError if the shape of the images is not that of the network's images."""
        shape = tuple(map(int, images.shape[1:]))  # tensors while a graph is traced
        if shape != self.spec.shape:
            raise ValueError(f"images of shape {shape} for a discriminator of {self.spec.shape}")

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.project(self.features(images), labels)

    def after_update(self) -> None:
        """Adjust the network after an update of its parameters; by default, do nothing.

        When this is called, the parameters are equal on all ranks.
        """


def one_hot(labels: Tensor | None, classes: int, dtype: torch.dtype) -> Tensor:
    """Return labels int64 [N] as one-hot vectors [N, classes] of `dtype`.

    If `labels` are class weights, floats [N, classes], cast them to `dtype`. Raises ValueError if
    `labels` is None.
    """
    if labels is None:
        raise ValueError("a conditional network needs labels")
    if labels.is_floating_point():
        return labels.to(dtype)
    # F.one_hot reads the labels on the host, except on CUDA devices.
    zeros = torch.zeros(*labels.shape, classes, dtype=dtype, device=labels.device)
    return zeros.scatter_(-1, labels[..., None], 1)


def conditioning_vectors(labels: Tensor, label_sets: Tensor | None) -> Tensor:
    """Convert labels int64 [n] to the form that conditional networks take.

    If `label_sets` is None, return the labels unchanged. Otherwise the labels are row numbers of
    `label_sets`, multi-hot floats [label sets, classes]; return these rows [n, classes].
    """
    return labels if label_sets is None else label_sets[labels]


def label_loss(logits: Tensor, labels: Tensor, label_sets: Tensor | None) -> Tensor:
    """Return the cross entropy of logits [n, classes] and labels [n], summed over the images.

    If `label_sets` is not None, labels are its row numbers (see `conditioning_vectors`). The result
    is then the binary cross entropy, averaged over the classes and summed over the images.
    """
    if label_sets is None:
        return F.cross_entropy(logits, labels, reduction="sum")
    return F.binary_cross_entropy_with_logits(logits, label_sets[labels].to(logits)) * len(labels)


def count_correct(logits: Tensor, labels: Tensor, label_sets: Tensor | None) -> Tensor:
    """Return the number of images whose logits [n, classes] predict their label.

    If `label_sets` is not None (see `conditioning_vectors`), an image does not count as 0 or 1, but
    as the fraction of the classes that are predicted correctly.
    """
    if label_sets is None:
        return (logits.argmax(1) == labels).sum()
    return ((logits > 0) == (label_sets[labels] > 0)).float().mean(1).sum()


def run(function: Callable[..., Output], *arguments: object, recompute: bool) -> Output:
    """Return `function(*arguments)`, with activation checkpointing if `recompute` is True.

    The function must not draw random numbers, because the random state is not restored for the
    recomputation. Pass noise as an argument.
    """
    if not (recompute and torch.is_grad_enabled()):
        return function(*arguments)
    # Recomputation must use the first pass's kind of convolution, even if `penalised` has ended.
    if not torch.compiler.is_compiling():
        function = convolution.penalised(convolution.is_penalised())(function)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def sizes_up_to(resolution: int | str) -> list[int]:
    """Return the shorter sides in px of a network's stages, each twice the previous one.

    The last is the shorter side of `resolution`. The first is at least 4 and as small as possible.
    Examples: 64 px and 96x64 px give 4, 8, ..., 64 (with smallest maps of 4x4 and 6x4 pixels), and
    96 px gives 6, 12, ..., 96.

    Raises:
        UserError: Doubling maps of at most LARGEST_START pixels cannot give the resolution.
    """
    spec = ImageSpec.of(1, resolution)
    # the largest power of two that divides both sides
    factor = math.gcd(*spec.size) & -math.gcd(*spec.size)
    while factor > 1 and spec.side < 4 * factor:
        factor //= 2
    if factor < 2 or spec.values > LARGEST_START * factor**2:
        step = max(2, 1 << max(0, spec.side.bit_length() - 3))  # its multiples start with 4 to 7 px
        # Long rectangles need a larger step, or their smallest maps would have too many pixels.
        while math.prod(max(4, side // step + 1) for side in spec.size) > LARGEST_START:
            step *= 2
        below = [max(4 * step, side // step * step) for side in spec.size[::-1]]
        above = [max(4 * step, side // step * step + step) for side in spec.size[::-1]]
        is_square = spec.height == spec.width
        names = dict.fromkeys(
            str(size[0]) if is_square else "x".join(map(str, size)) for size in (below, above)
        )
        smaller = ""
        if is_square and below[0] < spec.side:
            smaller = f"train with --data.resolution {below[0]}, or "
        raise UserError(
            f"resolution {resolution}: doubling a few pixels never gives it; {smaller}pack the "
            f"data with --size {' or '.join(names)}"
        )
    return [spec.side // factor * 2**k for k in range(factor.bit_length())]


def floor_to_two(number: int) -> int:
    """Return the largest power of two that is not above `number`."""
    return 1 << number.bit_length() - 1


# --- images: sample i depends only on (seed, i) and its label


def draw(
    model: ImageGenerator,
    indices: Sequence[int],
    seed: int | Sequence[int],
    stream: tuple[str | int, ...] = ("eval",),
    numpy_seeds: Sequence[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Draw latents and noise maps of samples on the CPU.

    The random numbers of a sample depend only on its key, (seed, *stream, index).

    Args:
        indices: Indices of the N samples.
        seed: One seed for all samples, or N seeds.
        stream: Middle part of the key.
        numpy_seeds: If not None, N seeds. Each sample's z is then NumPy's
            RandomState(seed).randn(z_dim), as in NVIDIA's generate.py.

    Returns:
        z [N, z_dim], and a list with the noise maps [N, 1, H, W] of each layer.
    """
    shapes = model.noise_shapes()
    sizes = [model.z_dim, *(h * w for _, h, w in shapes)]
    seeds = [seed] * len(indices) if isinstance(seed, int) else seed
    rows = torch.stack(
        [
            torch.randn(sum(sizes), generator=keyed_generator(first, *stream, int(i)))
            for first, i in zip(seeds, indices, strict=True)
        ]
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
    seed: int | Sequence[int],
    noise_mode: NoiseMode = "random",
    batch_size: int = 64,
    stream: tuple[str | int, ...] = ("eval",),
    numpy_seeds: Sequence[int] | None = None,
    **truncation: Any,
) -> Tensor:
    """Generate images and return them on the CPU as pixel values [N, channels, H, W].

    `spec.from_float` converts the generator's outputs to pixel values.

    Args:
        labels: int64 [N] or class weights [N, classes]; None when unconditional.
        indices: Indices of the N samples.
        noise_mode: "random" draws noise maps, "const" uses stored maps, "none" uses no noise.
        batch_size: Samples per forward pass.
        seed, stream, numpy_seeds: See `draw`.
        truncation: truncation_psi, truncation_cutoff and truncation_mean of the model's `forward`.
    """
    device = next(model.parameters()).device
    images = []
    for start in range(0, len(indices), batch_size):
        part = slice(start, start + batch_size)
        z, maps = draw(
            model,
            indices[part],
            seed if isinstance(seed, int) else seed[part],
            stream,
            None if numpy_seeds is None else numpy_seeds[part],
        )
        batch_labels = None if labels is None else upload(labels[part], device)
        noise = [upload(m, device) for m in maps] if noise_mode == "random" else noise_mode
        images.append(
            model.spec.from_float(
                model(upload(z, device), batch_labels, noise=noise, **truncation)
            ).cpu()
        )
    return torch.cat(images)
