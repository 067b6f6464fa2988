"""Predicting a folder of photographs into a CSV, against a plain loop of timm's network, ImageFolder and DataLoader.

`python benchmarks/predict.py [--json] [--images N] [--model NAME] [--repeats N]`. Both have the same network with the
same random weights, in fp32 on the same device, read the same JPEGs of 500x375 px and bring them to 224 px by the
published transform; they alternate. Ours is the loop of predict.py with its CSV, theirs writes the same rows.
`predict_vs_timm_ratio`: our images a second over theirs, the median of the repeats.
"""

import csv
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import timm
import torch
from timm.data import create_transform, resolve_model_data_config
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from benchmarks.harness import median_ratio, parser_of, show
from benchmarks.loading.images import write_jpeg_folder
from duetgan.inference.inputs import Inputs
from duetgan.inference.predictions import csv_file, predict
from duetgan.models.restore import classifier_from, read
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.machine import cores

BATCH = 64


def ours(folder: Path, model: Any, checkpoint: dict[str, Any], out: Path) -> None:
    """What predict.py does between its options and its last line."""
    classes = checkpoint["classes"]
    how: dict[str, Any] = {"resize": None, "top": len(classes), "batch_size": BATCH, "maps": None, "fast": None}
    with ExitStack() as stack, csv_file(out, classes, None) as write:
        inputs = Inputs([str(folder)], stack)
        for given, answer in predict(model, checkpoint, inputs, **how):
            write(given, answer)


@torch.inference_mode()
def theirs(folder: Path, model: torch.nn.Module, device: torch.device, classes: list[str], out: Path) -> None:
    """A loop as timm's documentation has it."""
    images = ImageFolder(str(folder), create_transform(**resolve_model_data_config(model), is_training=False))
    loader = DataLoader(images, batch_size=BATCH, num_workers=cores(), pin_memory=device.type != "cpu")
    names = iter(path for path, _ in images.samples)
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label", "probability", *classes])
        for batch, _ in loader:
            for row in model(batch.to(device)).softmax(1).tolist():
                best = max(range(len(row)), key=row.__getitem__)
                writer.writerow([next(names), classes[best], row[best], *row])


def main(argv: list[str]) -> int:
    """Measure, print."""
    options = parser_of("predict", __doc__)
    options.add_argument("--images", type=int, default=1000)
    options.add_argument("--model", default="resnet18", help="timm's name")
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args(argv)
    device = choose_device(None)
    rates: dict[str, list[float]] = {"ours": [], "timm": []}
    with tempfile.TemporaryDirectory() as place:
        folder, weights = Path(place) / "photos", Path(place) / "weights.pth"
        write_jpeg_folder(folder, given.images)
        plain = timm.create_model(given.model).to(device).eval()
        torch.save(plain.state_dict(), weights)
        checkpoint = read(Path(f"timm:{given.model}={weights}"))
        model = classifier_from(checkpoint, device)
        for _ in range(given.repeats):
            for name in rates:
                started = time.perf_counter()
                if name == "ours":
                    ours(folder, model, checkpoint, Path(place) / "ours.csv")
                else:
                    theirs(folder, plain, device, checkpoint["classes"], Path(place) / "timm.csv")
                rates[name].append(given.images / (time.perf_counter() - started))
    medians = {f"{name}_images_per_second": statistics.median(values) for name, values in rates.items()}
    ratio = median_ratio(rates["ours"], rates["timm"])
    result: dict[str, float | str] = {"predict_vs_timm_ratio": ratio, "load": os.getloadavg()[0], "device": str(device)}
    show(medians | result, as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
