"""Image files of a user's as a trained model takes them, and what a classifier says of them. Where
predict.py's answers go, one by one: a table for people, JSON, CSV, images sorted into a folder a
class, and what is drawn beside them.
"""

import contextlib
import csv
import itertools
import json
import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from duetgan.data.errors import ImageError
from duetgan.data.values import kind, native
from duetgan.inference.inputs import Input, Inputs, Transform
from duetgan.inference.settings import label_of
from duetgan.inference.strips import Counterfactuals
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.grad_cam import default_layer, image_heat, overlay
from duetgan.models.classifier import Classifier
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.files import building, check_writable, write_atomic, writing
from duetgan.utils.images import IMAGE_SUFFIXES, save_captioned, save_image, visible
from duetgan.utils.memory import cores
from duetgan.utils.text import printable

LONGEST = 180  # bytes of a file's name that are kept


class Maps(NamedTuple):
    """Which Grad-CAM images are wanted."""

    files: Iterator[Path]  # where they go, one for each image
    label: int | None  # of the class that is asked for; None: the predicted one
    layer: str


def predict(
    classifier: Classifier,
    checkpoint: dict[str, Any],
    inputs: Iterable[Input],
    *,
    resize: str | None,
    top: int,
    batch_size: int,
    maps: Maps | None = None,
    fast: Classifier | None = None,
) -> Iterator[tuple[Input, dict[str, Any]]]:
    """One answer an image, in order: `file`, `label`, `probabilities` (the `top` ones, largest
    first), or `file`, `error`. No more than two batches are in memory. Where an image may have
    several labels, `labels` lists those that reach their thresholds, the likeliest first, and
    `label` has ";" between them.

    With `maps` also `gradcam`, the image that was written. `fast`: whose probabilities count
    (`models.fast.faster`).
    """
    classes: list[str] = checkpoint["classes"]
    with contextlib.closing(
        read_batches(inputs, Transform.of(checkpoint, resize), batch_size=batch_size)
    ) as batches:
        for batch in batches:
            files = [next(maps.files) if maps else Path() for _ in batch]
            if read := [
                (*row[1:], file)
                for row, file in zip(batch, files, strict=True)
                if row[2] is not None
            ]:
                answers, pixels, files = zip(*read, strict=True)
                images = torch.stack(pixels)
                probabilities = judge_images(fast or classifier, images)
                for answer, row, file in zip(answers, probabilities, files, strict=True):
                    order = row.sort(descending=True, stable=True).indices.tolist()
                    answer["label"] = classes[order[0]]
                    if classifier.thresholds is not None:
                        named = (row >= classifier.thresholds.cpu().double()).tolist()
                        answer["labels"] = [classes[i] for i in order if named[i]]
                        answer["label"] = ";".join(answer["labels"])
                    answer["probabilities"] = {classes[i]: float(row[i]) for i in order[:top]}
                    answer |= {"gradcam": str(file)} if maps else {}
                if maps is not None:
                    save_maps(
                        classifier, classes, images, probabilities, maps._replace(files=iter(files))
                    )
            yield from ((given, answer) for given, answer, _ in batch)


def read_batches(
    inputs: Iterable[Input], transform: Transform, *, batch_size: int
) -> Generator[list[tuple[Input, dict[str, Any], Tensor | None]], None, None]:
    """The images by batches, in order, with the beginning of an answer: None and an `error` where
    one cannot be read.

    A thread for each core decodes. While the caller works on a batch they read the next one, and no
    further.
    """

    def read(given: Input) -> tuple[Input, dict[str, Any], Tensor | None]:
        try:
            return given, {"file": given.name}, transform.read(given.content())
        except ImageError as error:
            return given, {"file": given.name, "error": str(error)}, None

    items, pool = iter(inputs), ThreadPoolExecutor(cores(), "decode")
    try:
        ahead = [pool.submit(read, item) for item in itertools.islice(items, batch_size)]
        while ahead:
            batch = [future.result() for future in ahead]
            ahead = [pool.submit(read, item) for item in itertools.islice(items, batch_size)]
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


