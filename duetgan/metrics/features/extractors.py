"""Named feature extractors, images in, feature vectors out: the name is given with every figure.
Which images are taken, and passes over them that all processes share.
"""

import importlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.metrics.features.selection import Selection
from duetgan.models.backbones.base import normalize
from duetgan.models.backbones.torchvision import RESNET
from duetgan.models.classifier import Classifier, fit_images
from duetgan.models.restore import classifier_from, fingerprint, read
from duetgan.models.weights import file_hash, fitted, read_state_dict
from duetgan.utils.checkpoint import resolve
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, explained
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import visible
from duetgan.utils.memory import upload
from duetgan.utils.provenance import Lineage
from duetgan.utils.runlog.progress import Bar
from duetgan.utils.text import did_you_mean


@dataclass
class Extractor:
    """A deterministic function of images as files have them: [n, C, H, W] on any device -> floats
    [n, dim].
    """

    name: str  # which figures carry, e.g. `resnet50`
    dim: int  # number of features
    compute: Callable[[Tensor], Tensor]
    device: torch.device  # where it computes
    source: str = ""  # where its weights come from; empty if it has none
    lineage: Lineage = field(default_factory=Lineage.of)  # what its weights have seen
    classifier: Classifier | None = None  # whose features these are

    def __call__(self, images: Tensor) -> Tensor:
        """On the CPU, computed in full float32. UserError if one is not finite."""
        with torch.no_grad(), full_float32(self.device):
            features = self.compute(images).cpu()
        if not torch.isfinite(features).all():
            raise UserError(
                f"extractor {self.name} gives features that are not finite; its weights are broken"
            )
        return features


def pixel_features(spec: ImageSpec) -> Extractor:
    """All channels averaged down to 8x8 pixels, in [0, 1], colours multiplied by alpha: no weights
    and no time, for quick looks during training only.
    """

    def compute(images: Tensor) -> Tensor:
        images = images.cpu()
        floats = images.float() / 255 if spec.plain else (spec.to_float(images).float() + 1) / 2
        return F.adaptive_avg_pool2d(floats, 8).flatten(1)

    return Extractor("pixels", spec.channels * 64, compute, torch.device("cpu"))


# behind transparent images: on one alone, its own colour would be opaque, too
GROUNDS = {"grey": 128, "white": 255}


def photographs(extractor: Extractor, spec: ImageSpec) -> Extractor:
    """An extractor of 8-bit grey or RGB for images of `spec`: of what `visible` makes of them, on
    each of GROUNDS where they are transparent, the features side by side. Its name says what it
    sees.
    """
    if spec.plain:
        return extractor
    grounds = GROUNDS if spec.alpha else {"": None}
    name = extractor.name + f", channels 1 to {min(3, spec.colours - 1)}" * (
        spec.colours not in (1, 3)
    )
    name += f", on {' and '.join(GROUNDS)}" * spec.alpha

    def compute(images: Tensor) -> Tensor:
        return torch.cat(
            [extractor.compute(visible(images, spec, ground)) for ground in grounds.values()], dim=1
        )

    return replace(extractor, name=name, dim=extractor.dim * len(grounds), compute=compute)


def classifier_features(classifier: Classifier, *, name: str) -> Extractor:
    """Pooled features of one of our classifiers, before its head; `name` as in `classifier:runs/x`."""

    def compute(images: Tensor) -> Tensor:
        with evaluating(classifier):
            return classifier.features(classifier_input(classifier, images)).float()

    about = device_of(classifier), fingerprint(classifier), classifier.lineage, classifier
    return Extractor(name, classifier.feature_dim, compute, *about)


def classifier_input(classifier: Classifier, images: Tensor) -> Tensor:
    """Images [n, C, H, W], as files have them, as the classifier wants them: on its device, in [-1,
    1], of its size.
    Raises UserError for images of another kind, except grey for RGB and RGB for grey.
    """
    spec, channels = classifier.spec, images.shape[1]
    fits = channels == spec.channels or (spec.plain and channels in (1, 3))
    if not fits or images.dtype != getattr(torch, spec.depth):
        raise UserError(
            f"{images.dtype} of {channels} channels: the classifier takes {spec.words}; give another one"
        )
    spec = spec if channels == spec.channels else replace(spec, channels=channels)
    return fit_images(
        spec.to_float(upload(images, device_of(classifier))),
        classifier.resolution,
        classifier.channels,
    )


