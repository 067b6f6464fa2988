"""Edits: a sample on its way from the class that a classifier gives it to another one."""

from typing import Any, cast

import torch

from explorer.drawing import AT_ONCE, Source, address
from explorer.runs import Shown
from inference.editing import Editor, pair_of
from inference.samples import Sampler
from models.classifier import Classifier
from models.gan import ImageGenerator
from utils.classes import require_same_classes

STEPS = torch.linspace(-2, 4, 25)  # in units of the samples' spread; 0 is among them


class Editors:
    """An editor for each generator and classifier that were asked for; the directions that it has found are kept."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Editor] = {}

    def edit(self, shown: Shown, classifier: Shown, source: Source, target: str) -> dict[str, Any]:
        """The sample at each of STEPS towards the class `target`: `source` and `target`, the classes, `space`, and
        `frames` with `step`, `address` and the probabilities `from` and `to` of the two classes.

        The first time takes seconds. Raises UserError for an unknown class, and where there is no way.
        """
        editor = self._editor(shown, classifier)
        start = editor.start(source.sampler(shown), [0])
        named = int(editor.probabilities(editor.images(start))[0].argmax()) if source.label is None else source.label
        first, last = pair_of(editor.names, editor.names[named], target)
        direction = editor.direction(first, last)
        images = editor.images(start.take([0] * len(STEPS)), direction, STEPS)
        shares = editor.probabilities(images)[:, [first, last]].tolist()
        frames = [
            {"step": step, "address": address(image), "from": share[0], "to": share[1]}
            for step, image, share in zip(STEPS.tolist(), images, shares, strict=True)
        ]
        return {"source": editor.names[first], "target": target, "space": editor.space, "frames": frames}

    def _editor(self, shown: Shown, classifier: Shown) -> Editor:
        pair = shown.name, classifier.name
        if pair not in self._made:
            generator, judge = cast(ImageGenerator, shown.model), cast(Classifier, classifier.model)
            names = classifier.checkpoint["classes"]
            if generator.classes:
                require_same_classes("the generator", shown.classes, f"the classifier {classifier.name}", names)
            sampler = Sampler(generator=generator, chosen=range(generator.classes), batch_size=AT_ONCE)
            self._made[pair] = Editor(sampler, judge, names)
        return self._made[pair]