def save_maps(
    classifier: Classifier, classes: list[str], images: Tensor, probabilities: Tensor, maps: Maps
) -> None:
    """Write an image beside its Grad-CAM for each of `images`, uint8 [n, C, H, W]."""
    predicted = probabilities.argmax(1)
    asked = predicted if maps.label is None else torch.full_like(predicted, maps.label)
    heats = image_heat(classifier, images, asked, maps.layer)
    for image, heat, row, label, place in zip(
        images, heats, probabilities, asked.tolist(), maps.files, strict=True
    ):
        best = int(row.argmax())
        what = (
            f"evidence for {classes[label]} {row[label]:.3f}"
            if heat.any()
            else f"no evidence for {classes[label]}"
        )
        captions = [f"predicted {classes[best]} {row[best]:.3f}", f"{what}\n{maps.layer}"]
        save_captioned(overlay(visible(image, classifier.spec), heat), captions, place, columns=2)


def output_files(folder: Path, files: Sequence[str], kind: str = "gradcam") -> list[Path]:
    """A PNG in `folder` for each file: its name without suffix and `-KIND`; numbered where that
    would come twice (also where capital letters do not count) or is one of `files`. Raises
    UserError for a folder that cannot be written.
    """
    check_writable(folder)
    taken = {_identity(Path(file)) for file in files}
    paths: list[Path] = []
    for file in files:
        stem = Path(file).stem.replace("\0", "") or "image"
        while len(os.fsencode(stem)) > LONGEST:
            stem = stem[:-1]
        paths.append(unused(folder / f"{stem}-{kind}.png", lambda path: _identity(path) in taken))
        taken.add(_identity(paths[-1]))
    return paths


