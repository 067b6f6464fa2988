"""A model folder to hand on: the weights, programs that take them, a page of Python that needs
torch and safetensors alone, config.json for programs and README.md, a model card in the form of the
Hugging Face hub, for people. Nothing in it names a place on this machine. The programs are
torch.export's; their weights are inputs, so that a file of weights serves them.
"""

import importlib.util
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn
from torch.func import functional_call

from duetgan.data.images import RESIZE_FILTERS, trained_mode
from duetgan.inference.export import page
from duetgan.inference.export.subject import (
    EXAMPLES,
    Drawing,
    Runner,
    Subject,
    as_runner,
    contents,
    interface,
    write_weights,
)
from duetgan.inference.samples import Sampler, draw_grid
from duetgan.metrics.figures import CLASSIFIER, GAN
from duetgan.metrics.lineage import run_folder
from duetgan.models.classifier import ModelConfig
from duetgan.models.registry import DEFAULT
from duetgan.utils import bounded
from duetgan.utils.config.build import build
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.provenance import recorded
from duetgan.utils.runlog.run_log import say
from duetgan.utils.text import listed, printable


def traced(
    network: nn.Module, inputs: tuple[Any, ...], shapes: Any
) -> torch.export.ExportedProgram:
    """The network as a graph of torch's operators, `shapes` as torch.export has them. Neither the
    inputs, which may be someone's images, nor places on this machine are left in it.
    """
    program = torch.export.export(network, inputs, dynamic_shapes=shapes)
    program.example_inputs = None
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


class Program(nn.Module):
    """`forward(weights, *inputs)` of a network, without weights of its own: `names` are theirs in
    it, in order, and in the file. `inputs`: what it is traced with; `stored`: from a name in the
    network to that in the file, "" for none.
    """

    def __init__(
        self, network: nn.Module, inputs: tuple[Any, ...], stored: Callable[[str], str]
    ) -> None:
        super().__init__()
        self.hidden = [network]  # in a list, torch does not see it
        self.names = {name: there for name in network.state_dict() if (there := stored(name))}
        self.inputs = inputs

    def forward(self, weights: list[Tensor], *inputs: Any) -> Tensor:
        return functional_call(self.hidden[0], dict(zip(self.names, weights, strict=True)), inputs)

    def write(self, path: Path) -> None:
        """Trace it, for any number of rows."""
        state = self.hidden[0].state_dict()
        weights = [state[name] for name in self.names]
        batch = torch.export.Dim("batch", min=1)
        rows = [[{0: batch} for _ in x] if isinstance(x, list) else {0: batch} for x in self.inputs]
        torch.export.save(
            traced(self.eval(), (weights, *self.inputs), ([None] * len(weights), tuple(rows))), path
        )


