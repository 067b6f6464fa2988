"""What an expert would write in twenty lines: logistic regression on an ImageNet network's features of a folder.

`python benchmarks/folders/sklearn_script.py RUN FOLDER [--weights FILE]`: RUN is the quickstart's folder of results for
FOLDER. Its packed data name the files that it trained on and held out; these are read anew, at 224 px.
"""

import json
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torchvision.transforms import v2

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.metrics.features.extractors import load_resnet50, needed_weights
from duetgan.metrics.intervals import wilson
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli

SQUARE = [v2.Resize(224), v2.CenterCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
TRANSFORM = v2.Compose([*SQUARE, v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])


def main(argv: list[str]) -> None:
    parser = Parser(prog="sklearn_script.py", description="Logistic regression on features, on the quickstart's split.")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", metavar="FILE")
    options = parser.parse_args(argv)
    started = time.perf_counter()
    network = load_resnet50(needed_weights(options.weights, "the script needs a network"))
    network = network.to(memory_format=torch.channels_last)

    def features(split: str) -> tuple[np.ndarray, np.ndarray]:
        with LMDBReader(options.run / "data" / f"{split}.lmdb") as reader:
            names, labels = reader.names(), reader.labels()
        rows = []
        for start in range(0, len(names), 32):
            images = [Image.open(options.folder / name).convert("RGBA") for name in names[start : start + 32]]
            white = [Image.alpha_composite(Image.new("RGBA", image.size, "white"), image) for image in images]
            inputs = torch.stack([TRANSFORM(image.convert("RGB")) for image in white])
            with torch.inference_mode():
                rows.append(network(inputs.contiguous(memory_format=torch.channels_last)).numpy())
        return np.concatenate(rows), labels

    (x, y), (x_test, y_test) = features("train"), features("test")
    folds = int(min(5, max(2, np.bincount(y).min())))
    warnings.filterwarnings("ignore")  # classes of fewer images than folds, and what will change in scikit-learn
    model = LogisticRegressionCV(Cs=np.logspace(-4, 0, 5), cv=folds, max_iter=300)
    hits = make_pipeline(StandardScaler(), model).fit(x, y).predict(x_test) == y_test
    figures = {"accuracy": hits.mean(), "interval": wilson(int(hits.sum()), len(hits)), "n": len(hits)}
    print(json.dumps(figures | {"seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    sys.exit(run_cli(main))
