"""Time to quality: after how many images and seconds of training a GAN came within given multiples of the floor.

`python benchmarks/time_to_quality.py RUN... [--multiples 8 4 2.8] [--extractor resnet50] [--n N] [--seed N] [--json]`.
Every kept checkpoint of a run is evaluated as evaluate.py does it: the Frechet distance of samples and test images,
over that of training and test images, the floor. Where metrics.jsonl has the figure already (same extractor, n and
seed) it is taken, and no sample is drawn but of the last checkpoint, whose evaluation gives the floor too. Only these
steps are looked at: a multiple was reached at the first of them that is there, or somewhere between the one before and
it. `train.py --checkpoint.keep_every N` keeps more of them. Seconds are those of steps alone, without evaluations, as
metrics.jsonl counts images per second.
"""

import json
import os
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from duetgan.data.opening import dataset_for_model
from duetgan.metrics.evaluate_gan import evaluate_generator, flattered
from duetgan.metrics.features.extractors import RealFeatures, build_extractors
from duetgan.metrics.lineage import training_images
from duetgan.metrics.protocol import GAN_IMAGES
from duetgan.models.restore import generator_from
from duetgan.reporting.run_files import Run
from duetgan.utils.checkpoint import Checkpoint, load, newest_first, step_of
from duetgan.utils.checkpoint.provenance import recorded
from duetgan.utils.config.cli import Parser, positive
from duetgan.utils.config.yaml_files import near_file
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.machine import cores

MULTIPLES = (8.0, 4.0, 2.8)
FRECHET = "val/frechet/"  # before the extractor's name, in metrics.jsonl


@dataclass(frozen=True)
class Course:
    """What is known of a run's training: its distances, and when its steps were made."""

    distances: dict[int, float]  # step -> Frechet distance, ascending
    floor: float
    n: int  # images on each side of the distances
    read: int  # of the distances were in metrics.jsonl
    clock: np.ndarray  # float64 [3, rows]: steps, images and seconds of training

    def when(self, step: int) -> tuple[int, float]:
        """Images and seconds of training up to a step."""
        steps, images, seconds = self.clock
        return round(float(np.interp(step, steps, images))), float(np.interp(step, steps, seconds))

    def reached(self, multiple: float) -> tuple[int | None, int | None]:
        """The first step whose distance is at most so many floors, None where there is none; the step before it."""
        before = None
        for step, distance in self.distances.items():
            if distance <= multiple * self.floor:
                return step, before
            before = step
        return None, before


def clock_of(records: list[dict[str, Any]]) -> np.ndarray:
    """The steps, images and seconds of training of rows of metrics.jsonl, float64 [3, rows]. UserError for no row."""
    rows = [(0, 0, 0.0)]
    for record in records:
        _, images, seconds = rows[-1]
        rate = record.get("images_per_second")
        if rate and record["images"] > images:
            rows.append((record["step"], record["images"], seconds + (record["images"] - images) / rate))
    if len(rows) == 1:
        raise UserError("its metrics.jsonl has no row with images_per_second; name a run folder of train.py")
    return np.array(rows).T


def known_distances(
    checkpoint: Checkpoint,
    records: list[dict[str, Any]],  # of metrics.jsonl
    n: int,  # images on each side
    options: Namespace,
) -> dict[int, float]:
    """Step -> distance, of the evaluations during training where they are those asked for, else none. `n` is asked of
    each row: a resumed run may have another than before.
    """
    config = checkpoint["config"]
    during = config.get("evaluation") or {}
    own = during.get("extractor"), during.get("weights"), config.get("seed")
    key = f"{FRECHET}{options.extractor}"
    if own != (options.extractor, options.weights, options.seed):
        return {}
    return {row["step"]: row[key] for row in records if row.get(key) is not None and row.get("val/n") == n}


