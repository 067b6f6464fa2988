"""How right a study's classifiers stay under attack and on spoiled images; arms are compared as in the study.

`python benchmarks/judges/robust.py STUDY --base ARM --arms ARM ...`, after `duet study distil --keep-runs true`. The
attack is foolbox's PGD (Madry et al. 2018, 1706.06083; L-infinity, random start, `--steps` of a tenth of epsilon) on
`--n` test images, spread evenly over the file. Spoiled: evaluate.py's five corruptions at five strengths, on the first
`--spoiled` images. Effects: an arm less the base, by seed and image; p is corrected for the arms of a column (Holm).
"""

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor

from duetgan.data.opening import dataset_for_model
from duetgan.data.reading.loader import read_batch
from duetgan.extras.robustness.measure import corrupted_hits
from duetgan.extras.studies.seeds_and_images import by_seeds_and_images
from duetgan.extras.studies.subject import slug
from duetgan.metrics.comparison.paired import by_seeds, holm
from duetgan.metrics.features.precision import device_of, evaluating
from duetgan.models.classifier import Classifier
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.cli import Parser, positive
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError

SPOILED = "spoiled"
BATCH = 250


def withstood(
    classifier: Classifier, images: Tensor, labels: Tensor, *, budgets: list[float], steps: int
) -> dict[str, np.ndarray]:
    """Whether each image uint8 [n, C, H, W] is named rightly as it is, and still after PGD: bool [n] by budget, that is
    in 255ths of the range.
    """
    import foolbox

    attack = foolbox.attacks.LinfPGD(steps=steps, rel_stepsize=0.1, random_start=True)
    device = device_of(classifier)
    parts: dict[str, list[Tensor]] = {f"{budget:g}/255": [] for budget in [0, *budgets]}
    with evaluating(classifier), torch.enable_grad():
        model = foolbox.PyTorchModel(classifier, bounds=(-1, 1), device=device)
        for first in range(0, len(images), BATCH):
            inputs = classifier.spec.to_float(images[first : first + BATCH]).to(device)
            truth = labels[first : first + BATCH].to(device)
            with torch.no_grad():
                clean = classifier(inputs).argmax(1) == truth
            _, _, fooled = attack(model, inputs, truth, epsilons=[2 * budget / 255 for budget in budgets])
            for rows, right in zip(parts.values(), [clean, *(clean & ~each for each in fooled)], strict=True):
                rows.append(right.cpu())
    return {name: torch.cat(rows).numpy() for name, rows in parts.items()}


def kept(study: Path, arm: str) -> dict[str, Path]:
    """The runs of an arm that have their checkpoints, by seed. Raises UserError where there is none."""
    runs = {path.parent.name.rpartition("-s")[2]: path for path in study.glob(f"runs/{slug(arm)}-s[0-9]*/run")}
    found = {seed: run for seed, run in sorted(runs.items()) if (run / "checkpoints").is_dir()}
    if not found:
        raise UserError(f"{study}: no run of {arm!r} is kept; run the study with --keep-runs true")
    return found


def spread(count: int, n: int) -> np.ndarray:
    """n of `count` records, evenly: files are often packed class by class."""
    return np.linspace(0, count - 1, min(n, count)).astype(np.int64)


def judge(run: Path, test: Path, options: Any) -> dict[str, np.ndarray]:
    """Of one run: hits by budget, bool [n], and the mean accuracy on spoiled images, [1]."""
    torch.manual_seed(0)  # of the random starts
    checkpoint = load(resolve(str(run)))
    classifier = classifier_from(checkpoint, choose_device(options.device))
    with dataset_for_model(str(test), checkpoint) as reader:
        some, records = (spread(len(reader), n) for n in (options.n, options.spoiled))
        chosen = read_batch(reader, some)
        with torch.autocast(device_of(classifier).type, torch.bfloat16, enabled=options.bf16):
            hits = withstood(classifier, chosen.images, chosen.labels, budgets=options.budgets, steps=options.steps)
            spoiled = corrupted_hits(classifier, reader, seed=0, records=records, batch_size=BATCH)
        return hits | {SPOILED: np.array([float(spoiled.double().mean()) / len(records)])}


def effects(found: dict[str, list[dict[str, np.ndarray]]], base: str) -> list[dict[str, Any]]:
    """Of each arm and column against the base."""
    rows: list[dict[str, Any]] = []
    for column in found[base][0]:
        tests = []
        for arm in [name for name in found if name != base]:
            one, other = (np.stack([seed[column] for seed in found[name]]) for name in (base, arm))
            weights = np.full(one.shape[1], 1 / one.shape[1])
            alone = column == SPOILED
            test = (
                by_seeds(one[:, 0].tolist(), other[:, 0].tolist())
                if alone
                else by_seeds_and_images(one, other, weights)
            )
            tests.append({"arm": arm, "column": column, **asdict(test)})
        holm(tests)
        rows += tests
    return rows


def main(argv: list[str]) -> None:
    parser = Parser(prog="benchmarks/judges/robust.py", description=__doc__)
    parser.add_argument("study", type=Path, help="the folder of a study that has kept its runs")
    parser.add_argument("--base", required=True, help="the arm that the others are compared with")
    parser.add_argument("--arms", nargs="+", required=True)
    parser.add_argument("--budgets", nargs="+", type=float, default=[1.0, 2.0, 4.0], help="of the attack, in 255ths")
    parser.add_argument("--n", type=positive, default=500, help="test images that are attacked")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--spoiled", type=positive, default=2000, help="test images that are spoiled, the first ones")
    parser.add_argument("--bf16", action="store_true", help="attack and judge in bf16, as trainings in bf16 run")
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args(argv)
    runs = {arm: kept(options.study, arm) for arm in [options.base, *options.arms]}
    if len({tuple(of) for of in runs.values()}) > 1:
        raise UserError(f"{options.study}: not all arms have kept the same seeds; run the study to its end")
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    for arm, of in runs.items():
        found[arm] = [judge(run, options.study / "jobs/parts/test.lmdb", options) for run in of.values()]
        means = {name: statistics.fmean(float(seed[name].mean()) for seed in found[arm]) for name in found[arm][0]}
        print(f"{arm:40}", "  ".join(f"{name} {mean:.4f}" for name, mean in means.items()), flush=True)
    rows = effects(found, options.base)
    for row in rows:
        sure = " to ".join(f"{end:+.4f}" for end in row["interval"] or [])
        print(f"{row['column']:8} {row['arm']:40} {row['difference']:+.4f} ({sure}), p {row['p']}")
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(run_cli(main))