def unused(path: Path, used: Callable[[Path], bool]) -> Path:
    """`path`, or with -2, -3, ... behind its name: the first that is not used."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([path], numbered) if not used(path))


def _identity(path: Path) -> str:
    return os.path.realpath(path).casefold()


Sink = Callable[[Input, dict[str, Any]], object]  # takes an image and the answer of `predict`


@contextmanager
def json_array(stream: TextIO) -> Iterator[Sink]:
    """An array of the answers, written as they come."""
    before = itertools.chain(["[\n"], itertools.repeat(",\n"))

    def write(_given: Input, answer: dict[str, Any]) -> None:
        text = json.dumps(answer, indent=1, allow_nan=False)
        stream.write(next(before) + textwrap.indent(text, " "))

    yield write
    stream.write("[]\n" if next(before) == "[\n" else "\n]\n")


@contextmanager
def csv_file(path: Path, classes: Sequence[str], top: int | None) -> Iterator[Sink]:
    """A row an image: `file`, `label`, `probability`, and a column a class; with `top` K instead
    `label_2`, `probability_2`, ... up to K. Empty behind `file` where an image cannot be read.
    Raises UserError as `building`.
    """
    places = range(2, (top or 0) + 1)
    more = (
        [f"{name}_{place}" for place in places for name in ("label", "probability")]
        if top
        else classes
    )
    with _rows(path, ["file", "label", "probability", *more]) as add:

        def write(given: Input, answer: dict[str, Any]) -> None:
            shares: dict[str, float] = answer.get("probabilities", {})
            pairs = list(itertools.chain(*shares.items()))
            row = (
                pairs
                if top
                else [*pairs[:2], *(shares[name] for name in classes if name in shares)]
            )
            row[:1] = [answer["label"]] if row else []
            add([given.name, *row, *[""] * (2 + len(more) - len(row))])

        yield write


@contextmanager
def _rows(path: Path, head: Sequence[str]) -> Iterator[Callable[[Sequence[object]], object]]:
    with (
        building(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(head)
        yield writer.writerow


def sorter(folder: Path) -> Sink:
    """Puts each image into `folder`/CLASS: a link to its file, or a file where it lies in an
    archive. Raises UserError where the disk refuses.
    """
    check_writable(folder)

    def taken(path: Path) -> bool:
        return any(os.path.lexists(f"{path}{suffix}") for suffix in IMAGE_SUFFIXES)

    def write(given: Input, answer: dict[str, Any]) -> None:
        if "error" in answer:
            return
        path = Path(given.name)
        label = answer["label"].replace(os.sep, "_").replace("\0", "")
        # a checkpoint's word: it must not lead out of the folder
        label = label if label.strip(".") else f"_{label}"
        place = folder / label / path.name.replace(":", "_")
        if path.is_file():
            target = path.resolve()
            link = unused(place, lambda each: os.path.lexists(each) and each.resolve() != target)
            with writing(place):
                if not link.is_symlink():  # from an earlier run
                    link.symlink_to(target)
            return
        content = given.content()
        if isinstance(content, bytes):
            write_atomic(unused(place, os.path.lexists), content)
        else:
            values = native(content)
            save_image(values.pixels, kind(values), unused(place.with_suffix(""), taken), {})

    return write


def open_sinks(options: Namespace, classes: list[str], stack: ExitStack) -> Iterator[Sink]:
    """Where the answers go."""
    if options.json:
        yield stack.enter_context(json_array(sys.stdout))
    elif not (options.csv or options.sort_into):
        yield lambda _, answer: print(line(answer))
    if options.csv:
        yield stack.enter_context(csv_file(options.csv, classes, options.top))
    if options.errors:
        add = stack.enter_context(_rows(options.errors, ["file", "error"]))
        yield (
            lambda given, answer: add([given.name, answer["error"]]) if "error" in answer else None
        )
    if options.sort_into:
        yield sorter(options.sort_into)


def line(result: dict[str, Any]) -> str:
    """A result as text."""
    if "error" in result:
        return printable(f"{result['file']}: {result['error']}")
    text = ", ".join(f"{name} {share:.3f}" for name, share in result["probabilities"].items())
    text = f"{result['label'] or 'no label'} ({text})" if "labels" in result else text
    text = f"{result['file']}: {text}" + (f" ({result['gradcam']})" if "gradcam" in result else "")
    strip = result.get("counterfactual")
    if strip and "error" in strip:
        text += f"; no counterfactual: {strip['error']}"
    elif strip:
        where = "" if strip["arrived"] else "never there, at best "
        text += f"; {where}{strip['class']} {strip['probability']:.3f}"
        text += f", pixels change by {strip['pixel_change']:.3f} ({strip['image']})"
    return printable(text)


# --- what is drawn beside the answers


def asked(
    options: Namespace, kind: str, other: str, inputs: Inputs, classes: list[str]
) -> tuple[list[Path], int | None] | None:
    """What `--KIND DIR` and `--KIND-class` ask for: each image's file, and the class; `other`: its
    further option.

    Raises UserError for an unknown class, options without DIR, and a folder that cannot be written.
    """
    folder, name = getattr(options, kind), getattr(options, f"{kind}_class")
    if folder is None:
        if name is not None or getattr(options, other) is not None:
            raise UserError(
                f"--{kind}-class and --{other.replace('_', '-')} belong to --{kind} DIR; add it"
            )
        return None
    label = None if name is None else label_of(name, classes, f"--{kind}-class")
    return output_files(folder, list(inputs.names()), kind), label


def gradcam(
    options: Namespace, inputs: Inputs, classes: list[str], classifier: Classifier
) -> Maps | None:
    """What `--gradcam` asks for. Raises UserError as `asked`."""
    if not (found := asked(options, "gradcam", "gradcam_layer", inputs, classes)):
        return None
    return Maps(iter(found[0]), found[1], options.gradcam_layer or default_layer(classifier))


def counterfactuals(
    options: Namespace, inputs: Inputs, classes: list[str], classifier: Classifier
) -> Counterfactuals | None:
    """What `--counterfactual` asks for. Raises UserError as `asked`, and for a generator that does
    not fit.
    """
    refuse(
        (
            options.counterfactual and options.generator is None,
            "--counterfactual draws with a generator of the same classes; add --generator RUN",
        ),
        (
            options.counterfactual and classifier.thresholds is not None,
            "--counterfactual is for one label an image; leave it out",
        ),
        (
            options.counterfactual and not inputs.are_files,
            "--counterfactual is for image files and folders; unpack the images first",
        ),
    )
    if not (found := asked(options, "counterfactual", "generator", inputs, classes)):
        return None
    files = dict(zip(inputs.names(), found[0], strict=True))
    return Counterfactuals(
        options.generator,
        classifier,
        classes,
        files,
        target=found[1],
        steps=options.steps,
        batch_size=options.batch_size,
    )