def course_of(run: Path, options: Namespace, real: RealFeatures) -> Course:
    """Evaluate what is not known yet of a run. Raises UserError where it has no checkpoint of a GAN, no test images or
    no training images.
    """
    paths = newest_first(run / "checkpoints")
    if not paths:
        raise UserError(f"{run}: no run folder with checkpoints{near_file(run)}")
    records, device = Run(run).records, choose_device(options.device)
    asked = Namespace(classifier=None, extractor=[options.extractor], weights=options.weights)
    last = load(paths[0])
    data = (last["config"].get("data") or {}).get("val_path")
    if last["task"] != "gan" or not data:
        raise UserError(f"{run}: needs a GAN whose config names data.val_path, the test images")
    with ExitStack() as stack:
        reader = stack.enter_context(dataset_for_model(data, last))
        train, why = training_images(last)
        if train is None:
            raise UserError(f"{run}: the floor cannot be measured: {why}")
        stack.enter_context(train)
        (extractor,) = build_extractors(asked, reader.spec, device, None)
        for note in flattered([extractor], recorded(last), None).values():
            print(f"{run}: {extractor.name}: {note}", file=sys.stderr)
        n = min(options.n, len(reader), len(train))
        distances = known_distances(last, records, n, options)
        read = len(distances)

        def evaluate(checkpoint: Checkpoint, *, floor: bool) -> dict[str, Any]:
            how: Any = {"floor": floor, "details": False, "searched": 0, "batch_size": options.batch_size, "show": True}
            sides: Any = {"train_dataset": train if floor else None, "real": real, "n": n, "seed": options.seed}
            generator = generator_from(checkpoint, device)
            found = evaluate_generator(generator, reader, extractors=[extractor], **sides, **how)
            return dict(found["distances"][0])

        first = evaluate(last, floor=True)
        if first["floor"] is None:
            raise UserError(f"{run}: data.path and data.val_path hold the same images; the floor needs two sets")
        distances.setdefault(last["step"], first["frechet"])
        for path in paths[1:]:
            if step_of(path) not in distances:
                distances[step_of(path)] = evaluate(load(path), floor=False)["frechet"]
    return Course(dict(sorted(distances.items())), first["floor"], n, read, clock_of(records))


def figures(course: Course, multiples: list[float]) -> dict[str, float | int | None]:
    """What is printed of a run, by name; None where a multiple was not reached."""
    best = min(course.distances, key=lambda step: course.distances[step])
    images, seconds = course.when(best)
    found: dict[str, float | int | None] = {
        "floor": course.floor,
        "n": course.n,
        "steps_known": len(course.distances),
        "best_multiple_ratio": course.distances[best] / course.floor,
        "best_images": images,
        "best_seconds": seconds,
    }
    for multiple in multiples:
        step, before = course.reached(multiple)
        images, seconds = (None, None) if step is None else course.when(step)  # type: ignore[assignment]
        found |= {f"{multiple:g}x_images": images, f"{multiple:g}x_seconds": seconds}
        found[f"{multiple:g}x_not_yet_images"] = 0 if before is None else course.when(before)[0]
    return found


def lines(run: Path, course: Course, multiples: list[float], options: Namespace) -> list[str]:
    """The same for people."""
    found = figures(course, multiples)
    head = f"{run}: floor {course.floor:.4g} ({options.extractor}, n {course.n:,}, seed {options.seed}), "
    text = [head + f"{len(course.distances)} steps known, {course.read} of them from metrics.jsonl"]
    best = f"best {found['best_multiple_ratio']:.2f} after {found['best_images']:,} images"
    for multiple in multiples:
        images, seconds, earlier = (found[f"{multiple:g}x_{name}"] for name in ("images", "seconds", "not_yet_images"))
        if images is None:
            text.append(f"  {multiple:g} times the floor: not reached; {best}")
        else:
            since = f"not yet after {earlier:,}" if earlier else "the first step known"
            text.append(f"  {multiple:g} times the floor: after {images:,} images, {seconds:,.0f} s ({since})")
    return text


def main(argv: list[str]) -> None:
    parser = Parser(prog="benchmarks/time_to_quality.py", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="run folders of GANs")
    add("--multiples", nargs="+", type=float, default=list(MULTIPLES), metavar="X", help="of the floor")
    add("--extractor", default="resnet50", metavar="NAME", help="as evaluate.py's (default: resnet50)")
    add("--weights", metavar="FILE", help="of resnet50 or inception (default for resnet50: $DUET_WEIGHTS)")
    add("--n", type=positive, default=GAN_IMAGES, metavar="N", help=f"images a side (default: {GAN_IMAGES:,})")
    add("--seed", type=int, default=0, help="of samples and draws (default: 0)")
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    add("--batch-size", type=positive, default=100, metavar="N", help="changes speed and memory only (default: 100)")
    add("--json", action="store_true", help="the last line is one flat JSON object")
    options = parser.parse_args(argv)
    if not options.runs:
        print("nothing to measure: give the folders of runs")
        return
    result: dict[str, float | int | str | None] = {"extractor": options.extractor, "seed": options.seed}
    result |= {"cores": cores(), "load_1min_before": os.getloadavg()[0]}
    real = RealFeatures(batch_size=options.batch_size, show=True)
    for run in options.runs:
        course = course_of(run, options, real)
        print("\n".join(lines(run, course, options.multiples, options)), flush=True)
        result |= {f"{run}/{name}": value for name, value in figures(course, options.multiples).items()}
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_cli(main))
