"""Memory and speed of the presets for GPUs, on paper: the tables of docs/measurements/predictions.md.

`python benchmarks/predictions.py [--only NAME...] [--fit] [--expected] [--json]`. Nothing here has run on a GPU: see
duetgan/extras/paper/predictions.py. `--fit` compares the model of time with steps measured on an H200 and with figures
that NVIDIA has published. `--expected` writes what `make gpu` compares its steps with, benchmarks/gpu/expected.json.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from benchmarks.gpu import steps, switches
from benchmarks.gpu.expected import FILE
from benchmarks.scaling import PRESETS, Images, Reader, recipe
from duetgan.extras.paper.predictions import CONSUMER_GPUS, GIB, GPUS, MEMORIES, Count, Gpu, count, fakes, largest
from duetgan.training.base.config import RunConfig
from duetgan.training.base.task import Task
from duetgan.training.optim.ema import EMA
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError

NAMES = list(steps.PRESETS)
PASS = 32  # samples, of which the table of layers is
MEASURED = [  # on an H200, kernels off, without graphs: recipe, samples, ms (docs/measurements/gpu.md)
    ("stylegan2_256", 32, 172),
    ("stylegan2_512", 32, 585),
    ("stylegan2_1024", 32, 1190),
    ("r3gan_256", 16, 250),
    ("cifar10_gan", 16, 43.7),
    ("cifar10_classifier_gpu", 256, 16.1),
    ("finetune_resnet50", 32, 34.3),
]
EXPECTED = [gpu for gpu in (*GPUS, *CONSUMER_GPUS) if gpu.name in ("A100", "H100", "H200", "RTX 4090", "RTX 3060")]
V100 = Gpu("V100", 125e12, 15.7e12, 15.7e12, 0.9e12)
A100 = GPUS[0]


class Published(NamedTuple):
    """A training that NVIDIA has measured: seconds of a step on a V100 and an A100, GPU memory in GB."""

    name: str
    samples: int  # a GPU
    seconds: tuple[float, float]
    memory: float | None = None


def _stylegan2(side: int, samples: int, v100: float, a100: float, memory: float, gpus: int = 1) -> Published:
    """By sec/kimg."""
    return Published(f"stylegan2_{side}", samples, (v100 * samples * gpus / 1e3, a100 * samples * gpus / 1e3), memory)


PUBLISHED = [  # NVlabs/stylegan3, docs/configs.md: "Old StyleGAN2-ADA configurations", with ADA
    _stylegan2(128, 32, 12.51, 6.79, 6.2),
    _stylegan2(256, 16, 20.84, 12.53, 4.5),
    _stylegan2(512, 8, 71.59, 41.06, 6.8),
    _stylegan2(1024, 4, 141.83, 90.39, 7.2),
    _stylegan2(256, 8, 3.89, 2.38, 2.6, gpus=8),
    # NVIDIA/DeepLearningExamples, ResNet-50 v1.5 for PyTorch, one GPU: mixed precision; fp32, on the A100 TF32
    Published("classifier", 256, (256 / 1200, 256 / 2470)),
    Published("classifier", 128, (128 / 367, 128 / 938)),
]


def counted(config: RunConfig, images: Images, samples: int) -> Count:
    reader: Any = Reader(images)
    return count(config, reader, samples)


def of_published(row: Published) -> Count:
    """Our own recipe at the settings of a published training."""
    config: Any = recipe(row.name)
    if row.name == "classifier":
        config = config.changed(precision="fp16" if row.samples == 256 else "fp32")
        return counted(config, Images(224, 1000), row.samples)
    config = config.changed(generator=config.generator.changed(mapping_layers=2))
    return counted(config, PRESETS[row.name], row.samples)


def fit() -> list[list[str]]:
    """Rows: steps that were measured or published, and what the model says."""
    rows = []
    for name, samples, milli in MEASURED:
        reader: Any = Reader(PRESETS[name])
        found = count(recipe(name).changed(micro_batch=None), reader, samples, kernels=False)
        rows.append(_compared(f"{name}, {samples} samples", GPUS[2], found, milli / 1e3, "-"))
    for row in PUBLISHED:
        found = of_published(row)
        for gpu, seconds in zip((V100, A100), row.seconds, strict=True):
            used = gpu._replace(convolution=gpu.single) if row.name != "classifier" else gpu  # their code has no TF32
            memory = "-" if row.memory is None else f"{row.memory:g} / {found.peak / GIB:.1f}"
            rows.append(_compared(f"{row.name}, {row.samples} samples, published", used, found, seconds, memory))
    return rows


def _compared(name: str, gpu: Gpu, found: Count, seconds: float, memory: str) -> list[str]:
    said = found.seconds(gpu)
    return [name, gpu.name, f"{1e3 * seconds:.0f} / {1e3 * said:.0f}", f"{said / seconds:.2f}", memory]


def expected() -> dict[str, Any]:
    """Steps of the recipes that `make gpu` times, in milliseconds, by recipe, variant and GPU; and operators."""
    milliseconds: dict[str, Any] = {}
    operators: dict[str, float] = {}
    for name, samples in {**switches.SMALL_PICTURES, **switches.PRESETS}.items():
        reader: Any = Reader(PRESETS[name])
        config = recipe(name).changed(micro_batch=None)
        plain, fused = (count(config, reader, samples, kernels=on) for on in (False, True))
        operators |= {f"{name}, plain": plain.mean(lambda _: 1.0), f"{name}, kernels": fused.mean(lambda _: 1.0)}
        is_small = name in switches.SMALL_PICTURES
        cases = {"eager": (plain, False), "graphs": (fused, True)}
        if not is_small:
            cases = {"plain": (plain, False), "kernels": (fused, False), "kernels and graphs": (fused, True)}
        milliseconds[name] = {
            variant: {gpu.name: _milliseconds(found, gpu, graphs) for gpu in EXPECTED if found.peak < gpu.gib * GIB}
            for variant, (found, graphs) in cases.items()
        }
    return {"operators": operators, "steps": milliseconds}


def _milliseconds(found: Count, gpu: Gpu, graphs: bool) -> dict[str, float]:
    figures = {"predicted_ms": found.seconds(gpu, graphs=graphs), "roofline_ms": found.roofline(gpu)}
    return {key: float(f"{1e3 * value:.3g}") for key, value in figures.items()}


def expected_table(document: dict[str, Any]) -> str:
    """Images per second that are expected."""
    samples = {**switches.SMALL_PICTURES, **switches.PRESETS}
    rows = []
    for name, variants_of in document["steps"].items():
        for variant, gpus in variants_of.items():
            rates = [
                f"{1e3 * samples[name] / gpus[gpu.name]['predicted_ms']:,.3g}" if gpu.name in gpus else "-"
                for gpu in EXPECTED
            ]
            rows.append([name, str(samples[name]), variant, *rates])
    return table(["recipe", "samples", "variant", *(gpu.name for gpu in EXPECTED)], rows)


def variants(config: Any) -> dict[str, Any]:
    """A recipe's own settings, and what changes its memory."""
    recompute = {"activation_checkpointing": True}
    sections = ["model"] if config.task == "classifier" else ["generator", "discriminator"]
    found = {"as it is": config}
    if all("activation_checkpointing" in vars(getattr(config, name)) for name in sections):
        found["checkpointing"] = config.changed(**{n: getattr(config, n).changed(**recompute) for n in sections})
    for precision in {"fp32", "bf16"} - {"bf16" if config.precision == "auto" else config.precision}:
        found[precision] = config.changed(precision=precision)
    return dict(sorted(found.items(), key=lambda item: ["as it is", "checkpointing", "bf16", "fp32"].index(item[0])))


