"""The runs that the explorer shows, two of them side by side, and what their models are asked for.
A generator: samples, mixtures, walks, edits, and its nearest image to a given one; a classifier: an
image's classes, the evidence, and the training images that spoke for it.
"""

import base64
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duetgan.data.images import encode
from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.inference.editing import Editor, pair_of
from duetgan.inference.influence import checkpoint_files
from duetgan.inference.influence_scores import (
    Part,
    check_data,
    images_of,
    influence,
    most,
    passes,
    snapshot,
)
from duetgan.inference.inputs import Transform
from duetgan.inference.interpolate import Journey
from duetgan.inference.projection import find
from duetgan.inference.samples import (
    Sampler,
    Start,
    mixed,
    synthesize,
    truncated_styles,
    with_styles,
)
from duetgan.inference.settings import ProjectionConfig
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.features.precision import device_of
from duetgan.metrics.grad_cam import default_layer, image_heat, overlay
from duetgan.metrics.lineage import data_of
from duetgan.models.gan import TruncationMean
from duetgan.models.restore import classifier_from, generator_from, read
from duetgan.reporting import figures
from duetgan.reporting.compare import shared_charts
from duetgan.reporting.report import render
from duetgan.reporting.run_files import Run
from duetgan.utils.checkpoint import resolve_for_people
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import visible
from duetgan.utils.runlog.run_folder import runs_folder


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """One model and the run folder that it came from."""

    name: str
    path: Path  # as it was named: a run folder or a checkpoint
    checkpoint: dict[str, Any]  # without its state
    model: Any  # ImageGenerator or Classifier, by its task

    @property
    def task(self) -> str:
        """gan or classifier."""
        return self.checkpoint["task"]

    @property
    def classes(self) -> list[str]:
        """The names of the classes; none where a generator is unconditional."""
        return self.checkpoint["classes"] if self.model.classes else []

    def files(self) -> Run:
        """What the run folder holds now: one that is still training has more later. Empty for a
        checkpoint file.
        """
        return Run(self.path)

    def facts(self) -> dict[str, Any]:
        """What the page is told."""
        return {
            "name": self.name,
            "task": self.task,
            "step": self.checkpoint["step"],
            "classes": self.classes,
            "resolution": self.model.spec.side,
            "layers": self.model.num_ws if getattr(self.model, "has_styles", False) else 0,
            "steps": [int(path.stem.removeprefix("step-")) for path in self.files().samples],
        }


def open_runs(named: Sequence[str], *, which: str, device: torch.device) -> list[Shown]:
    """Load the models, GANs first; a folder that is no run stands for the runs in it, and no name
    for the quickstart's.
    Raises UserError for what holds no checkpoint.
    """
    quickstart = runs_folder() / "quickstart"
    paths = [
        *{
            run.resolve(): run
            for name in named or [str(quickstart)]
            for run in _runs_in(Path(name))
        }.values()
    ]
    if not named and not quickstart.is_dir():
        raise UserError(
            f"there is no {quickstart}; name a run with --checkpoint RUN, or run quickstart.py first"
        )
    opened = [
        _open(path, name, which, device)
        for path, name in zip(paths, _told_apart(paths), strict=True)
    ]
    return sorted(opened, key=lambda shown: shown.task != "gan")


def _told_apart(paths: Sequence[Path]) -> list[str]:
    """A name for each: its last part, with as many before it as are needed where others end so,
    too.
    """
    parts = [path.resolve().parts for path in paths]
    ends = [
        ["/".join(part[-length:]) for part in parts]
        for length in range(1, max(map(len, parts), default=0) + 1)
    ]
    return [
        next((each[place] for each in ends if each.count(each[place]) == 1), "")
        for place in range(len(paths))
    ]


def _runs_in(path: Path) -> list[Path]:
    """A run or a file itself; of another folder the runs in it, e.g. a quickstart's `gan` and
    `classifier`.
    """
    inside = sorted(file.parent.parent for file in path.glob("*/checkpoints/last.json"))
    return inside if inside and not (path / "checkpoints").is_dir() else [path]


def _open(path: Path, name: str, which: str, device: torch.device) -> Shown:
    checkpoint = read(resolve_for_people(path, which))
    task = checkpoint["task"]
    if task not in ("gan", "classifier"):
        raise UserError(f"{path}: is of task {task!r}; the explorer shows GANs and classifiers")
    model = (generator_from if task == "gan" else classifier_from)(checkpoint, device)
    del checkpoint["state"]  # the largest part, and no longer needed
    return Shown(name=name, path=path, checkpoint=checkpoint, model=model)