FILE_NAME = "resnet50-imagenet.safetensors"
CHECKOUT = Path(__file__).resolve().parents[3]
PLACES = (
    Path("weights") / FILE_NAME,
    CHECKOUT / "weights" / FILE_NAME,
    CHECKOUT.parent / "shared" / "weights" / FILE_NAME,
)


def find_weights(given: str | Path | None = None) -> Path | None:
    """The weights file: the given one, else $DUET_WEIGHTS, else one of PLACES, else None. Raises
    UserError where the given file, or the one that the variable names, is not there.
    """
    for source, name in (("--weights", given), ("$DUET_WEIGHTS", os.environ.get("DUET_WEIGHTS"))):
        if name:
            if not Path(name).is_file():
                raise UserError(
                    f"{source} {name}: no such file; give {FILE_NAME} or another ResNet-50 state dict"
                )
            return Path(name)
    return next((place for place in PLACES if place.is_file()), None)


HOW_TO_GET = (
    f"put {FILE_NAME} into weights/, or give one with --weights (torchvision's will do: "
    "torchvision.models.ResNet50_Weights.IMAGENET1K_V1.url has its address)"
)


def needed_weights(given: str | Path | None, why: str, instead: str = "") -> Path:
    """`find_weights`, or UserError that says why they are needed and what to do."""
    if (path := find_weights(given)) is None:
        raise UserError(f"{why}: {HOW_TO_GET}{instead}")
    return path


