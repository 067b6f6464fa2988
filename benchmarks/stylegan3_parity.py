"""The differences between NVIDIA's stylegan3 program and Duet for the same files, on the CPU.

`python benchmarks/stylegan3_parity.py CHECKOUT [--keep DIR] [--json]`; CHECKOUT is a folder with the program
stylegan3, whose own classes make small networks of random weights and write them as its train.py does. `duet convert`
reads each file. The last columns of the table are largest absolute differences of fp32 outputs, and the largest value.
"""

import json
import pickle
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from packaging import version
from torch import Tensor

from duetgan.extras.official import convert
from duetgan.models.gan import ImageDiscriminator, StyledGenerator
from duetgan.models.restore import discriminator_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError

SIZES: dict[str, Any] = {"z_dim": 24, "w_dim": 32, "img_channels": 3, "channel_base": 512, "channel_max": 24}
R: dict[str, Any] = {"conv_kernel": 1, "use_radial_filters": True, "channel_base": 1024, "channel_max": 48}
SMALL: dict[str, Any] = {"num_layers": 5, "margin_size": 4}
# case -> (module of the generator, its arguments)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "T, 64 px": ("3", {"img_resolution": 64, "c_dim": 0}),
    "R, 64 px": ("3", {"img_resolution": 64, "c_dim": 0, **R}),
    "T, 32 px, 3 classes": ("3", {"img_resolution": 32, "c_dim": 3, "magnitude_ema_beta": 0.9}),
    "R, 32 px, 3 classes": ("3", {"img_resolution": 32, "c_dim": 3, **R}),
    "T, 16 px, small": ("3", {"img_resolution": 16, "c_dim": 0, **SMALL, "conv_clamp": 0.5}),
    "R, 16 px, small, 3 classes": ("3", {"img_resolution": 16, "c_dim": 3, **SMALL, **R}),
    "stylegan2, 32 px": ("2", {"img_resolution": 32, "c_dim": 0}),
    "stylegan2, 32 px, 3 classes": ("2", {"img_resolution": 32, "c_dim": 3}),
    "stylegan2, 16 px, beyond 256": ("2", {"img_resolution": 16, "c_dim": 0}),
}
SAMPLES = 4


def draw(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).randn(*shape)).float()


def fill(tensors: Mapping[str, Tensor], loud: float = 1.0) -> None:
    """Set every tensor of a network, by NVIDIA's names, to random numbers that depend on its name only.

    Filters and the transform stay. `loud` scales biases and the strength of the noise.
    """
    for name, tensor in tensors.items():
        if name.endswith(("filter", "transform")):
            continue
        noise = draw(tensor.numel(), seed=zlib.crc32(name.encode())).view(tensor.shape)
        if name.endswith("magnitude_ema"):
            noise = noise.abs() + 0.5
        elif name.endswith("affine.bias"):
            noise = 1 + 0.5 * noise
        elif ".fc" in name and "b4" not in name:
            noise = noise * (100 if name.endswith("weight") else 30)
        elif name.endswith(("bias", "noise_strength")):
            noise = noise * 0.3 * loud
        tensor.data.copy_(noise)


def write(path: Path, kind: str, arguments: dict[str, Any], loud: float) -> dict[str, Any]:
    """Write a file with NVIDIA's G, D and G_ema, and return them."""
    import dnnlib  # type: ignore[import-not-found]

    modules = {"2": "training.networks_stylegan2.Generator", "3": "training.networks_stylegan3.Generator"}
    arguments = {**SIZES, **arguments, "mapping_kwargs": dnnlib.EasyDict()}
    if kind == "2":
        arguments["mapping_kwargs"].num_layers = 2
    images = {name: arguments[name] for name in ("img_resolution", "img_channels", "c_dim")}
    d = {**images, "channel_base": 512, "channel_max": 24, "epilogue_kwargs": dnnlib.EasyDict(mbstd_group_size=4)}
    d |= {"block_kwargs": dnnlib.EasyDict(freeze_layers=0), "mapping_kwargs": dnnlib.EasyDict()}
    networks: dict[str, Any] = {}
    for name in ("G", "D", "G_ema"):
        given = {"class_name": "training.networks_stylegan2.Discriminator", **d}
        if name != "D":
            given = {"class_name": modules[kind], **arguments}
        network = dnnlib.util.construct_class_by_name(**given).eval().requires_grad_(False)
        state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        fill(state, 1.0 if name == "D" else loud)
        networks[name] = network
    content = {**networks, "training_set_kwargs": dnnlib.EasyDict(path="x.zip"), "augment_pipe": None}
    with path.open("wb") as file:
        pickle.dump(content, file)
    return networks


def gradient(images: Callable[[Tensor], Tensor], ws: Tensor) -> Tensor:
    ws = ws.clone().requires_grad_()
    return torch.autograd.grad(images(ws).square().mean(), ws)[0]