class Synthesis(nn.Module):
    """ws [N, num_ws, w_dim] and a noise map [N, 1, H, W] for each layer -> images."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, ws: Tensor, noise: list[Tensor]) -> Tensor:
        return self.generator.synthesis(ws, noise)


def programs(subject: Subject) -> dict[str, Program]:
    """The programs of a subject's network by their names; each name in the file is one of its
    checkpoint's state.
    """

    def of_synthesis(name: str) -> str:  # "": it has no use of this one
        stored = name.removeprefix("generator.")
        return (
            ""
            if stored.startswith(("mapping.", "w_avg")) or stored.endswith("noise_const")
            else stored
        )

    rows, network = subject.rows(EXAMPLES), subject.network
    if not isinstance(network, Drawing):
        return {"network": Program(network, rows, str)}
    generator: Any = network.generator
    if not generator.has_styles:  # one that still grows is in a network of its stage
        return {"generator": Program(network, rows, lambda name: name.rpartition("generator.")[2])}
    ws = torch.zeros(EXAMPLES, generator.num_ws, generator.w_dim)
    maps = [torch.zeros(EXAMPLES, *shape) for shape in generator.noise_shapes()]
    return {
        "mapping": Program(generator.mapping, rows, lambda name: f"mapping.{name}"),
        "synthesis": Program(Synthesis(generator), (ws, maps), of_synthesis),
    }


PAGE = "duet_model.py"
GRID = 64  # samples; a quarter above 64 px
# figures that stand in a row of the card's table
FLOORS = {"frechet": "floor", "kernel": "kernel_floor"}
# the hub's names of tasks
TAGS = {"classifier": "image-classification", "gan": "unconditional-image-generation"}
NAMED = 20  # classes that a card lists
COLOURS = {1: "grey", 3: "RGB"}
RESIZED = {
    "crop": "the largest middle part of its shape, scaled by Pillow's Lanczos filter",
    "pad": "centred on zeros, scaled down first where it is too large, never enlarged",
}


def write_folder(subject: Subject, path: Path) -> None:
    path.mkdir()
    write_weights(path / "model.safetensors", subject.checkpoint)
    (path / "model.safetensors").chmod(0o644)  # safetensors lets nobody else read it
    made = programs(subject)
    for name, program in made.items():
        program.write(path / f"{name}.pt2")
    more: dict[str, Any] = {
        "programs": {name: list(program.names.values()) for name, program in made.items()}
    }
    seed = None
    if isinstance(subject.network, Drawing):
        seed, generator = 0, cast(Any, subject.network.generator)
        most = GRID if generator.spec.side <= 64 else GRID // 4
        chosen = range(min(generator.kinds, most))
        count = min(8, most // max(1, len(chosen))) * len(chosen) or most
        draw_grid(Sampler(generator=generator, chosen=chosen), path / "samples.png", count=count)
        more |= {"z_dim": generator.z_dim, "noise": []}
        # the stored maps by their names in the state, in the order of the layers
        if generator.has_styles:
            names = {id(x): name for name, x in generator.named_buffers()}
            more["noise"] = [names[id(layer.noise_const)] for layer in generator.styled_layers()]
            more["num_ws"] = generator.num_ws
    config = described(subject.checkpoint, licence=subject.licence, more=more)
    if not config["figures"]:
        say(
            "note: the card has no figures; evaluate.py --checkpoint RUN finds some, which the next export takes up"
        )
    texts = {
        "config.json": json.dumps(config, indent=1, allow_nan=False) + "\n",
        PAGE: inspect.getsource(page),
    }
    for name, text in (texts | {"README.md": readme(path.name, config, seed=seed)}).items():
        (path / name).write_text(text, encoding="utf-8")


def open_folder(_subject: Subject, path: Path) -> Runner:
    """The folder as its own page loads it."""
    spec: Any = importlib.util.spec_from_file_location("duet_model_of_a_folder", path / PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return as_runner(module.load(path))


# --- config.json


def evaluated(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What evaluate.py wrote into the checkpoint's run, if it evaluated this very step; else an
    empty dict.
    """
    path = run_folder(Path(checkpoint["file"])) / "eval" / "metrics.json"
    try:
        document = json.loads(bounded.read_file(path, bounded.TABLE))
    except (OSError, ValueError, RecursionError):
        return {}
    same = isinstance(document, dict) and all(
        document.get(key) == checkpoint[key] for key in ("task", "step")
    )
    return document if same else {}


