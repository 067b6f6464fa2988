"""The format `folder`: a model folder for publication.

The folder has a file of weights, programs of torch.export that take these weights as inputs, a
Python module that needs only torch and safetensors, config.json, and README.md, a model card in the
form of the Hugging Face hub. No file contains a path of this machine.
"""

import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn
from torch.func import functional_call

from duetgan.data.images import RESIZE_FILTERS, trained_mode
from duetgan.extras.model_folder import page
from duetgan.inference.export.subject import EXAMPLES, Drawing, Runner, Subject, as_runner
from duetgan.inference.export.torch_export import traced
from duetgan.inference.export.weights import contents, interface, write_weights
from duetgan.inference.samples import Sampler, draw_grid
from duetgan.metrics.figures import rows_of
from duetgan.metrics.lineage import run_folder
from duetgan.models.classifier import ModelConfig
from duetgan.models.gan import StyledGenerator
from duetgan.models.registry import DEFAULT
from duetgan.utils import files
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.checkpoint.provenance import recorded
from duetgan.utils.config.build import build
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import listed, printable

Document = dict[str, Any]  # a JSON object


class Program(nn.Module):
    """A network as `forward(weights, *inputs)`, without weights of its own.

    `names` maps the names of the weights in the network, in order, to those in the file of weights.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: tuple[Tensor | list[Tensor], ...],  # examples for tracing
        stored_name: Callable[[str], str],  # name in the network -> name in the file, "" for none
    ) -> None:
        super().__init__()
        self.hidden = [network]  # in a list, so that torch does not register it as a submodule
        stored = {name: stored_name(name) for name in network.state_dict()}
        self.names = {name: stored[name] for name in stored if stored[name]}
        self.inputs = inputs

    def forward(self, weights: list[Tensor], *inputs: Tensor | list[Tensor]) -> Tensor:
        return functional_call(self.hidden[0], dict(zip(self.names, weights, strict=True)), inputs)

    def write(self, path: Path) -> None:
        """Trace the network for any batch size and write the program."""
        state = self.hidden[0].state_dict()
        weights = [state[name] for name in self.names]
        batch = torch.export.Dim("batch", min=1)
        rows = [[{0: batch} for _ in x] if isinstance(x, list) else {0: batch} for x in self.inputs]
        shapes = ([None] * len(weights), tuple(rows))
        torch.export.save(traced(self.eval(), (weights, *self.inputs), shapes), path)


class Synthesis(nn.Module):
    """The synthesis of a generator as a module: styles ws [N, num_ws, w_dim] and a noise map
    [N, 1, H, W] for each layer -> images.
    """

    def __init__(self, generator: StyledGenerator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, ws: Tensor, noise: list[Tensor]) -> Tensor:
        return self.generator.synthesis(ws, noise)


def programs(subject: Subject) -> dict[str, Program]:
    """Return the programs of a subject's network by name. In the file of weights, tensors have the
    names of the checkpoint's state.
    """

    def synthesis_name(name: str) -> str:
        stored = name.removeprefix("generator.")
        is_unused = stored.startswith(("mapping.", "w_avg")) or stored.endswith("noise_const")
        return "" if is_unused else stored

    rows, network = subject.rows(EXAMPLES), subject.network
    if not isinstance(network, Drawing):
        return {"network": Program(network, rows, str)}
    if not network.generator.has_styles:
        # A generator that was saved while it grew is wrapped, which adds to the prefix.
        return {"generator": Program(network, rows, lambda name: name.rpartition("generator.")[2])}
    generator = cast(StyledGenerator, network.generator)
    ws = torch.zeros(EXAMPLES, generator.num_ws, generator.w_avg.numel())
    maps = [torch.zeros(EXAMPLES, *shape) for shape in generator.noise_shapes()]
    return {
        "mapping": Program(generator.mapping, rows, lambda name: f"mapping.{name}"),
        "synthesis": Program(Synthesis(generator), (ws, maps), synthesis_name),
    }


PAGE = "duet_model.py"
GRID = 64  # number of samples in the card's picture; a quarter for images above 64 px
# task -> its name on the Hugging Face hub
TAGS = {"classifier": "image-classification", "gan": "unconditional-image-generation"}
LISTED = 20  # number of classes that a card lists
COLOURS = {1: "grey", 3: "RGB"}
RESIZED = {
    "crop": "the largest centre crop of the model's aspect ratio, scaled by Pillow's Lanczos filter",
    "pad": "centred on zeros, scaled down if it is too large, never enlarged",
}


def write(subject: Subject, path: Path) -> None:
    """Write the model folder of a subject to `path`, which must not exist."""
    path.mkdir()
    write_weights(path / "model.safetensors", subject.checkpoint)
    (path / "model.safetensors").chmod(0o644)  # safetensors makes the file private
    program_names: dict[str, list[str]] = {}
    for name, program in programs(subject).items():
        program.write(path / f"{name}.pt2")
        program_names[name] = list(program.names.values())
    entries: Document = {"programs": program_names}
    seed = None
    if isinstance(subject.network, Drawing):
        seed, generator = 0, subject.network.generator
        most = GRID if generator.spec.side <= 64 else GRID // 4
        chosen = range(min(generator.num_labels, most))
        count = min(8, most // max(1, len(chosen))) * len(chosen) or most
        draw_grid(
            Sampler(generator=generator, chosen=chosen),
            path / "samples.png",
            count=count,
            names=generator.label_names(subject.checkpoint["classes"]),
        )
        entries |= {"z_dim": generator.z_dim, "noise": []}
        if generator.has_styles:
            styled: Any = generator
            names = {id(buffer): name for name, buffer in styled.named_buffers()}
            # the stored noise maps in the order of the layers, and the number of styles
            entries["noise"] = [names[id(layer.noise_const)] for layer in styled.styled_layers()]
            entries["num_ws"] = styled.num_ws
    config = described(subject.checkpoint, licence=subject.licence, entries=entries)
    if not config["figures"]:
        say("note: the card has no metrics; run evaluate.py --checkpoint RUN, then export again")
    texts = {
        "config.json": json.dumps(config, indent=1, allow_nan=False) + "\n",
        PAGE: inspect.getsource(page),
        "README.md": readme(path.name, config, seed=seed),
    }
    for name, text in texts.items():
        (path / name).write_text(text, encoding="utf-8")


def load(_subject: Subject, path: Path) -> Runner:
    """Load a model folder's network with the Python module in the folder."""
    spec: Any = importlib.util.spec_from_file_location("duet_model_of_a_folder", path / PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return as_runner(module.load(path))


# --- config.json


def evaluated(checkpoint: Checkpoint) -> Document:
    """Return the evaluation in the checkpoint's run folder if it is of the checkpoint's step, else
    an empty dict.
    """
    path = run_folder(Path(checkpoint["file"])) / "eval" / "metrics.json"
    if not path.is_file():
        return {}
    with files.reading(path, "evaluate again", ValueError, RecursionError, AttributeError):
        document = json.loads(files.read_file(path, files.TABLE))
        is_same = all(document.get(key) == checkpoint[key] for key in ("task", "step"))
    return document if is_same else {}


def figures(document: Document) -> list[Document]:
    """Return the metrics of an evaluation: `name`, `value`, `interval` (95 %) or None, the number
    of images `n`, and `extractor` or None.
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


def described(checkpoint: Checkpoint, *, licence: str, entries: Mapping[str, object]) -> Document:
    """Return the content of config.json, without any path; `entries` describe the programs."""
    task, config = checkpoint["task"], checkpoint["config"]
    name = (checkpoint.get("data") or {}).get("resize_filter", "none")
    model = build(ModelConfig, config["model"], source="model") if task == "classifier" else None
    calls, document = interface(checkpoint), evaluated(checkpoint)
    lineage = recorded(checkpoint).document()
    inside = "ImageNet's mean and deviation" if model and model.imagenet_normalised else None
    rule = RESIZED.get(trained_mode(checkpoint), name)
    if name == RESIZE_FILTERS["exact"]:
        rule = "none: images of that size"
    return {
        "task": task,
        "architecture": model.name if model else config.get("architecture", DEFAULT),
        "step": checkpoint["step"],
        "classes": list(checkpoint["classes"]),
        "conditional": model is not None or checkpoint["shape"]["classes"] > 0,
        "image": dict(
            zip(
                ("channels", "height", "width"),
                ImageSpec.read(checkpoint["shape"]).shape,
                strict=True,
            )
        ),
        "normalisation": {"outside": "pixels / 127.5 - 1", "inside": inside},
        "resize": {"filter": name, "rule": rule},
        "input": calls["input"],
        "output": calls["output"],
        **entries,
        "network": contents(checkpoint)["config"],
        "figures": figures(document),
        "data": {key: lineage[key] for key in ("trained_on", "synthetic")}
        | {"tested_on": document.get("data_hash")},
        "teachers": list(checkpoint.get("teachers", [])),
        "licence": licence,
    }


# --- README.md


def readme(name: str, config: Document, *, seed: int | None) -> str:
    """Return the model card; `seed` is that of the samples in samples.png, None without them."""
    image, classes = config["image"], config["classes"] if config["conditional"] else []
    kind, use = USE[config["task"]]
    class_list = "without classes"
    if classes:
        class_list = f"of {len(classes)} classes: {listed(list(map(_code, classes)), LISTED)}"
    colours = COLOURS.get(image["channels"], f"{image['channels']}-channel")
    size = f"{image['width']}x{image['height']} px"
    grid = "" if seed is None else f"![Samples, seed {seed}](samples.png)\n\n"
    return f"""---
{yaml.safe_dump(metadata(config), sort_keys=False, allow_unicode=True)}---

# {_plain(name)}

A {_plain(config["architecture"])} {kind} of images ({size}, {colours}), {class_list}. Trained \
with Duet for {config["step"]:,} steps.

{grid}## Use

```python
from duet_model import load

model = load()
{use}
```

`duet_model.py` is in this folder. It needs torch and safetensors and runs on the CPU. In Duet, `model.safetensors`
can be used like a checkpoint (`--checkpoint`).

- Input: {_plain(config["input"])}
- Output: {_plain(config["output"])}
- Resizing of the training images: {config["resize"]["rule"]}

## Metrics

{_table(config["figures"])}

## Training

- Data, by content hash: {", ".join(map(_code, config["data"]["trained_on"])) or "unknown"}
- Sets of generated images among these data: {len(config["data"]["synthetic"])}
- Classifiers that supplied a loss: {", ".join(map(_code, config["teachers"])) or "none"}

## Licence

{_plain(config["licence"])}
"""


USE = {  # task -> kind of model, and example code
    "classifier": (
        "classifier",
        "probabilities = model.probabilities(images)  # uint8 [N, C, H, W] -> [N, classes]\n"
        "names = [model.classes[i] for i in probabilities.argmax(1)]",
    ),
    "gan": ("generator", "images = model.samples(16, seed=0)  # uint8 [16, C, H, W]"),
}


def metadata(config: Document) -> Document:
    """Return the model card's metadata for the Hugging Face hub."""
    tags = ["duet", config["architecture"]]
    if config["classes"]:
        tags.append("class-conditional")
    return {
        "license": config["licence"],
        "library_name": "pytorch",
        "pipeline_tag": TAGS[config["task"]],
        "tags": tags,
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