def compare(networks: dict[str, Any], ours: StyledGenerator, critic: ImageDiscriminator, kind: str) -> dict[str, Any]:
    """Return the largest differences by output."""
    theirs = networks["G_ema"]
    z = draw(SAMPLES, SIZES["z_dim"], seed=100)
    c = torch.zeros(SAMPLES, 0)
    labels = None
    if ours.classes:
        labels = torch.arange(SAMPLES) % ours.classes
        c = torch.nn.functional.one_hot(labels, ours.classes).float()
    options = {"noise_mode": "const", "force_fp32": True}
    ws = theirs.mapping(z, c)
    mixed = torch.cat([ws[:, :3], theirs.mapping(z.flip(0), c)[:, 3:]], dim=1)
    cut = {"truncation_psi": 0.6, "truncation_cutoff": 4}

    def their_images(ws: Tensor) -> Tensor:
        return theirs.synthesis(ws, **options)

    def our_images(ws: Tensor) -> Tensor:
        return ours.synthesis(ws, "const")

    images = their_images(ws)
    pairs = {
        "w": (ws[:, 0], ours.mapping(z, labels)),
        "images": (images, ours(z, labels, noise="const")),
        "truncated": (
            theirs(z, c, **cut, **options),
            ours(z, labels, noise="const", truncation_mean="global", **cut),
        ),
        "mixed": (their_images(mixed), our_images(mixed)),
        "gradient": (gradient(their_images, mixed), gradient(our_images, mixed)),
        "logits": (networks["D"](images, c, force_fp32=True)[:, 0], critic(images, labels)),
    }
    if kind == "3":
        angle = 0.7
        motion = torch.tensor([[np.cos(angle), -np.sin(angle), 0.2], [np.sin(angle), np.cos(angle), -0.1], [0, 0, 1]])
        moved: Any = ours
        theirs.synthesis.input.transform.copy_(motion)
        moved.input.transform.copy_(motion)
        pairs["moved"] = (their_images(ws), our_images(ws))
        theirs.synthesis.input.transform.copy_(torch.eye(3))
    row: dict[str, Any] = {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}
    # Gradients are far smaller than 1.
    row["gradient"] /= float(pairs["gradient"][0].abs().max())
    return row | {"largest": float(images.abs().max())}


def fixture(generator: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what a test without the program needs: arguments, tensors' shapes, filters, pixels of the first sample."""
    shapes: dict[str, list[int]] = {}
    filters: dict[str, Any] = {}
    for name, tensor in generator.state_dict().items():
        if name.endswith("filter"):
            filters[name] = tensor.tolist()
        else:
            shapes[name] = list(tensor.shape)
    c = torch.eye(arguments["c_dim"])[:1] if arguments["c_dim"] else torch.zeros(1, 0)
    pixels = generator(draw(1, SIZES["z_dim"], seed=100), c, force_fp32=True)[0, :, ::5, ::5]
    return {"arguments": arguments, "shapes": shapes, "filters": filters, "pixels": pixels.tolist()}


def main(argv: list[str]) -> int:
    options = Parser(prog="stylegan3_parity.py", description=__doc__)
    options.add_argument("checkout", type=Path, help="folder with NVIDIA's stylegan3")
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep the files there")
    options.add_argument("--fixture", type=Path, metavar="FILE", help="write the tests' golden.json of the small cases")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    values = options.parse_args(argv)
    if not (values.checkout / "training" / "networks_stylegan3.py").is_file():
        raise UserError(f"{values.checkout}: is no checkout of stylegan3")
    sys.path.insert(0, str(values.checkout))
    # The program reads torch's version with it, and setuptools no longer has it.
    sys.modules.setdefault("pkg_resources", SimpleNamespace(parse_version=version.parse))  # type: ignore[arg-type]
    torch.set_grad_enabled(True)
    rows: dict[str, dict[str, Any]] = {}
    fixtures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = values.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, (kind, arguments)) in enumerate(CASES.items()):
            path = folder / f"{number}.pkl"
            networks = write(path, kind, arguments, 500.0 if "beyond" in name else 1.0)
            convert.main([str(path), str(folder / f"run-{number}")])
            checkpoint = load(resolve(folder / f"run-{number}"))
            generator: Any = generator_from(checkpoint)
            rows[name] = compare(networks, generator, discriminator_from(checkpoint), kind)
            if "small" in name:
                fixtures[name] = fixture(networks["G_ema"], {**SIZES, **arguments})
    if values.fixture is not None:
        values.fixture.write_text(json.dumps(fixtures) + "\n")
    if values.json:
        print(json.dumps(rows))
        return 0
    columns = ("w", "images", "truncated", "mixed", "moved", "gradient", "logits", "largest")
    print("\n| network | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{row[column]:.1e}" if column in row else "" for column in columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
