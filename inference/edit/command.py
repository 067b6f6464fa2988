"""What `generate.py edit` and `predict.py --counterfactual` open and write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import ImageError
from inference.edit.editor import Editor
from inference.edit.strips import counterfactual, save_strips
from inference.predictions import read_image
from inference.samples import Sampler, with_styles
from inference.settings import EditConfig, ProjectionConfig
from metrics.judge import load_judge
from metrics.precision import device_of
from models.classifier import Classifier
from models.restore import classifier_from, generator_from
from utils.checkpoint import Checkpoint, load, resolve_for_people
from utils.classes import require_same_classes
from utils.config.cli import did_you_mean
from utils.errors import UserError

COLUMNS = 7  # images of a strip, without the one that is given


def open_editor(sampler: Sampler, checkpoint: Checkpoint, run: str, config: EditConfig) -> Editor:
    """The editor of a generator's images by a classifier, its checkpoint in the folder or file `run`.

    Raises UserError where a conditional generator has other classes.
    """
    known = load(resolve_for_people(run))
    if sampler.generator.classes:
        require_same_classes("the generator", checkpoint["classes"], f"the classifier {run}", known["classes"])
    return Editor(sampler, classifier_from(known, sampler.device), known["classes"], config)


def open_judge(run: str | None, editor: Editor, checkpoint: Checkpoint, guide: str) -> Classifier | None:
    """The classifier that judges edits of a generator, which `guide` took part in. UserError if it is not fit."""
    if run is None:
        return None
    return load_judge(run, checkpoint, editor.names, editor.device, None, option="--judge", guide=guide)


def pair_of(names: Sequence[str], source: str, target: str) -> tuple[int, int]:
    """The labels of two classes. Raises UserError for an unknown one, and where they are the same."""
    for name in (source, target):
        if name not in names:
            raise UserError(f"no class {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}")
    if source == target:
        raise UserError(f"from {source} to {target} is no way; name two classes")
    return names.index(source), names.index(target)


@dataclass(frozen=True)
class Counterfactuals:
    """What would have to change for given images to be of another class; files and images are read one by one."""

    editor: Editor
    checkpoint: Checkpoint  # the generator's
    files: Mapping[str, Path]  # where each image's strip goes
    target: int | None = None  # the class asked for; None: the most probable one but the first
    steps: int = ProjectionConfig().steps

    def draw(self, file: str, label: str, *, resize: str | None) -> dict[str, Any]:
        """Write the strip of an image that is named `label`; returns `class`, `image`, `arrived`, `probability`, `step`
        and `pixel_change`, or `class` and `error`.
        """
        names = self.editor.names
        source, target = names.index(label), self.target
        try:
            image = read_image(file, self.checkpoint, resize=resize)[None]
            if target is None:
                shares = self.editor.probabilities(image)[0]
                shares[source] = -1
                target = int(shares.argmax())
            if source == target:
                raise UserError(f"is named {label} as it is")
            config = ProjectionConfig(steps=self.steps)
            strip, _ = counterfactual(self.editor, image, source, target, config, columns=COLUMNS)
        except (ImageError, UserError) as error:
            return {"class": None if target is None else names[target], "error": str(error)}
        save_strips([strip], self.files[file])
        return {
            "class": names[target],
            "image": str(self.files[file]),
            "arrived": strip.arrived,
            "probability": strip.probability,
            "step": strip.step,
            "pixel_change": strip.change,
        }


def open_counterfactuals(
    generator: str,  # folder or file of a GAN
    classifier: Classifier,
    names: Sequence[str],  # of its classes
    files: Mapping[str, Path],
    *,
    target: int | None = None,
    steps: int = ProjectionConfig().steps,
    batch_size: int = 64,
) -> Counterfactuals:
    """Strips of given images by a classifier and a generator. Raises UserError where they do not fit each other."""
    checkpoint = load(resolve_for_people(generator))
    model = generator_from(checkpoint, device_of(classifier))
    with_styles(model, "--counterfactual")
    if model.classes:
        require_same_classes(f"the generator {generator}", checkpoint["classes"], "the classifier", names)
    chosen = list(range(model.classes))
    sampler = Sampler(generator=model, chosen=chosen, noise_mode="const", batch_size=batch_size)
    return Counterfactuals(Editor(sampler, classifier, names), checkpoint, files, target, steps)