def compare_page(a: Shown, b: Shown) -> str:
    """The HTML of two runs side by side, whatever they are: their figures in a table, their curves
    in the same charts. Whether a difference is more than chance `duet compare` says.
    """
    names, runs = (a.name, b.name), (a.files(), b.files())
    pairs = dict(zip(names, runs, strict=True))
    notes = [f"{name}: {note}" for name, run in pairs.items() for note in run.notes]
    # how sure is another for each run
    found = [[*figures.results(run), *figures.headline(run)] for run in runs]
    results = [{what: value + how for value, what, how in each} for each in found]
    # how far and how fast
    progress = [{what: value for value, what in figures.progress(run)} for run in runs]
    both = (results, progress)
    rows = [
        (what, left.get(what, "-"), right.get(what, "-"))
        for left, right in both
        for what in left | right
    ]
    return render(
        "side_by_side.html.j2",
        names=names,
        rows=rows,
        charts_of_both=shared_charts(pairs),
        notes=notes,
    )


CLASSES = 5  # the most likely ones, which are told
SPOKE = 8  # training images
MOST_KEPT = 500_000  # training images times checkpoints: about a gigabyte
FRAMES = 24  # of a walk, without its end
AT_ONCE = 8  # images in a batch
SEARCH = ProjectionConfig(steps=150)  # in w, and then in w+
STEPS = torch.linspace(-2, 4, 25)  # of an edit, in units of the samples' spread; 0 is among them
LOSSLESS = 128  # px a side up to which images are sent as PNG


@dataclass(frozen=True)
class Source:
    """A sample: what `generate.py grid --seed SEED --classes CLASS --n 1 --truncation-psi PSI
    --truncation-mean MEAN` draws.
    """

    seed: int
    label: int | None = None  # None: unconditional
    psi: float = 1.0
    mean: TruncationMean = "class"  # towards which it is truncated

    def sampler(self, shown: Shown) -> Sampler:
        """Its number 0 is this sample."""
        chosen = () if self.label is None else (self.label,)
        return Sampler(
            generator=shown.model,
            chosen=chosen,
            seed=self.seed,
            truncation_psi=self.psi,
            truncation_mean=self.mean,
            batch_size=AT_ONCE,
        )


def address(image: Tensor, spec: ImageSpec | None = None) -> str:
    """The `data:` address of an image [C, H, W]; `spec`: see `visible`."""
    image = visible(image, spec)
    kind = "png" if image.shape[-1] <= LOSSLESS else "jpeg"
    content = encode(image.permute(1, 2, 0).contiguous().numpy(), kind)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def draw(shown: Shown, sources: Sequence[Source]) -> dict[str, Any]:
    """The `images`: each sample's seed and address."""
    samples = [(source.seed, source.sampler(shown).images([0])[0]) for source in sources]
    return {
        "images": [
            {"seed": seed, "address": address(image, shown.model.spec)} for seed, image in samples
        ]
    }


