"""Write and read the export format `folder`: a model folder for publication.

The folder has the weights (model.safetensors, which Duet loads), a description of the model
(config.json), and a model card in the form of the Hugging Face hub (README.md). A generator's
folder also has a picture of samples. No file contains a path of this machine.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from duetgan.inference.export import weights
from duetgan.inference.export.subject import Drawing, Runner, Subject
from duetgan.inference.samples import Sampler, draw_grid
from duetgan.metrics.figures import rows_of
from duetgan.metrics.lineage import run_folder
from duetgan.models.classifier import ModelConfig
from duetgan.models.registry import DEFAULT
from duetgan.utils import files
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.checkpoint.provenance import recorded
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import listed, printable

Document = dict[str, Any]  # a JSON object

WEIGHTS = "model.safetensors"
GRID = 64  # number of samples in the card's picture; a quarter of it for images above 64 px
# task -> its name on the Hugging Face hub
TAGS = {"classifier": "image-classification", "gan": "unconditional-image-generation"}
LISTED = 20  # number of classes that a card lists


def write(subject: Subject, path: Path) -> None:
    """Write the model `subject` as a model folder to `path`, which must not exist yet."""
    path.mkdir()
    weights.write(subject, path / WEIGHTS)
    (path / WEIGHTS).chmod(0o644)  # safetensors makes the file private
    if isinstance(subject.network, Drawing):
        generator = subject.network.generator
        most = GRID if generator.spec.side <= 64 else GRID // 4
        chosen = range(min(generator.num_labels, most))
        count = min(8, most // max(1, len(chosen))) * len(chosen) or most
        draw_grid(
            Sampler(generator=generator, chosen=chosen),
            path / "samples.png",
            count=count,
            names=generator.label_names(subject.checkpoint["classes"]),
        )
    config = described(subject.checkpoint, licence=subject.licence)
    if not config["figures"]:
        say("note: the card has no metrics; run evaluate.py --checkpoint RUN, then export again")
    texts = {
        "config.json": json.dumps(config, indent=1, allow_nan=False) + "\n",
        "README.md": readme(path.name, config, has_samples=(path / "samples.png").is_file()),
    }
    for name, text in texts.items():
        (path / name).write_text(text, encoding="utf-8")


def load(subject: Subject, path: Path) -> Runner:
    """Return the network in the model folder `path` as a function of its inputs."""
    return weights.load(subject, path / WEIGHTS)


# --- config.json


def evaluated(checkpoint: Checkpoint) -> Document:
    """Return the evaluation results in the checkpoint's run folder (eval/metrics.json).

    Returns an empty dict if there are none, or if they belong to another task or step.
    """
    path = run_folder(Path(checkpoint["file"])) / "eval" / "metrics.json"
    if not path.is_file():
        return {}
    with files.reading(path, "evaluate again", ValueError, RecursionError, AttributeError):
        document = json.loads(files.read_file(path, files.TABLE))
        is_same = all(document.get(key) == checkpoint[key] for key in ("task", "step"))
    return document if is_same else {}


def figures(document: Document) -> list[Document]:
    """Return the metrics in an evaluation's results as a list of dicts.

    Each dict has `name`, `value`, `interval` (95 %, or None), `n` (number of images) and
    `extractor` (the network whose outputs the metric uses, or None).
    """
    rows = []
    for figure, results in rows_of(document):
        name = figure.key
        # A floor is a distance between real images, not a metric of the model.
        if name in ("floor", "kernel_floor") or not isinstance(results[name], int | float):
            continue
        extractor = "classifier" if figure.by_judge else None
        if results is not document:
            extractor = str(results.get("extractor")).partition(":")[0]  # the path is private
        rows.append(
            {
                "name": name,
                "value": results[name],
                "interval": results.get(f"{name}_interval"),
                "n": results.get("n"),
                "extractor": extractor,
            }
        )
    return rows


def described(checkpoint: Checkpoint, *, licence: str) -> Document:
    """Return the content of config.json, which describes the model and contains no path."""
    task, config = checkpoint["task"], checkpoint["config"]
    calls, evaluation = weights.interface(checkpoint), evaluated(checkpoint)
    architecture = config.get("architecture", DEFAULT)
    if task == "classifier":
        architecture = config["model"].get("name", ModelConfig().name)
    channels, height, width = ImageSpec.read(checkpoint["shape"]).shape
    is_conditional = task == "classifier" or checkpoint["shape"]["classes"] > 0
    return {
        "task": task,
        "architecture": architecture,
        "step": checkpoint["step"],
        "classes": list(checkpoint["classes"]) if is_conditional else [],
        "image": {"channels": channels, "height": height, "width": width},
        "resize_filter": (checkpoint.get("data") or {}).get("resize_filter", "none"),
        "input": calls["input"],
        "output": calls["output"],
        "figures": figures(evaluation),
        "trained_on": recorded(checkpoint).document()["trained_on"],
        "tested_on": evaluation.get("data_hash"),
        "teachers": list(checkpoint.get("teachers", [])),
        "licence": licence,
    }


# --- README.md


def readme(name: str, config: Document, *, has_samples: bool) -> str:
    """Return the text of the model card titled `name`; `config` is the content of config.json."""
    image, classes = config["image"], config["classes"]
    kind, use = USE[config["task"]]
    class_list = "without classes"
    if classes:
        class_list = f"of {len(classes)} classes: {listed(list(map(_code, classes)), LISTED)}"
    size = f"{image['width']}x{image['height']} px, {image['channels']} channels"
    grid = "![Samples, seed 0](samples.png)\n\n" if has_samples else ""
    head = {
        "license": config["licence"],
        "library_name": "pytorch",
        "pipeline_tag": TAGS[config["task"]],
        "tags": ["duet", config["architecture"]],
    }
    return f"""---
{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---

# {_plain(name)}

A {_plain(config["architecture"])} {kind} of images ({size}), {class_list}. Trained with Duet for \
{config["step"]:,} steps.

{grid}## Use

```python
import duetgan

model = duetgan.load("{WEIGHTS}")
{use}
```

- Input: {_plain(config["input"])}
- Output: {_plain(config["output"])}

## Metrics

{_table(config["figures"])}

## Training

- Data, by content hash: {", ".join(map(_code, config["trained_on"])) or "unknown"}
- Classifiers that supplied a loss: {", ".join(map(_code, config["teachers"])) or "none"}

## Licence

{_plain(config["licence"])}
"""


USE = {  # task -> kind of model, and example code
    "classifier": ("classifier", 'print(model.predict(["photo.jpg"]).labels)'),
    "gan": ("generator", 'model.grid(16, seed=0).save("grid.png")'),
}


def _table(rows: list[Document]) -> str:
    if not rows:
        return "Not evaluated."
    lines = [
        "| metric | value | 95 % interval | n | extractor |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        interval = " to ".join(f"{x:.4g}" for x in row["interval"] or ())
        value, extractor = f"{row['value']:.4g}", row["extractor"] or ""
        cells = [row["name"], value, interval, row["n"], extractor]
        lines.append(f"| {' | '.join(_plain(str(cell)) for cell in cells)} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return re.sub(r"[\\`*_\[\]<>#|!]", r"\\\g<0>", printable(text))


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39))}`"