def precision_of(task: Task) -> Precision:
    return next(part for part in task.registry().values() if isinstance(part, Precision))


def split_of_memory(found: Count) -> dict[str, float]:
    """GiB by what they are for."""
    held = dict.fromkeys(("weights", "average", "moments", "gradients"), 0.0)
    for part in found.task.registry().values():
        if isinstance(part, Updater):
            held["moments"] += _gib(dict(part.optimizer.state))
            held["gradients"] += _gib([parameter.grad for parameter in part.parameters])
        elif isinstance(part, EMA | nn.Module):
            held["average" if isinstance(part, EMA) else "weights"] += _gib(part.state_dict())
    return held | {"activations": found.peak / GIB - sum(held.values())}


def _gib(tree: Any) -> float:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)) / GIB


def saved_by_layer(found: Count, name: str, depth: int = 2) -> dict[str, float]:
    """MiB a sample that a network's forward pass saves for its backward pass, by layer. Storages count once, and the
    casts of weights by a sample's share of PASS.
    """
    network, inputs = found.task.networks()[name]
    inputs = tuple(x.repeat(PASS // len(x), *[1] * (x.ndim - 1)) for x in inputs)
    network = getattr(found.task, name, network) if name != "classifier" else found.task.model  # type: ignore[attr-defined]
    seen = {p.untyped_storage()._cdata for p in [*network.parameters(), *network.buffers()]}
    open_layers, saved = [""], defaultdict[str, float](float)
    handles = []
    for path, module in network.named_modules():
        if path and path.count(".") < depth:
            handles.append(module.register_forward_pre_hook(lambda _m, _i, path=path: open_layers.append(path)))
            handles.append(module.register_forward_hook(lambda *_: open_layers.pop() and None))
    keep: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if (key := tensor.untyped_storage()._cdata) not in seen:
            seen.add(key)
            keep.append(tensor)
            saved[open_layers[-1] or "outside"] += tensor.untyped_storage().nbytes() / 2**20 / len(inputs[0])
        return tensor

    precision = precision_of(found.task)
    with saved_tensors_hooks(pack, lambda tensor: tensor), precision.autocast():
        network(*inputs)
    for handle in handles:
        handle.remove()
    return dict(saved)


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(map(line, [heads, ["---"] * len(heads), *rows]))


def tables(names: list[str]) -> tuple[str, dict[str, float]]:
    """Everything about these presets, as Markdown and flat."""
    memory, phases, speeds, flat = [], [], [], {}
    for name in names:
        images, config = PRESETS[name], recipe(name)
        micro, multiple = config.micro(1), config.smallest_batch
        for label, variant in variants(config).items():
            alone = variant.changed(micro_batch=None)
            found, twice = counted(alone, images, micro), counted(alone, images, 2 * micro)
            split = [f"{gib:.2f}" for gib in split_of_memory(found).values()]
            most = [f"{largest(found, twice, gib, multiple):,}" for gib in MEMORIES]
            precision = precision_of(found.task).name
            memory.append([name, label, precision, str(micro), *split, f"{found.peak / GIB:.2f}", found.phase, *most])
            if label == "as it is":
                own, flat[f"{name}_peak_gib"] = found, found.peak / GIB
        work = [own.mean(lambda o: o.flop) / micro / 1e9, own.mean(lambda o: o.bytes) / micro / 1e9]
        flat[f"{name}_gflop_an_image"] = work[0]
        rates = [(micro / own.seconds(gpu), micro / own.seconds(gpu, graphs=True)) for gpu in GPUS]
        figures = [
            f"{eager:,.3g}, {graphs:,.3g} ({micro / own.roofline(gpu):,.3g})"
            for gpu, (eager, graphs) in zip(GPUS, rates, strict=True)
        ]
        flat |= {f"{name}_{gpu.name}_images_per_second": rate for gpu, (_, rate) in zip(GPUS, rates, strict=True)}
        operations = f"{own.mean(lambda _: 1.0):,.0f}"
        speeds.append([name, str(micro), f"{work[0]:,.3g}", f"{work[1]:,.3g}", operations, *figures])
        for phase in dict.fromkeys(o.phase for _, done in own.kinds for o in done):
            inside = own._replace(kinds=[(s, [o for o in done if o.phase == phase]) for s, done in own.kinds])
            part = [inside.mean(lambda o: o.flop) / micro / 1e9, inside.mean(lambda o: o.bytes) / micro / 1e9]
            share = inside.seconds(GPUS[1], graphs=True) / own.seconds(GPUS[1], graphs=True)
            phases.append([name, phase, f"{part[0]:,.3g}", f"{part[1]:,.3g}", f"{100 * share:.0f} %"])
    parts = ["weights", "average", "moments", "gradients", "activations and the rest", "peak", "reached in"]
    fits = [f"largest in {gib} GiB" for gib in MEMORIES]
    names_of = [gpu.name for gpu in GPUS]
    text = [
        table(["preset", "variant", "precision", "samples a pass", *parts, *fits], memory),
        table(["preset", "samples", "GFLOP an image", "GB an image", "operations a step", *names_of], speeds),
        table(["preset", "phase", "GFLOP an image", "GB an image", "share of the time, H100"], phases),
    ]
    return "\n\n".join(text), flat


def layers(names: list[str]) -> str:
    rows = []
    for name in names:
        found = counted(recipe(name).changed(micro_batch=None), PRESETS[name], recipe(name).smallest_batch)
        with fakes():
            for network in found.task.networks():
                saved = sorted(saved_by_layer(found, network).items(), key=lambda item: -item[1])
                text = ", ".join(f"{layer} {mib:.3g}" for layer, mib in saved[:8])
                rows.append([name, network, f"{sum(mib for _, mib in saved):.3g}", text])
    return table(["preset", "network", "MiB a sample", "of which, the eight largest layers"], rows)


def main(argv: list[str]) -> None:
    parser = Parser(prog="benchmarks/predictions.py", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"presets; default: {', '.join(NAMES)}")
    parser.add_argument("--fit", action="store_true", help="the published trainings instead")
    parser.add_argument("--expected", action="store_true", help="write benchmarks/gpu/expected.json instead")
    parser.add_argument("--layers", action="store_true", help="what each layer saves for the backward pass instead")
    parser.add_argument("--json", action="store_true", help="the last line is one flat JSON object")
    options = parser.parse_args(argv)
    if unknown := set(options.only or []) - set(PRESETS):
        raise UserError(f"--only {unknown.pop()}: no recipe of configs/; there are {', '.join(PRESETS)}")
    if options.fit:
        heads = ["training", "GPU", "ms a step, measured / model", "ratio", "GPU memory, published GB / model GiB"]
        print(table(heads, fit()))
        return
    if options.expected:
        document = expected()
        FILE.write_text(json.dumps(document, indent=1) + "\n")
        print(expected_table(document))
        return
    if options.layers:
        print(layers(options.only or NAMES))
        return
    text, flat = tables(options.only or NAMES)
    print(text)
    if options.json:
        print(json.dumps(flat))


if __name__ == "__main__":
    sys.exit(run_cli(main))
