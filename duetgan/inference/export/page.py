"""The network of this folder, with torch and safetensors alone: nothing else of Duet is needed.

    from duet_model import load

    model = load() probabilities = model.probabilities(images)     # a classifier: of uint8 [N, C,
    H, W] -> float64 [N, classes] names = [model.classes[i] for i in probabilities.argmax(1)]

    images = model.samples(16, seed=0)              # a generator: uint8 [16, C, H, W], those of
    Duet's generate.py images = model(z, labels, truncation_psi=0.7)   # towards the class's mean;
    float32 [N, C, H, W] in about [-1, 1]

The networks are programs of torch.export (.pt2), whose first input is the weights in
model.safetensors. config.json has the sizes, the rule of the images, the classes, and the names of
each program's weights in order.
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
    """The programs of a folder and their weights."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.classes: list[str] = self.config["classes"]
        self.weights = load_file(folder / "model.safetensors")
        self.programs = {
            name: torch.export.load(folder / f"{name}.pt2").module()
            for name in self.config["programs"]
        }

    def run(self, program: str, *inputs: Tensor | list[Tensor]) -> Tensor:
        """A program's output; it is for the CPU."""
        weights = [self.weights[name] for name in self.config["programs"][program]]
        with torch.no_grad():
            return self.programs[program](weights, *inputs)


class Classifier(Network):
    """Images -> logits, one for each of `classes`."""

    def __call__(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of float32 images [N, C, H, W] in [-1, 1]; normalisation happens
        inside.
        """
        return self.run("network", images)

    def probabilities(self, images: Tensor) -> Tensor:
        """[N, classes] of uint8 images [N, C, H, W], brought to size as config.json's `resize`
        says.
        """
        wanted = tuple(self.config["image"][key] for key in ("channels", "height", "width"))
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != wanted:
            raise ValueError(
                f"images are uint8 [N, {', '.join(map(str, wanted))}], not {images.dtype} {images.shape}"
            )
        return self(images.float() / 127.5 - 1).double().softmax(1)


class Generator(Network):
    """With styles (`mapping`, `synthesis`), or in one piece (`generator`), which has neither
    truncation nor noise.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.means: dict[str, Tensor] = {}  # label -> the mean w of its class

    def __call__(
        self,
        z: Tensor,  # float32 [N, z_dim], normal
        labels: Tensor | None = None,  # int64 [N], places in `classes`; None without classes
        # centre + psi (w - centre): less varied and more typical below 1
        truncation_psi: float = 1.0,
        # the stored maps, "none", or a map [N, 1, H, W] for each layer
        noise: str | Sequence[Tensor] = "const",
        # the centre: the mean w of the image's class, or "global": of all images
        truncation_mean: str = "class",
    ) -> Tensor:
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
        """What w is truncated towards, [N, w_dim] or [w_dim], as in Duet; computed once for a
        class.
        """
        if labels is None or mean == "global":
            return self.weights["w_avg"]
        rows, places = labels.unique(dim=0, return_inverse=True)
        for row in rows:
            if str(row.tolist()) not in self.means:
                z = torch.randn(
                    10_000, self.config["z_dim"], generator=_keyed("int:0", "str:class mean")
                )
                self.means[str(row.tolist())] = self.run(
                    "mapping", z, row.expand(len(z), *row.shape)
                ).mean(dim=0)
        return torch.stack([self.means[str(row.tolist())] for row in rows])[places]

    def synthesis(self, ws: Tensor, noise: str | Sequence[Tensor] = "const") -> Tensor:
        """Images of a style for each layer, ws [N, num_ws, w_dim]."""
        if isinstance(noise, str):
            stored = [self.weights[name].repeat(len(ws), 1, 1, 1) for name in self.config["noise"]]
            noise = stored if noise == "const" else [torch.zeros_like(x) for x in stored]
        return self.run("synthesis", ws, list(noise))

    def samples(
        self, count: int, seed: int = 0, truncation_psi: float = 1.0, truncation_mean: str = "class"
    ) -> Tensor:
        """uint8 [count, C, H, W]: sample i depends on (seed, i) alone; the classes go round."""
        shapes = [self.weights[name].shape[1:] for name in self.config["noise"]]
        sizes = [self.config["z_dim"], *(shape.numel() for shape in shapes)]
        keys = [_keyed(f"int:{seed}", "str:eval", f"int:{i}") for i in range(count)]
        z, *maps = torch.stack([torch.randn(sum(sizes), generator=key) for key in keys]).split(
            sizes, dim=1
        )
        labels = torch.arange(count) % len(self.classes) if self.config["conditional"] else None
        noise = [x.reshape(-1, *shape) for x, shape in zip(maps, shapes, strict=True)]
        images = self(z, labels, truncation_psi, noise, truncation_mean)
        return (images * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)


def _keyed(*key: str) -> torch.Generator:
    """Duet's rule: a draw's seed is the hash of its key."""
    digest = hashlib.blake2b("\x1f".join(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def load(folder: str | Path | None = None) -> Any:
    """The Classifier or Generator of the folder, of the one that this file lies in unless said."""
    place = Path(folder or Path(__file__).parent)
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    return {"classifier": Classifier, "gan": Generator}[config["task"]](place)
