"""Load the runs that the explorer shows, and compute its answers with their models."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duetgan.data.images import encode
from duetgan.inference.inputs import Transform
from duetgan.inference.samples import Sampler, truncated_styles
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.grad_cam import default_layer, image_heat, overlay
from duetgan.models.restore import classifier_from, generator_from, read
from duetgan.utils.checkpoint import Checkpoint, resolve
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import visible
from duetgan.utils.runlog.run_folder import runs_folder

if TYPE_CHECKING:  # each extra can be deleted, so functions import others
    from duetgan.extras.editing.editor import Editor

Document = dict[str, Any]  # a JSON object


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedRun:
    """A run with its model, which was loaded from a run folder or a checkpoint."""

    path: Path  # the run folder or checkpoint that the user named
    checkpoint: Checkpoint  # content of the checkpoint without `state`
    model: Any  # ImageGenerator for the task gan, Classifier for the task classifier

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def task(self) -> str:
        """The task of the run: "gan" or "classifier"."""
        return self.checkpoint["task"]

    @property
    def classes(self) -> list[str]:
        """The names of the classes; empty for an unconditional generator."""
        return self.checkpoint["classes"] if self.model.classes else []

    def facts(self) -> Document:
        """Return the JSON object that describes the run to the page."""
        return {
            "name": self.name,
            "task": self.task,
            "step": self.checkpoint["step"],
            "classes": self.classes,
            "resolution": self.model.spec.side,
            "styles": getattr(self.model, "has_styles", False),
        }


def open_runs(names: Sequence[str], *, which: str, device: torch.device) -> list[LoadedRun]:
    """Load runs and return them, GANs first.

    Args:
        names: Run folders, checkpoints, or folders of runs. If empty, the quickstart's runs.
        which: The checkpoint to take from a run folder, "last" or "best".

    Raises UserError for a name without a checkpoint, or if the quickstart's runs are missing.
    """
    quickstart = runs_folder() / "quickstart"
    if not names and not quickstart.is_dir():
        raise UserError(
            f"there is no {quickstart}; name a run with --checkpoint RUN, or run quickstart.py first"
        )
    by_location: dict[Path, Path] = {}  # a run that is named twice is loaded once
    for name in names or [str(quickstart)]:
        for path in _runs_in(Path(name)):
            by_location[path.resolve()] = path
    runs = [_open(path, which, device) for path in by_location.values()]
    return sorted(runs, key=lambda run: run.task != "gan")


def _runs_in(path: Path) -> list[Path]:
    """List the run folders directly inside a folder, such as a quickstart's `gan` and `classifier`.

    If there are none, or if `path` is a run folder itself, the list contains only `path`.
    """
    runs = sorted(file.parent.parent for file in path.glob("*/checkpoints/last.json"))
    return runs if runs and not (path / "checkpoints").is_dir() else [path]


def _open(path: Path, which: str, device: torch.device) -> LoadedRun:
    checkpoint = read(resolve(path, which))
    task = checkpoint["task"]
    if task not in ("gan", "classifier"):
        raise UserError(f"{path}: is of task {task!r}; the explorer shows GANs and classifiers")
    model = (generator_from if task == "gan" else classifier_from)(checkpoint, device)
    del checkpoint["state"]  # frees the memory of the optimizers
    return LoadedRun(path=path, checkpoint=checkpoint, model=model)


CLASSES = 5  # most probable classes that the page lists
BATCH = 8  # samples that are drawn at once
STEPS = torch.linspace(-2, 4, 25)  # steps of an edit, in units of the samples' spread
LOSSLESS = 128  # largest side in px of images that are sent as PNG, not JPEG


@dataclass(frozen=True)
class Source:
    """The description of a sample by its seed, label and truncation psi.

    `generate.py grid --seed SEED --classes CLASS --n 1 --truncation-psi PSI` draws the same sample.
    """

    seed: int
    label: int | None  # None: unconditional
    psi: float = 1.0

    def sampler(self, run: LoadedRun) -> Sampler:
        """Return a sampler whose sample 0 is the described sample."""
        chosen = () if self.label is None else (self.label,)
        return Sampler(
            generator=run.model,
            chosen=chosen,
            seed=self.seed,
            truncation_psi=self.psi,
            batch_size=BATCH,
        )


def address(image: Tensor, spec: ImageSpec | None = None) -> str:
    """Encode an image [C, H, W] of the format `spec` (None: uint8) as a `data:` URL."""
    image = visible(image, spec)
    kind = "png" if image.shape[-1] <= LOSSLESS else "jpeg"
    content = encode(image.permute(1, 2, 0).contiguous().numpy(), kind)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def draw(run: LoadedRun, sources: Sequence[Source]) -> Document:
    """Draw samples.

    Returns a dict with `images`, a list of dicts with `seed` and `address` (the image as a `data:`
    URL).
    """
    images = []
    for source in sources:
        image = source.sampler(run).images([0])[0]
        images.append({"seed": source.seed, "address": address(image, run.model.spec)})
    return {"images": images}


def edit(run: LoadedRun, source: Source, target: tuple[LoadedRun, str]) -> Document:
    """Edit a sample towards another class, once for each of STEPS.

    The first call for two classes takes seconds, later calls are faster.

    Args:
        source: The sample to edit.
        target: A classifier, and the name of the class to move to.

    Returns:
        A dict with the class names `source` and `target`, and with `frames`, a list of dicts. A
        frame has its `step`, its `address` (the image as a `data:` URL), and the probabilities
        `from` and `to` of the two classes.

    Raises UserError if no direction in the latent space leads from one class to the other.
    """
    from duetgan.extras.editing.editor import pair_of

    classifier, target_class = target
    editor = editor_of(run, classifier)
    start = truncated_styles(source.sampler(run), [0])
    label = source.label
    if label is None:
        label = int(editor.probabilities(editor.images(start))[0].argmax())
    first, last = pair_of(editor.names, editor.names[label], target_class)
    images = editor.images(start.take([0] * len(STEPS)), editor.direction(first, last), STEPS)
    probabilities = editor.probabilities(images)[:, [first, last]].tolist()
    frames = []
    for step, image, (p_first, p_last) in zip(STEPS.tolist(), images, probabilities, strict=True):
        frames.append({"step": step, "address": address(image), "from": p_first, "to": p_last})
    return {
        "source": editor.names[first],
        "target": target_class,
        "frames": frames,
    }


@cache
def editor_of(run: LoadedRun, classifier: LoadedRun) -> "Editor":
    """Return an editor that moves samples of the generator `run` between classes of a classifier.

    Editors and the directions that they have computed are cached. Raises UserError if the generator
    has other classes than the classifier.
    """
    from duetgan.extras.editing.editor import Editor

    names = classifier.checkpoint["classes"]
    if run.classes:
        require_same_classes(
            "the generator", run.classes, f"the classifier {classifier.name}", names
        )
    sampler = Sampler(generator=run.model, chosen=range(run.model.classes), batch_size=BATCH)
    return Editor(sampler, classifier.model, names)


def classify(run: LoadedRun, content: bytes) -> Document:
    """Classify the image file `content`.

    Returns a dict with:

    - `classes`, the most probable classes, each with `name` and `probability`, largest first;
    - `image`, the image as the classifier sees it, as a `data:` URL;
    - `evidence`, the same image with a heat map for the first class (Grad-CAM);
    - `layer`, the layer from which the heat map is computed, or "" if the map is zero everywhere.

    Raises ImageError if `content` is no image.
    """
    classifier, image = run.model, Transform.of(run.checkpoint).read(content)
    probabilities = judge_images(classifier, image[None])[0]
    order = probabilities.sort(descending=True, stable=True).indices[:CLASSES].tolist()
    layer = default_layer(classifier)
    heat = image_heat(classifier, image[None], torch.tensor(order[:1]), layer)[0]
    enlarged, evidence = overlay(visible(image, classifier.spec), heat)
    classes = []
    for label in order:
        classes.append({"name": run.classes[label], "probability": float(probabilities[label])})
    return {
        "classes": classes,
        "image": address(enlarged),
        "evidence": address(evidence),
        "layer": layer if heat.any() else "",
    }