def resnet50_features(
    weights: str | Path | None = None, *, device: torch.device | str = "cpu"
) -> Extractor:
    """2048 pooled features of an ImageNet ResNet-50. Images up to 64 px are scaled to 64 px, larger
    ones to 224 px, bilinearly, rectangles bent to squares; grey is repeated to three channels.
    """
    path, place = (
        needed_weights(weights, "extractor resnet50 needs a weights file"),
        torch.device(device),
    )
    known_by = file_hash(path)
    network = load_resnet50(path).to(place, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def compute(images: Tensor) -> Tensor:
        inputs = upload(images, place).float() / 255  # [n, C, H, W] in [0, 1]
        side = 64 if max(inputs.shape[-2:]) <= 64 else 224
        if inputs.shape[-2:] != (side, side):
            # antialias matters only when shrinking; without it a large image would lose detail by
            # aliasing
            inputs = F.interpolate(
                inputs, size=(side, side), mode="bilinear", align_corners=False, antialias=True
            )
        return network(normalize(inputs).contiguous(memory_format=torch.channels_last))

    return Extractor(
        "resnet50",
        2048,
        compute,
        place,
        f"{path.name} {known_by}",
        Lineage.of(pretrained=[known_by]),
    )


def load_resnet50(path: Path) -> nn.Module:
    """A ResNet-50 without its head, float32, in evaluation mode, with the weights of a
    `.safetensors` or `.pth` file.

    The file has torchvision's parameter names. A safetensors file whose metadata says `stride:
    conv1 ...` is He's original network; every other file is taken for torchvision's, whose stride
    of 2 sits in `conv2`. Raises UserError where the file cannot be read, or a key or a shape is not
    ResNet-50's.
    """
    state, metadata = read_state_dict(path)
    he_strides = metadata.get("stride", "").startswith("conv1")
    with torch.device("meta"):  # no time is spent on an initialisation that is overwritten
        network = RESNET.build("resnet50", he_strides=he_strides)
    state = fitted(state, network.state_dict(), path, "resnet50")
    network.load_state_dict(state, assign=True)
    network.set_submodule(RESNET.head, nn.Identity())  # the pooled features are the output
    return network.eval().requires_grad_(False)


def inception_features(
    weights: str | Path | None = None, *, device: torch.device | str = "cpu"
) -> Extractor:
    """2048 pooled features of the Inception network that published FID figures use, through
    torch-fidelity, which scales to 299 px as the TensorFlow original does.
    """
    with explained(
        ImportError, "extractor inception needs torch-fidelity; `pip install torch-fidelity`"
    ):
        library = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
    path, source, place = None, "torch-fidelity's download", torch.device(device)
    if weights:
        path, source = str(weights), Path(weights).name
        read_state_dict(Path(weights))  # torch-fidelity itself would unpickle anything
    remedy = (
        "give torch-fidelity's weights-inception-2015-12-05-6726825d.pth with --weights, or take "
        "--extractor resnet50"
    )
    with explained(  # no network (URLError is an OSError), or not Inception's state dict
        (OSError, RuntimeError),
        lambda why: (
            f"Inception's weights could not be downloaded ({str(why).splitlines()[0]}); {remedy}"
        ),
    ):
        network = library.FeatureExtractorInceptionV3(
            "inception", ["2048"], feature_extractor_weights_path=path
        )
    network = network.to(place)

    def compute(images: Tensor) -> Tensor:
        return network(images.to(place).expand(-1, 3, -1, -1))[0].float()

    return Extractor("inception", 2048, compute, place, source)


EXTRACTORS = ("classifier", "resnet50", "inception", "pixels")
WITH_WEIGHTS = ("resnet50", "inception")


def build(
    specs: Sequence[str],
    *,
    device: torch.device,
    spec: ImageSpec,  # of the images
    weights: str | Path | None = None,  # a weights file, for the extractors that read one
    classifier: str | None = None,  # run or file that a bare `classifier` means
    judge: Classifier | None = None,  # that run's classifier, if it is loaded already
) -> list[Extractor]:
    """Extractors from their names: `resnet50`, `inception`, `pixels`, `classifier`,
    `classifier:RUN_OR_FILE`. Raises UserError for an unknown name, one that comes twice, a weights
    file that fits no or two of them, and where something that the extractor needs is missing.
    """
    parts = [spec.partition(":") for spec in specs]
    for kind, colon, argument in parts:
        if kind not in EXTRACTORS or (colon and kind != "classifier"):
            near = did_you_mean(kind, EXTRACTORS)
            raise UserError(
                f"no extractor {kind + colon + argument!r}{near}; there are {', '.join(EXTRACTORS)}"
            )
    readers = [kind for kind, _, _ in parts if kind in WITH_WEIGHTS]
    if weights and len(readers) != 1:
        raise UserError(
            f"--weights is for one extractor of {', '.join(WITH_WEIGHTS)}, but {' and '.join(readers) or 'none'} is "
            "named; name one with --extractor"
        )
    built: dict[str, Extractor] = {}
    for kind, _, argument in parts:
        if kind == "classifier":
            run = argument or classifier
            if not run:
                raise UserError(
                    "extractor classifier: which one? give --classifier RUN, or --extractor classifier:RUN"
                )
            loaded = judge if judge is not None and run == classifier else None
            # of which features are taken
            loaded = loaded or classifier_from(read(resolve(run)), device, several=True)
            extractor = classifier_features(loaded, name=f"classifier:{run}")
        elif kind == "pixels":
            extractor = pixel_features(spec)
        else:
            make = resnet50_features if kind == "resnet50" else inception_features
            extractor = photographs(make(weights, device=device), spec)
        if extractor.name in built:
            raise UserError(f"extractor {extractor.name} is named twice; name it once")
        built[extractor.name] = extractor
    return list(built.values())


def build_extractors(
    options: Namespace, spec: ImageSpec, device: torch.device, judge: Classifier | None
) -> list[Extractor]:
    """Those that were asked for, else those that can be had without asking. The judge is not loaded
    a second time.
    """
    run, weights = options.classifier, options.weights
    if options.extractor:
        names = [name.strip() for text in options.extractor for name in text.split(",")]
    else:
        names = ["classifier"] * bool(run) + ["resnet50"] * (find_weights(weights) is not None)
    if not names:
        raise UserError(
            "no feature extractor is available; give --classifier RUN, or a ResNet-50 weights file with --weights, "
            "or --extractor pixels for a rough figure"
        )
    return build(names, device=device, spec=spec, weights=weights, classifier=run, judge=judge)


T = TypeVar("T")

MOST, LEAST = 64, 4  # images of a chunk
# of a chunk, between these bounds: what a network needs of memory does not grow with the image size
PIXELS = 2**20


def chunk_size(side: int) -> int:
    """Images of `side` px that networks compute together: 64 up to 128 px, 16 at 256 px, 4 from 512
    px on.
    """
    return max(LEAST, min(MOST, PIXELS // side**2))


def shared_pass(
    count: int,  # images
    # what is made of the images of a chunk: plain data, and tensors on the CPU
    work: Callable[[range], T],
    *,
    side: int,  # of the images, the shorter one, in px
    # images that a process takes before the results are sent, in whole chunks and at least one
    batch_size: int,
    multiple: int = 1,  # of which a chunk's size must be one
    what: str = "",  # the images on a progress bar; empty: there is none
) -> Iterator[T]:
    """The results of `work` for every chunk of images: on rank 0 all of them in order, on the
    others none.

    The chunks begin at fixed images whatever the batch size and the number of processes, and each
    is computed as a whole by one process: the last bits of a network's float32 outputs depend on
    the images they are computed with. All ranks must exhaust it. A UserError of one rank is raised
    on all of them.
    """
    size = max(1, chunk_size(side) // multiple) * multiple
    chunks = [range(start, min(start + size, count)) for start in range(0, count, size)]
    each = max(1, batch_size // size)
    rank, world = collectives.rank(), collectives.world_size()
    with Bar(total=count, desc=what, unit="image", disable=not (what and rank == 0)) as bar:
        for first in range(0, len(chunks), each * world):
            own = chunks[first + rank * each : first + (rank + 1) * each]
            for results in collectives.gather_to_main(lambda own=own: [work(rows) for rows in own]):  # type: ignore[misc]
                for result in results:
                    yield result
                    bar.update(min(size, count - bar.n))


def feature_sets(
    source: Callable[[range], Tensor],  # images of a range, uint8 [b, C, H, W]
    extractors: Sequence[Extractor],
    *,
    total: int,  # images
    side: int,  # of the images, in px
    batch_size: int = 64,
    what: str = "",  # the images on a progress bar; empty: there is none
    # on rank 0: each range, images and features
    observe: Callable[[range, Tensor, list[Tensor]], None] | None = None,
) -> list[Tensor]:
    """One pass over the images for all extractors, shared by the ranks: [total, F] of each on rank
    0, [0, F] on the others. All ranks must call this.
    """
    rows = [[torch.empty(0, extractor.dim)] for extractor in extractors]

    def work(chunk: range) -> tuple[range, Tensor | None, list[Tensor]]:
        images = source(chunk)
        return chunk, images if observe else None, [extractor(images) for extractor in extractors]

    for chunk, images, features in shared_pass(
        total, work, side=side, batch_size=batch_size, what=what
    ):
        for part, new in zip(rows, features, strict=True):
            part.append(new)
        if observe is not None and images is not None:
            observe(chunk, images, features)
    return [torch.cat(part) for part in rows]


@dataclass
class RealFeatures:
    """Features of real images, kept between evaluations by the file's content, the draw, the
    extractor's name and weights.
    """

    batch_size: int = 64
    show: bool = False  # a progress bar
    _sets: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def get(
        self, reader: Dataset, selection: Selection, extractors: Sequence[Extractor]
    ) -> list[Tensor]:
        """The features of `selection` under each extractor. All ranks must call this; rank 0 has
        the features.
        """
        keys = [
            (reader.meta.content_hash, selection.key, each.name, each.source) for each in extractors
        ]
        if missing := {
            key: each for key, each in zip(keys, extractors, strict=True) if key not in self._sets
        }:
            features = feature_sets(
                partial(selection.images, reader),
                list(missing.values()),
                total=len(selection.indices),
                side=reader.spec.side,
                batch_size=self.batch_size,
                what=f"real {selection.key.split()[0]} images" if self.show else "",
            )
            self._sets.update(zip(missing, features, strict=True))
        return [self._sets[key] for key in keys]
