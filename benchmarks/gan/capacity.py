"""How wide a GAN of 32 px should be for a given time: a law fitted to evaluated runs of several widths and lengths.

`python benchmarks/gan/capacity.py RUN... [--minutes M...]`. Each RUN has been trained to its end (the rate with it) and
evaluated by `evaluate.py`. Fitted is the Frechet distance over its floor, d = e + A channels^-a kimg^-b with e of 1 or
more, in logarithms. Printed: the law, how far it is from each run when that is left out, and what it expects of each
width after so many minutes at the speed that the runs of that width had.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from scipy.optimize import least_squares

from duetgan.utils.config.cli import Parser
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import exit_cli
from duetgan.utils.text import columns

SIDE = 32  # px


def law(theta: np.ndarray, channels: np.ndarray, kimg: np.ndarray) -> np.ndarray:
    """d of theta = (ln (e - 1), ln A, a, b)."""
    return 1 + np.exp(theta[0]) + np.exp(theta[1]) * channels ** -theta[2] * kimg ** -theta[3]


def fit(channels: np.ndarray, kimg: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Least squares of ln d."""

    def residuals(theta: np.ndarray) -> np.ndarray:
        return np.log(law(theta, channels, kimg)) - np.log(over)

    return least_squares(residuals, np.array([-2.0, 4.0, 0.5, 0.8])).x


def read(run: Path) -> tuple[float, float, float, float]:
    """Channels at 32 px, thousand images, distance over the floor, and images/s of a run."""
    config = read_yaml(run / "config.yaml")
    first = json.loads((run / "eval" / "metrics.json").read_text())["distances"][0]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speed = float(np.median([row["images_per_second"] for row in rows if "images_per_second" in row]))
    channels = min(config["generator"]["channel_base"] // SIDE, config["generator"]["channel_max"])
    return channels, config["steps"] * config["batch_size"] / 1000, first["frechet"] / first["floor"], speed


def main(argv: list[str]) -> None:
    parser = Parser(prog="benchmarks/gan/capacity.py", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--minutes", nargs="+", type=float, default=[5, 15, 60])
    options = parser.parse_args(argv)
    channels, kimg, over, speed = map(np.array, zip(*map(read, options.runs), strict=True))
    theta = fit(channels, kimg, over)
    e, gain = 1 + np.exp(theta[0]), np.exp(theta[1])
    print(f"d = {e:.3g} + {gain:.3g} channels^-{theta[2]:.2f} kimg^-{theta[3]:.2f}")
    told = [("channels", "kimg", "d", "law", "law without it")]
    for at, (c, k, d) in enumerate(zip(channels, kimg, over, strict=True)):
        others = fit(*(np.delete(each, at) for each in (channels, kimg, over)))
        told.append((f"{c}", f"{k:g}", f"{d:.2f}", f"{law(theta, c, k):.2f}", f"{law(others, c, k):.2f}"))
    print(columns(told))
    widths = {int(c): float(np.median(speed[channels == c])) for c in sorted(set(channels))}
    print(", ".join(f"{c} channels {each:.0f} images/s" for c, each in widths.items()))
    for minutes in options.minutes:
        each = {c: float(law(theta, np.array(c), np.array(60 * minutes * s / 1000))) for c, s in widths.items()}
        print(f"{minutes:g} minutes: " + ", ".join(f"{c}: {d:.2f}" for c, d in each.items()))


if __name__ == "__main__":
    exit_cli(main)