def figures(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of an evaluation: `name`, `value`, `interval` (95 %) or null, `n` images,
    `extractor` or null, and of distances the `floor`.
    """
    judged = [row for row in GAN if row.by_judge]
    groups = [
        (each, GAN, str(each.get("extractor")).partition(":")[0])
        for each in document.get("distances") or []
    ]
    groups += [
        (document, CLASSIFIER, "")
        if document.get("task") == "classifier"
        else (document, judged, "classifier")
    ]
    rows = []
    for group, table, by in groups:  # classifier:RUN without its path
        for name in (row.key for row in table if row.key not in FLOORS.values()):
            if isinstance(group.get(name), (int, float)):
                row = {
                    "name": name,
                    "value": group[name],
                    "interval": group.get(f"{name}_interval"),
                }
                row |= {"n": group.get("n", document.get("n")), "extractor": by or None}
                floor = group.get(FLOORS.get(name, ""))
                rows.append(row | ({} if floor is None else {"floor": floor}))
    return rows


def described(checkpoint: dict[str, Any], *, licence: str, more: dict[str, Any]) -> dict[str, Any]:
    """What config.json holds; `more`: of the programs. Nothing in it is a path."""
    task, config, shape = checkpoint["task"], checkpoint["config"], checkpoint["shape"]
    name = (checkpoint.get("data") or {}).get("resize_filter", "none")
    model = build(ModelConfig, config["model"], source="model") if task == "classifier" else None
    calls, document, lineage = (
        interface(checkpoint),
        evaluated(checkpoint),
        recorded(checkpoint).document(),
    )
    inside = "ImageNet's mean and deviation" if model and model.imagenet_normalised else None
    rule = (
        "none: images of that size"
        if name == RESIZE_FILTERS["exact"]
        else RESIZED.get(trained_mode(checkpoint), name)
    )
    return {
        "task": task,
        "architecture": model.name if model else config.get("architecture", DEFAULT),
        "step": checkpoint["step"],
        "classes": list(checkpoint["classes"]),
        "conditional": model is not None or shape["classes"] > 0,
        "image": dict(
            zip(("channels", "height", "width"), ImageSpec.read(shape).shape, strict=True)
        ),
        "normalisation": {"outside": "pixels / 127.5 - 1", "inside": inside},
        "resize": {"filter": name, "rule": rule},
        "input": calls["input"],
        "output": calls["output"],
        **more,
        "network": contents(checkpoint)["config"],
        "figures": figures(document),
        "data": {key: lineage[key] for key in ("trained_on", "synthetic")}
        | {"tested_on": document.get("data_hash")},
        "teachers": list(checkpoint.get("teachers", [])),
        "licence": licence,
    }


# --- README.md


def readme(name: str, config: dict[str, Any], *, seed: int | None) -> str:
    """The model card; `seed`: of the samples in samples.png, None without them."""
    image, classes = config["image"], config["classes"] if config["conditional"] else []
    kind, use = USE[config["task"]]
    of = (
        f"of {len(classes)} classes: {listed(list(map(_code, classes)), NAMED)}"
        if classes
        else "without classes"
    )
    colours = COLOURS.get(image["channels"], f"{image['channels']}-channel")
    grid = "" if seed is None else f"![Samples, seed {seed}](samples.png)\n\n"
    return f"""---
{yaml.safe_dump(metadata(name, config), sort_keys=False, allow_unicode=True)}---

# {_plain(name)}

A {_plain(config["architecture"])} {kind} of images ({image["width"]}x{image["height"]} px, {colours}), {of}. Trained \
with Duet for {config["step"]:,} steps.

{grid}## Use

```python
from duet_model import load

model = load()
{use}
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
- Sets of generated images among them: {len(config["data"]["synthetic"])}
- Classifiers that supplied a loss: {", ".join(map(_code, config["teachers"])) or "none"}

## Licence

{_plain(config["licence"])}
"""


USE = {  # task -> what it is, and the lines that use it
    "classifier": (
        "classifier",
        "probabilities = model.probabilities(images)  # uint8 [N, C, H, W] -> [N, classes]\n"
        "names = [model.classes[i] for i in probabilities.argmax(1)]",
    ),
    "gan": ("generator", "images = model.samples(16, seed=0)  # uint8 [16, C, H, W]"),
}


def metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The card's head, as the hub reads it."""
    task = TAGS[config["task"]]
    head: dict[str, Any] = {
        "license": config["licence"],
        "library_name": "pytorch",
        "pipeline_tag": task,
    }
    head["tags"] = [
        "duet",
        config["architecture"],
        *(["class-conditional"] if config["classes"] else []),
    ]
    if config["figures"]:
        tested = str(config["data"]["tested_on"])
        data = {"type": "duet-packed-images", "name": f"held-out images, {tested[:16]}"}
        metrics = []
        for row in config["figures"]:
            by = f", {row['extractor']}" if row["extractor"] else ""
            metrics.append(
                {
                    "type": row["name"],
                    "value": row["value"],
                    "name": f"{row['name']} (n {row['n']}{by})",
                }
            )
        result = {"task": {"type": task}, "dataset": data, "metrics": metrics}
        head["model-index"] = [{"name": name, "results": [result]}]
    return head


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Not evaluated."
    lines = [
        "| figure | value | 95 % interval | of two real sets | n | by |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        interval = " to ".join(f"{x:.4g}" for x in row["interval"] or ())
        floor = f"{row['floor']:.4g}" if "floor" in row else ""
        cells = [
            row["name"],
            f"{row['value']:.4g}",
            interval,
            floor,
            row["n"],
            row["extractor"] or "",
        ]
        lines.append(f"| {' | '.join(_plain(str(cell)) for cell in cells)} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A text of someone's that Markdown takes for no more than text."""
    return "".join(
        f"\\{character}" if character in "\\`*_[]<>#|!" else character
        for character in printable(text)
    )


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39))}`"