def mix(shown: Shown, pair: tuple[Source, Source], layers: Sequence[int]) -> dict[str, Any]:
    """The addresses of `a`, `b`, and `mixed`: A with B's styles and noise at `layers`."""
    with_styles(shown.model, "style mixing")
    samplers = [source.sampler(shown) for source in pair]
    of_a, of_b = (truncated_styles(sampler, [0]) for sampler in samplers)
    images = [synthesize(samplers[0], how)[0] for how in (of_a, of_b, mixed(of_a, of_b, 0, layers))]
    return {
        name: address(image, shown.model.spec)
        for name, image in zip(("a", "b", "mixed"), images, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class _Pair(Sampler):
    """Number 0 is this sampler's, number 1 another's."""

    other: Sampler

    def latents(self, numbers: Sequence[int]) -> Start:
        own = super().latents([0])
        both = Start.join([own, self.other.latents([0])])
        return replace(both.take(numbers), noise=own.noise)  # a walk keeps the noise of its start


def walk(shown: Shown, pair: tuple[Source, Source]) -> dict[str, Any]:
    """The `frames`, FRAMES + 1 addresses from A to B: straight in w, or along a great circle in z
    if there is no w.
    """
    a, b = (source.sampler(shown) for source in pair)
    journey = Journey(_Pair(**vars(a), other=b), keyframes=2, frames=FRAMES)
    frames = [
        torch.from_numpy(frame.transpose(2, 0, 1))
        for frame in itertools.islice(journey, FRAMES + 1)
    ]
    return {"frames": list(map(address, frames))}


def nearest(shown: Shown, content: bytes, tick: Callable[[], object]) -> dict[str, Any]:
    """The generator's nearest images to that in `content`: `target`, and `found`: name, words,
    address. Raises ImageError for what is no image, UserError for a generator without w.
    """
    target = Transform.of(shown.checkpoint).read(content)[None]
    sampler = Sampler(generator=shown.model, chosen=range(shown.model.classes), noise_mode="const")
    result = find(sampler, target, SEARCH, tick=tick)
    words = {"w": "one style for all layers", "w+": "a style for each layer"}
    found = [
        {
            "name": name,
            "words": f"{words[name]}: {', '.join(near.distances)}",
            "address": address(near.image),
        }
        for name, near in result.spaces.items()
    ]
    label = None if result.label is None else shown.classes[result.label]
    return {"target": address(target[0]), "class": label, "found": found}


def edit(shown: Shown, source: Source, towards: tuple[Shown, str]) -> dict[str, Any]:
    """The sample at each of STEPS `towards` a class of a classifier's: `source` and `target`, the
    classes, `space`, and `frames` with `step`, `address` and the probabilities `from` and `to` of
    the two classes.

    The first time takes seconds. Raises UserError where there is no way.
    """
    classifier, target = towards
    editor = editor_of(shown, classifier)
    start = editor.start(source.sampler(shown), [0])
    named = (
        int(editor.probabilities(editor.images(start))[0].argmax())
        if source.label is None
        else source.label
    )
    first, last = pair_of(editor.names, editor.names[named], target)
    images = editor.images(start.take([0] * len(STEPS)), editor.direction(first, last), STEPS)
    shares = editor.probabilities(images)[:, [first, last]].tolist()
    frames = [
        {"step": step, "address": address(image), "from": share[0], "to": share[1]}
        for step, image, share in zip(STEPS.tolist(), images, shares, strict=True)
    ]
    return {
        "source": editor.names[first],
        "target": target,
        "space": editor.space,
        "frames": frames,
    }


@cache
def editor_of(shown: Shown, classifier: Shown) -> Editor:
    """An editor of a generator by a classifier; it keeps the directions that it has found."""
    names = classifier.checkpoint["classes"]
    if shown.classes:
        require_same_classes(
            "the generator", shown.classes, f"the classifier {classifier.name}", names
        )
    sampler = Sampler(generator=shown.model, chosen=range(shown.model.classes), batch_size=AT_ONCE)
    return Editor(sampler, classifier.model, names)


def name(shown: Shown, content: bytes) -> dict[str, Any]:
    """The likely classes of the image in `content`, largest first, and the evidence for the first
    (Grad-CAM). Raises ImageError for what is no image.
    """
    classifier, image = shown.model, Transform.of(shown.checkpoint).read(content)
    row = judge_images(classifier, image[None])[0]
    order = row.sort(descending=True, stable=True).indices[:CLASSES].tolist()
    layer = default_layer(classifier)
    heat = image_heat(classifier, image[None], torch.tensor(order[:1]), layer)[0]
    seen, evidence = overlay(visible(image, classifier.spec), heat)
    return {
        "classes": [
            {"name": shown.classes[label], "probability": float(row[label])} for label in order
        ],
        "image": address(seen),
        "evidence": address(evidence),
        "layer": layer if heat.any() else "",
    }


def spoke_for(shown: Shown, content: bytes, data: str | None = None) -> dict[str, Any]:
    """The training images that spoke most for the class that the image is given, by TracInCP over
    the run's checkpoints. `data`: these images in place of those that the config names.

    Raises ImageError for what is no image, UserError where the training images are not there or
    have other classes.
    """
    image = Transform.of(shown.checkpoint).read(content)
    label = int(judge_images(shown.model, image[None])[0].argmax())
    files, path = (
        tuple(checkpoint_files(str(shown.path))),
        data or data_of(shown.checkpoint, "path"),
    )
    if not isinstance(path, str):
        raise UserError(
            f"{shown.name}: its config names no file of training images; start with --data X.lmdb"
        )
    with dataset_for_model(path, shown.checkpoint) as reader:
        check_data(reader, shown.checkpoint, path)
        few = len(reader) * len(files) <= MOST_KEPT
        parts = _kept(shown, files, path) if few else _parts(shown, files, reader)
        scores = influence(parts, len(reader), image, label)
        rows = most(scores, SPOKE)
        found = [
            {
                "record": row,
                "class": reader.classes[reader.labels()[row]],
                "score": float(scores[row]),
            }
            | {"address": address(picture, reader.spec)}
            for row, picture in zip(rows, images_of(reader, rows), strict=True)
        ]
    return {"class": shown.classes[label], "found": found}


def _parts(shown: Shown, files: Sequence[Path], reader: Dataset) -> Iterator[Part]:
    return passes([snapshot(file, device_of(shown.model)) for file in files], reader)


@lru_cache(1)  # of the last run that was asked for
def _kept(shown: Shown, files: Sequence[Path], path: str) -> list[Part]:
    with dataset_for_model(path, shown.checkpoint) as reader:
        return list(_parts(shown, files, reader))
