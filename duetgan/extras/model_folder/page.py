"""The network of this folder, with torch and safetensors only; Duet is not needed.

    from duet_model import load

    model = load()

    # a classifier: uint8 [N, C, H, W] -> float64 [N, classes]
    probabilities = model.probabilities(images)
    names = [model.classes[i] for i in probabilities.argmax(1)]

    # a generator: uint8 [16, C, H, W], the samples of Duet's generate.py
    images = model.samples(16, seed=0)
    # float32 [N, C, H, W] in about [-1, 1], truncated towards the mean of each class
    images = model(z, labels, truncation_psi=0.7)

The networks are programs of torch.export (.pt2), whose first input is the weights in
model.safetensors. config.json has the sizes, the preparation of images, the classes, and the names
of each program's weights in order.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Network:
    """The exported programs of a folder, with their weights."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.classes: list[str] = self.config["classes"]
        self.weights = load_file(folder / "model.safetensors")
        self.programs = {
            name: torch.export.load(folder / f"{name}.pt2").module()
            for name in self.config["programs"]
        }

    def run(self, program: str, *inputs: Tensor | list[Tensor]) -> Tensor:
        """Return the output of a program for inputs on the CPU."""
        weights = [self.weights[name] for name in self.config["programs"][program]]
        with torch.no_grad():
            return self.programs[program](weights, *inputs)


class Classifier(Network):
    """A classifier: images -> logits in the order of `classes`."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits [N, classes] of float32 images [N, C, H, W] in [-1, 1], which the
        network normalises itself.
        """
        return self.run("network", images)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities [N, classes] of uint8 images [N, C, H, W], which must be resized
        as `resize` in config.json says.
        """
        shape = tuple(self.config["image"][key] for key in ("channels", "height", "width"))
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != shape:
            size = ", ".join(map(str, shape))
            raise ValueError(f"images are uint8 [N, {size}], not {images.dtype} {images.shape}")
        return self(images.float() / 127.5 - 1).double().softmax(1)


class Generator(Network):
    """A generator of two programs, `mapping` and `synthesis`, or of one, `generator`, which has
    neither truncation nor noise.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.means: dict[str, Tensor] = {}  # label -> the mean w of its class

    def __call__(
        self,
        z: Tensor,  # float32 [N, z_dim], normal
        labels: Tensor | None = None,  # int64 [N], indices into `classes`; None without classes
        # w becomes centre + psi (w - centre): below 1, images are less varied and more typical
        truncation_psi: float = 1.0,
        # "const": the stored maps; "none"; or a map [N, 1, H, W] for each layer
        noise: str | Sequence[Tensor] = "const",
        # the centre: the mean w of the image's class, or of all images ("global")
        truncation_mean: str = "class",
    ) -> Tensor:
        """Return images [N, C, H, W] in about [-1, 1]."""
        inputs = (z,) if labels is None else (z, labels)
        if "generator" in self.programs:
            if truncation_psi != 1:
                raise ValueError("this generator has no w to truncate; leave truncation_psi at 1")
            return self.run("generator", *inputs)
        w = self.run("mapping", *inputs)
        if truncation_psi != 1:
            w = self.centre(labels, truncation_mean).lerp(w, truncation_psi)
        return self.synthesis(w[:, None].repeat(1, self.config["num_ws"], 1), noise)

    def centre(self, labels: Tensor | None, mean: str = "class") -> Tensor:
        """Return the centre of truncation, [N, w_dim] or [w_dim], as Duet computes it. The mean of
        a class is computed once.
        """
        if labels is None or mean == "global":
            return self.weights["w_avg"]
        distinct, indices = labels.unique(dim=0, return_inverse=True)
        means = []
        for label in distinct:
            key = str(label.tolist())
            if key not in self.means:
                random = _keyed("int:0", "str:class mean")
                z = torch.randn(10_000, self.config["z_dim"], generator=random)
                w = self.run("mapping", z, label.expand(len(z), *label.shape))
                self.means[key] = w.mean(dim=0)
            means.append(self.means[key])
        return torch.stack(means)[indices]

    def synthesis(self, ws: Tensor, noise: str | Sequence[Tensor] = "const") -> Tensor:
        """Return the images of ws [N, num_ws, w_dim], which have a style for each layer."""
        if isinstance(noise, str):
            stored = [self.weights[name].repeat(len(ws), 1, 1, 1) for name in self.config["noise"]]
            noise = stored if noise == "const" else [torch.zeros_like(x) for x in stored]
        return self.run("synthesis", ws, list(noise))

    def samples(
        self, count: int, seed: int = 0, truncation_psi: float = 1.0, truncation_mean: str = "class"
    ) -> Tensor:
        """Draw samples uint8 [count, C, H, W] of all classes in turn. Sample i depends only on
        (seed, i).
        """
        shapes = [self.weights[name].shape[1:] for name in self.config["noise"]]
        sizes = [self.config["z_dim"], *(shape.numel() for shape in shapes)]
        rows = []
        for i in range(count):
            random = _keyed(f"int:{seed}", "str:eval", f"int:{i}")
            rows.append(torch.randn(sum(sizes), generator=random))
        z, *maps = torch.stack(rows).split(sizes, dim=1)
        labels = torch.arange(count) % len(self.classes) if self.config["conditional"] else None
        noise = [x.reshape(-1, *shape) for x, shape in zip(maps, shapes, strict=True)]
        images = self(z, labels, truncation_psi, noise, truncation_mean)
        return (images * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)


def _keyed(*key: str) -> torch.Generator:
    """Return a generator seeded with the hash of a key, as all random numbers of Duet are."""
    digest = hashlib.blake2b("\x1f".join(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def load(folder: str | Path | None = None) -> Any:
    """Load the Classifier or Generator of a folder, by default that of this file."""
    folder = Path(folder or Path(__file__).parent)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {"classifier": Classifier, "gan": Generator}[config["task"]](folder)
