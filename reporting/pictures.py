"""The images of a report, embedded in the page, and links to what else lies in a run folder."""

import base64
import io
from pathlib import Path

from PIL import Image

from duetgan.reporting.charts import number
from duetgan.reporting.run_files import Run
from duetgan.utils import bounded

MOST_SAMPLES = 12  # grids shown of the samples over time
MOST_OUTPUTS = 12  # images shown of what other commands have written
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises for bad images
EMBED_WHOLE = 300_000  # bytes; larger images are shrunk before they are embedded
LARGEST_SIDE = 1400  # pixels of a shrunk image
CAPTIONS = {  # name of an image in eval/: what it shows
    "samples": "Samples, a row for each class",
    "real": "Real test images, in the same rows",
    "recognised_best": "Samples that the classifier is surest of: the class asked for, its probability",
    "recognised_worst": "Samples that the classifier is least sure of: asked for, and predicted",
    "neighbours": "Samples beside the training images nearest to them",
    "truncation": "Truncation: the same samples from the mean image (psi 0) to as they are (psi 1)",
    "mixing": "Style mixing: A with the coarse styles (pose, shape) of B",
    "confusion": "Confusion matrix: true classes in rows, predicted ones in columns",
    "reliability": "Accuracy by confidence: on the diagonal the classifier is as often right as it is sure",
    "confused": "The classes that are confused most often: true class as predicted class, and how many images",
    "robustness": "A test image under each corruption, as it is and at each strength",
    "mistakes": "The most confident mistakes: record and true class, and predicted",
}
BESIDE = ("samples", "real")  # come first, side by side

Picture = dict[str, str]  # caption, and the address inside the page; empty where the image cannot be shown


def pictures(run: Run) -> list[Picture]:
    """The images of the evaluation: samples and real ones first."""
    ordered = sorted(run.images, key=lambda path: (*BESIDE, path.stem).index(path.stem))
    return [picture(path, CAPTIONS.get(path.stem, path.stem.replace("_", " "))) for path in ordered]


def samples(run: Run) -> list[Picture]:
    """At most MOST_SAMPLES of the grids, evenly chosen, the newest last."""
    last = len(run.samples) - 1
    count = min(MOST_SAMPLES, last + 1)
    picked = [run.samples[round(i * last / max(1, count - 1))] for i in range(count)]
    return [picture(path, f"step {number(int(path.stem.removeprefix('step-')))}") for path in picked]


def outputs(run: Run, folder: Path) -> tuple[list[Picture], list[tuple[str, str]]]:
    """What other commands have written into the run folder: Grad-CAM maps, grids, projections; and links, (address seen
    from the page in `folder`, size), of films, exports and more images.
    """
    shown = [path for path in run.outputs if path.suffix == ".png"][:MOST_OUTPUTS]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in run.outputs if path not in shown}
    links = [
        (address, f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB")
        for address, size in sizes.items()
    ]
    return [picture(path, str(path.relative_to(run.folder))) for path in shown], links


def picture(path: Path, caption: str) -> Picture:
    """The caption and the address of a checked image inside the page, a large one shrunk and stored as JPEG; what is
    wrong with one that cannot be read.
    """
    try:
        content = bounded.read_file(path, bounded.IMAGE)
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            kind = "png" if image.format == "PNG" else "jpeg"
            if len(content) > EMBED_WHOLE or image.format not in ("PNG", "JPEG"):
                small = image.convert("RGB")
                small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
                buffer = io.BytesIO()
                small.save(buffer, format="JPEG", quality=88)
                content, kind = buffer.getvalue(), "jpeg"
    except UNREADABLE as error:
        return {"caption": f"{path.name} cannot be shown: {error}", "address": ""}
    return {"caption": caption, "address": f"data:image/{kind};base64,{base64.b64encode(content).decode()}"}
