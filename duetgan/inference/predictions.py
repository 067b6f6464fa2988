"""Predict the classes of a user's images, and write the outputs of predict.py.

The outputs are lines of text, JSON, CSV, images sorted into a folder for each class, and Grad-CAM
maps.
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
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from duetgan.data.errors import ImageError
from duetgan.data.images.values import kind, native
from duetgan.inference.additions import ADDITIONS, Answer
from duetgan.inference.inputs import Input, Inputs, Transform
from duetgan.inference.settings import label_of
from duetgan.metrics.evaluate_gan import judge_images
from duetgan.metrics.grad_cam import default_layer, image_heat, overlay
from duetgan.models.classifier import Classifier
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.errors import UserError
from duetgan.utils.files import building, check_writable, write_atomic, writing
from duetgan.utils.images import IMAGE_SUFFIXES, save_captioned, save_image, visible
from duetgan.utils.machine import cores
from duetgan.utils.text import printable

LONGEST = 180  # bytes of an output file's stem; longer stems are cut


class Maps(NamedTuple):
    """The files and the settings of the Grad-CAM maps that predict.py writes."""

    files: Iterator[Path]  # the path of each image's map, in order
    label: int | None  # the class to explain; None: each image's predicted class
    layer: str


class Decoded(NamedTuple):
    """An image after an attempt to read it."""

    item: Input
    answer: Answer  # `file`, and `error` if the image cannot be read
    pixels: Tensor | None  # [C, H, W] of `Transform.read`; None if the image cannot be read


def predict(
    classifier: Classifier,
    checkpoint: Checkpoint,
    inputs: Iterable[Input],
    *,
    resize: str | None,
    top: int,
    batch_size: int,
    maps: Maps | None,
    fast: Classifier | None,  # predicts instead of `classifier` (`models.fast.faster`)
) -> Iterator[tuple[Input, Answer]]:
    """Yield (image, prediction) for each image, in order, with at most two batches in memory.

    A prediction is a dict. If the image cannot be read, it has only `file` and `error`. Otherwise,
    it has `file`; `label`, the most probable class; and `probabilities`, a dict with the `top` most
    probable classes, the largest probability first. If the classifier is multi-label, `labels`
    lists the labels that reach their thresholds, and `label` joins them with ";". If `maps` is not
    None, a Grad-CAM map is written for each image, and `gradcam` is its path. `resize` is as in
    `Transform.of`.
    """
    classes: list[str] = checkpoint["classes"]
    transform = Transform.of(checkpoint, resize)
    with contextlib.closing(read_batches(inputs, transform, batch_size=batch_size)) as batches:
        for batch in batches:
            pixels = {n: image for n, (*_, image) in enumerate(batch) if image is not None}
            files = list(itertools.islice(maps.files, len(batch))) if maps else []
            if pixels:
                images = torch.stack([*pixels.values()])
                probabilities = judge_images(fast or classifier, images)
                for number, row in zip(pixels, probabilities, strict=True):
                    batch[number].answer.update(_answer(classifier, classes, row, top))
                if maps is not None:
                    readable_files = [files[number] for number in pixels]
                    save_maps(classifier, classes, images, probabilities, maps, readable_files)
                    for number in pixels:
                        batch[number].answer["gradcam"] = str(files[number])
            for item, answer, _ in batch:
                yield item, answer


def _answer(classifier: Classifier, classes: list[str], probabilities: Tensor, top: int) -> Answer:
    order = probabilities.sort(descending=True, stable=True).indices.tolist()
    answer: Answer = {"label": classes[order[0]]}
    if classifier.thresholds is not None:
        has_label = (probabilities >= classifier.thresholds.cpu().double()).tolist()
        answer["labels"] = [classes[i] for i in order if has_label[i]]
        answer["label"] = ";".join(answer["labels"])
    answer["probabilities"] = {classes[i]: float(probabilities[i]) for i in order[:top]}
    return answer


def read_batches(
    inputs: Iterable[Input], transform: Transform, *, batch_size: int
) -> Generator[list[Decoded], None, None]:
    """Decode the images and yield them in batches, in order.

    Threads, one for each core, decode the next batch while the caller works on the current one.
    """

    def read(item: Input) -> Decoded:
        try:
            return Decoded(item, {"file": item.name}, transform.read(item.content()))
        except ImageError as error:
            return Decoded(item, {"file": item.name, "error": str(error)}, None)

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
    classifier: Classifier,
    classes: list[str],
    images: Tensor,
    probabilities: Tensor,
    maps: Maps,
    files: Sequence[Path],
) -> None:
    """Write a PNG file for each of `images` [n, C, H, W]: the image next to its Grad-CAM map.

    `files` are the paths of the PNG files. `probabilities` [n, K] are the predictions, and
    `classes` the class names. The heat is that of the class `maps.label` at the layer `maps.layer`.
    """
    predicted = probabilities.argmax(1)
    labels = predicted if maps.label is None else torch.full_like(predicted, maps.label)
    heats = image_heat(classifier, images, labels, maps.layer)
    for image, heat, row, label, file in zip(
        images, heats, probabilities, labels.tolist(), files, strict=True
    ):
        best = int(row.argmax())
        evidence = f"no evidence for {classes[label]}"
        if heat.any():
            evidence = f"evidence for {classes[label]} {row[label]:.3f}"
        captions = [f"predicted {classes[best]} {row[best]:.3f}", f"{evidence}\n{maps.layer}"]
        save_captioned(overlay(visible(image, classifier.spec), heat), captions, file, columns=2)


def output_files(folder: Path, files: Sequence[str], kind: str) -> list[Path]:
    """Return an output path STEM-KIND.png in `folder` for each of `files`, the input images.

    STEM is the stem of the input's name. A number is added to the path if it is already that of an
    output or an input; upper and lower case count as equal. Raises UserError if the folder is not
    writable.
    """
    check_writable(folder)
    existing = {_identity(Path(file)) for file in files}
    paths: list[Path] = []
    for file in files:
        stem = Path(file).stem.replace("\0", "") or "image"
        while len(os.fsencode(stem)) > LONGEST:
            stem = stem[:-1]
        path = unused(folder / f"{stem}-{kind}.png", lambda path: _identity(path) in existing)
        existing.add(_identity(path))
        paths.append(path)
    return paths


def unused(path: Path, used: Callable[[Path], bool]) -> Path:
    """Return `path` if it is unused, else the first unused path with -2, -3, ... after the stem.

    `used` returns True for a path that is used.
    """
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([path], numbered) if not used(path))


def _identity(path: Path) -> str:
    return os.path.realpath(path).casefold()


Sink = Callable[[Input, Answer], object]  # writes an image's prediction to an output


@contextmanager
def json_array(stream: TextIO) -> Iterator[Sink]:
    """Yield a function that writes predictions to `stream` as items of a JSON array."""
    separators = itertools.chain(["[\n"], itertools.repeat(",\n"))

    def write(_item: Input, answer: Answer) -> None:
        text = json.dumps(answer, indent=1, allow_nan=False)
        stream.write(next(separators) + textwrap.indent(text, " "))

    yield write
    stream.write("[]\n" if next(separators) == "[\n" else "\n]\n")


@contextmanager
def csv_file(path: Path, classes: Sequence[str], top: int | None) -> Iterator[Sink]:
    """Yield a function that writes the prediction of an image as a row of a CSV file.

    The columns are `file`, `label`, `probability`, and one for the probability of each class. If
    `top` is K, the columns of the classes are replaced by `label_2`, `probability_2`, ...,
    `label_K`, `probability_K`. For an image that cannot be read, only `file` is filled. Raises
    UserError if the CSV file cannot be written.
    """
    columns = list(classes)
    if top:
        columns = []
        for rank in range(2, top + 1):
            columns += [f"label_{rank}", f"probability_{rank}"]
    head = ["file", "label", "probability", *columns]
    with _rows(path, head) as add:

        def write(item: Input, answer: Answer) -> None:
            row: list[object] = [item.name]
            if "error" not in answer:
                probabilities: dict[str, float] = answer["probabilities"]
                pairs = list(itertools.chain(*probabilities.items()))
                row += [answer["label"], pairs[1]]
                row += pairs[2:] if top else [probabilities[name] for name in classes]
            add([*row, *[""] * (len(head) - len(row))])

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
    """Return a function that puts an image into the folder of its predicted class, `folder`/CLASS.

    For an image file the function makes a link to the file; for an image in an archive it writes a
    copy. Images that could not be read are skipped. Raises UserError if a link or a copy cannot be
    written.
    """
    check_writable(folder)

    def exists(path: Path) -> bool:
        return any(os.path.lexists(f"{path}{suffix}") for suffix in IMAGE_SUFFIXES)

    def write(item: Input, answer: Answer) -> None:
        if "error" in answer:
            return
        path = Path(item.name)
        # The class name comes from a checkpoint and must not lead out of the folder.
        label = answer["label"].replace(os.sep, "_").replace("\0", "")
        label = label if label.strip(".") else f"_{label}"
        destination = folder / label / path.name.replace(":", "_")
        if path.is_file():
            target = path.resolve()
            link = unused(
                destination, lambda path: os.path.lexists(path) and path.resolve() != target
            )
            with writing(destination):
                if not link.is_symlink():  # An earlier run may have made the link.
                    link.symlink_to(target)
            return
        content = item.content()
        if isinstance(content, bytes):
            write_atomic(unused(destination, os.path.lexists), content)
        else:
            values = native(content)
            stem = unused(destination.with_suffix(""), exists)
            save_image(values.pixels, kind(values), stem, {})

    return write


def open_sinks(options: Namespace, classes: list[str], stack: ExitStack) -> Iterator[Sink]:
    """Yield a function for each output that the options of predict.py request, see `Sink`.

    Each function writes the prediction of an image to its output. `stack` closes the outputs.
    """
    if options.json:
        yield stack.enter_context(json_array(sys.stdout))
    elif not (options.csv or options.sort_into):
        yield lambda _, answer: print(line(answer))
    if options.csv:
        yield stack.enter_context(csv_file(options.csv, classes, options.top))
    if options.errors:
        add = stack.enter_context(_rows(options.errors, ["file", "error"]))

        def add_error(item: Input, answer: Answer) -> None:
            if "error" in answer:
                add([item.name, answer["error"]])

        yield add_error
    if options.sort_into:
        yield sorter(options.sort_into)


def line(answer: Answer) -> str:
    """Return a prediction as a line of text."""
    if "error" in answer:
        return printable(f"{answer['file']}: {answer['error']}")
    text = ", ".join(f"{name} {p:.3f}" for name, p in answer["probabilities"].items())
    if "labels" in answer:
        text = f"{answer['label'] or 'no label'} ({text})"
    text = f"{answer['file']}: {text}"
    if "gradcam" in answer:
        text += f" ({answer['gradcam']})"
    for name, addition in ADDITIONS.items():
        if name in answer:
            text += addition.text(answer[name])
    return printable(text)


# --- Grad-CAM maps


def requested_files(
    options: Namespace, kind: str, extra: str, inputs: Inputs, classes: list[str]
) -> tuple[list[Path], int | None] | None:
    """Return what the options `--KIND DIR` and `--KIND-class NAME` request.

    Returns None without `--KIND`. Otherwise returns two values: the output path in DIR of each
    image, and the label of the class NAME, or None without `--KIND-class`.

    Args:
        options: The options of predict.py.
        kind: KIND, such as "gradcam".
        extra: Attribute of `options` of another option that is valid only with `--KIND`.
        inputs: The images.
        classes: Names of the classes.

    Raises:
        UserError: The class is unknown, DIR is not writable, or `--KIND-class` or the option
            `extra` is given without `--KIND`.
    """
    folder, name = getattr(options, kind), getattr(options, f"{kind}_class")
    if folder is None:
        if name is not None or getattr(options, extra) is not None:
            raise UserError(
                f"--{kind}-class and --{extra.replace('_', '-')} belong to --{kind} DIR; add it"
            )
        return None
    label = None if name is None else label_of(name, classes, f"--{kind}-class")
    return output_files(folder, list(inputs.names()), kind), label


def gradcam(
    options: Namespace, inputs: Inputs, classes: list[str], classifier: Classifier
) -> Maps | None:
    """Return the maps that the option `--gradcam` requests, or None without this option.

    Raises UserError for invalid options.
    """
    requested = requested_files(options, "gradcam", "gradcam_layer", inputs, classes)
    if not requested:
        return None
    files, label = requested
    return Maps(iter(files), label, options.gradcam_layer or default_layer(classifier))
