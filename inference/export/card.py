"""What a model folder says of its network: config.json for programs, and README.md, a model card in the form of the
Hugging Face hub, for people.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from data.images import RESIZE_FILTERS, trained_mode
from inference.export.weights_file import contents, interface
from metrics.lineage import run_folder
from models.classifier import ModelConfig
from models.registry import DEFAULT
from utils import bounded
from utils.config.build import build
from utils.passport import recorded
from utils.text import printable

CLASSIFIER = ("accuracy", "balanced_accuracy", "top5_accuracy", "ece", "nll", "auroc", "average_precision")
DISTANCES = ("frechet", "kernel", "clipped_density", "clipped_coverage", "precision", "recall", "diversity_ratio")
JUDGED = ("recognised", "class_score")  # by the classifier that was the judge
TAGS = {"classifier": "image-classification", "gan": "unconditional-image-generation"}  # the hub's names of tasks
SHOWN = 20  # names of classes
RESIZED = {
    "crop": "the largest central square, scaled by Pillow's Lanczos filter",
    "pad": "centred on zeros, scaled down first where it is too large, never enlarged",
}


def evaluated(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What evaluate.py wrote into the checkpoint's run, if it evaluated this very step; else an empty dict."""
    path = run_folder(Path(checkpoint["file"])) / "eval" / "metrics.json"
    try:
        document = json.loads(bounded.read_file(path, bounded.TABLE))
    except (OSError, ValueError, RecursionError):
        return {}
    same = isinstance(document, dict) and all(document.get(key) == checkpoint[key] for key in ("task", "step"))
    return document if same else {}


def figures(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of an evaluation: `name`, `value`, `interval` (95 %) or null, `n` images, `extractor` or null, and of
    distances the `floor`.
    """
    rows: list[dict[str, Any]] = []

    def add(held: dict[str, Any], names: tuple[str, ...], by: str | None) -> None:
        for name in names:
            if isinstance(held.get(name), (int, float)):
                row = {"name": name, "value": held[name], "interval": held.get(f"{name}_interval")}
                floor = held.get({"frechet": "floor", "kernel": "kernel_floor"}.get(name, ""))
                told = {"n": held.get("n", document.get("n")), "extractor": by}
                rows.append(row | told | ({} if floor is None else {"floor": floor}))

    if document.get("task") == "classifier":
        add(document, CLASSIFIER, None)
    for held in document.get("distances") or []:
        add(held, DISTANCES, str(held.get("extractor")).partition(":")[0])  # classifier:RUN without its path
    add(document, JUDGED, "classifier")
    return rows


def described(checkpoint: dict[str, Any], *, licence: str, more: dict[str, Any]) -> dict[str, Any]:
    """What config.json holds; `more`: of the programs. Nothing in it is a path."""
    task, config, shape = checkpoint["task"], checkpoint["config"], checkpoint["shape"]
    classifier, name = task == "classifier", (checkpoint.get("data") or {}).get("resize_filter", "none")
    model = build(ModelConfig, config["model"], source="model") if classifier else None
    told = interface(checkpoint)
    inside = "ImageNet's mean and deviation" if model and model.imagenet_normalised else None
    document, lineage = evaluated(checkpoint), recorded(checkpoint)
    rule = "none: images of that size" if name == RESIZE_FILTERS["exact"] else RESIZED[trained_mode(checkpoint)]
    return {
        "task": task,
        "architecture": model.name if model else config.get("architecture", DEFAULT),
        "step": checkpoint["step"],
        "classes": list(checkpoint["classes"]),
        "conditional": classifier or shape["classes"] > 0,
        "image": {"channels": shape["channels"], "height": shape["resolution"], "width": shape["resolution"]},
        "normalisation": {"outside": "pixels / 127.5 - 1", "inside": inside},
        "resize": {"filter": name, "rule": rule},
        "input": told["input"],
        "output": told["output"],
        **more,
        "network": contents(checkpoint)["config"],
        "figures": figures(document),
        "data": {"trained_on": lineage["trained_on"], "synthetic": lineage["synthetic"]}
        | {"tested_on": document.get("data_hash")},
        "teachers": list(checkpoint.get("teachers", [])),
        "licence": licence,
    }


def readme(name: str, config: dict[str, Any], *, seed: int | None) -> str:
    """The model card; `seed`: of the samples in samples.png, None without them."""
    image, classes = config["image"], config["classes"] if config["conditional"] else []
    colours = "RGB" if image["channels"] == 3 else "grey" if image["channels"] == 1 else f"{image['channels']}-channel"
    kind = "classifier" if config["task"] == "classifier" else "generator"
    names = ", ".join(map(_code, classes[:SHOWN])) + (f" and {len(classes) - SHOWN} more" * (len(classes) > SHOWN))
    of = f"of {len(classes)} classes: {names}" if classes else "without classes"
    size = f"{image['width']}x{image['height']} px, {colours}"
    synthetic = len(config["data"]["synthetic"])
    grid = "" if seed is None else f"![Samples, seed {seed}](samples.png)\n\n"
    return f"""---
{yaml.safe_dump(metadata(name, config), sort_keys=False, allow_unicode=True)}---

# {_plain(name)}

A {_plain(config["architecture"])} {kind} of images ({size}), {of}. Trained with Duet for {config["step"]:,} steps.

{grid}## Use

```python
{USE[config["task"]]}
```

`duet_model.py` lies in this folder. It needs torch and safetensors and runs on the CPU. In Duet, `model.safetensors`
goes wherever a checkpoint goes (`--checkpoint`).

- Input: {_plain(config["input"])}
- Output: {_plain(config["output"])}
- How the images of its training were brought to size: {config["resize"]["rule"]}

## Figures

{_table(config["figures"])}

## Training

- Data, by content hash: {", ".join(map(_code, config["data"]["trained_on"])) or "unknown"}
- Sets of generated images among them: {synthetic}
- Classifiers that supplied a loss: {", ".join(map(_code, config["teachers"])) or "none"}

## Licence

{_plain(config["licence"])}
"""


USE = {
    "classifier": """from duet_model import load

model = load()
probabilities = model.probabilities(images)  # uint8 [N, C, H, W] -> [N, classes]
names = [model.classes[i] for i in probabilities.argmax(1)]""",
    "gan": """from duet_model import load

model = load()
images = model.samples(16, seed=0)  # uint8 [16, C, H, W]""",
}


def metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The card's head, as the hub reads it."""
    task = TAGS[config["task"]]
    found: dict[str, Any] = {"license": config["licence"], "library_name": "pytorch", "pipeline_tag": task}
    found["tags"] = ["duet", config["architecture"], *(["class-conditional"] if config["classes"] else [])]
    if config["figures"]:
        tested = str(config["data"]["tested_on"])
        data = {"type": "duet-packed-images", "name": f"held-out images, {tested[:16]}"}
        metrics = [{"type": row["name"], "value": row["value"], "name": _titled(row)} for row in config["figures"]]
        result = {"task": {"type": task}, "dataset": data, "metrics": metrics}
        found["model-index"] = [{"name": name, "results": [result]}]
    return found


def _titled(row: dict[str, Any]) -> str:
    by = f", {row['extractor']}" if row["extractor"] else ""
    return f"{row['name']} (n {row['n']}{by})"


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Not evaluated."
    lines = ["| figure | value | 95 % interval | of two real sets | n | by |", "|---|---|---|---|---|---|"]
    for row in rows:
        interval = "" if row["interval"] is None else " to ".join(f"{x:.4g}" for x in row["interval"])
        floor, by = row.get("floor"), row["extractor"] or ""
        cells = [row["name"], f"{row['value']:.4g}", interval, "" if floor is None else f"{floor:.4g}", row["n"], by]
        lines.append(f"| {' | '.join(_plain(str(cell)) for cell in cells)} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A text of someone's that Markdown takes for no more than text."""
    shown = printable(text)
    return "".join(f"\\{character}" if character in "\\`*_[]<>#|!" else character for character in shown)


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39))}`"
