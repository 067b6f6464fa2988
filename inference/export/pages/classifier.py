"""This folder's classifier, with torch and safetensors alone: nothing else of Duet is needed.

    from duet_model import load

    model = load()
    probabilities = model.probabilities(images)           # of uint8 [N, C, H, W] -> float64 [N, classes]
    names = [model.classes[i] for i in probabilities.argmax(1)]

The network is a program of torch.export (network.pt2), whose first input is the weights in model.safetensors.
config.json has the size and the rule of the images, the classes, and the names of the weights in order.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Classifier:
    """Images -> logits, one for each of `classes`."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.classes: list[str] = self.config["classes"]
        weights = load_file(folder / "model.safetensors")
        self.weights = [weights[name] for name in self.config["programs"]["network"]]
        self.network = torch.export.load(folder / "network.pt2").module()

    def __call__(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of float32 images [N, C, H, W] in [-1, 1]; normalisation happens inside. On the CPU."""
        with torch.no_grad():
            return self.network(self.weights, images)

    def probabilities(self, images: Tensor) -> Tensor:
        """[N, classes] of uint8 images [N, C, H, W], brought to size as config.json's `resize` says."""
        wanted = tuple(self.config["image"][key] for key in ("channels", "height", "width"))
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != wanted:
            raise ValueError(f"images are uint8 [N, {', '.join(map(str, wanted))}], not {images.dtype} {images.shape}")
        return self(images.float() / 127.5 - 1).double().softmax(1)


def load(folder: str | Path | None = None) -> Classifier:
    """The classifier of the folder, of the one that this file lies in unless said."""
    return Classifier(Path(folder or Path(__file__).parent))
