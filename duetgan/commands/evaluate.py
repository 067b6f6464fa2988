"""Evaluate a checkpoint by the protocol in docs/evaluation.md.

The metrics are written to metrics.json, with images in the same folder.
"""

import json
import pkgutil
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duetgan.metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED
from duetgan.utils import extras
from duetgan.utils.checkpoint import resolve
from duetgan.utils.checkpoint.provenance import describe_history
from duetgan.utils.config.cli import (
    Parser,
    add_model_options,
    add_speed_options,
    add_truncation_options,
    number,
    positive,
)
from duetgan.utils.distributed.launch import add_options, requested_device, start_processes
from duetgan.utils.errors import UserError
from duetgan.utils.files import as_json, check_writable, write_atomic

if TYPE_CHECKING:
    from duetgan.data.reading.dataset import Dataset

COMPARE = ("compare", "out", "json", "debug")  # options that are valid with --compare
SPEED = {"precision": "fp32", "fold": False, "tta": "off"}


@dataclass(frozen=True)
class Kind:
    """The definition of an evaluation: a task's usual one, or one that an option requests."""

    task: str  # of the checkpoint
    # "module:function" that takes checkpoint, dataset, folder and options and returns the results
    evaluate: str
    table: str  # "module:function" that takes the results and returns a text
    unsupported: dict[str, object]  # options that this kind does not have, with their defaults
    reason: str  # why it does not have them; continues "--OPTION is"
    file: str = "metrics.json"  # name of the file of the results
    help: str = ""  # help of the option; "" for a task's usual evaluation


KINDS = {
    "gan": Kind(
        "gan",
        "duetgan.metrics.evaluate_gan:evaluate_gan_run",
        "duetgan.metrics.tables:results_text",
        dict(SPEED),
        "for a classifier, this checkpoint is a GAN's",
    ),
    "classifier": Kind(
        "classifier",
        "duetgan.metrics.evaluate_classifier:evaluate_classifier_run",
        "duetgan.metrics.tables:results_text",
        dict.fromkeys(("classifier", "extractor", "weights", "per_class", "searched")),
        "for a GAN, this checkpoint is a classifier's",
    ),
}

OPTIONS: list[Callable[[Parser], None]] = []  # functions that add the extras' options


def parser() -> Parser:
    options = Parser(prog="evaluate.py", description=__doc__)
    add = options.add_argument
    add_model_options(options, required=False)
    add_options(add)
    add(
        "--compare",
        nargs="+",
        metavar="RUN",
        help="compare evaluated runs with the first one; RUN,RUN: runs of one recipe with other seeds",
    )
    add(
        "--data",
        metavar="X.lmdb|DIR",
        help="test images (default: data.val_path of the run's config)",
    )
    add("--out", metavar="D", help="folder for the results (default: RUN/eval)")
    add(
        "--n",
        type=positive,
        help=f"images to evaluate on (default: all; for a GAN at most {GAN_IMAGES})",
    )
    add("--seed", type=number(int), default=0, help="seed of samples and of random choices")
    add(
        "--json",
        action="store_true",
        help="print metrics.json instead of a table; logs go to stderr",
    )
    add(
        "--classifier",
        metavar="RUN_OR_FILE",
        help="GAN: independent classifier that evaluates the samples",
    )
    extractors = "GAN: features for the distances: classifier, classifier:RUN_OR_FILE, resnet50, inception or pixels; "
    extractors += "may be repeated, or separated by commas "
    default = "(default: the classifier if one is given, and resnet50 if its weights are present)"
    add("--extractor", action="append", metavar="NAME", help=extractors + default)
    add(
        "--weights",
        metavar="FILE",
        help="GAN: weights of resnet50 or inception (default for resnet50: $DUET_WEIGHTS)",
    )
    add_speed_options(options, "fp32")
    add(
        "--per-class",
        type=positive,
        help=f"GAN: images per class for the diversity (default: {PER_CLASS})",
    )
    searched = "GAN: number of training images to search for copies of samples; 0: none "
    searched += f"(default: at most {SEARCHED:,})"
    for name, kind in KINDS.items():
        if kind.help:
            add(f"--{name}", action="store_true", help=kind.help)
    add_truncation_options(options, psi=False)
    add("--searched", type=number(int, 0), metavar="N", help=searched)
    for add_options_of_extra in OPTIONS:
        add_options_of_extra(options)
    return options


def main(argv: list[str]) -> int:
    """Evaluate a checkpoint and write and print the results; return the exit code.

    Several processes share the work if the options request it. With `--compare`, compare runs
    instead.
    """
    options = parser().parse_args(argv)
    if options.compare is not None:
        return compare_runs(options)
    if options.checkpoint is None:
        parser().error("the following arguments are required: --checkpoint")
    # A wrong name is reported before processes are started.
    resolve(options.checkpoint, options.which)
    if (
        code := start_processes("evaluate", argv, options.gpus, options.procs, resumes=False)
    ) is not None:
        return code
    # This imports torch, which takes seconds, so the options are checked first.
    from duetgan.utils.distributed import collectives

    options.device = requested_device(options.device, options.gpus, options.procs)
    with collectives.group(collectives.choose_device(options.device)):
        return evaluate_here(options, argv)


def opened(path: Path, options: Namespace) -> tuple[dict[str, Any], Kind, str, "Dataset"]:
    """Read the checkpoint at `path` and open the test images.

    Returns the checkpoint's content, the evaluation that the task and the options request, the path
    of the test images, and their dataset. Raises UserError, also for an option that this evaluation
    does not have.
    """
    from duetgan.data.opening import dataset_for_model
    from duetgan.metrics.lineage import data_of, run_folder
    from duetgan.models.restore import read
    from duetgan.reporting.run_files import Run
    from duetgan.utils.runlog.run_log import say_main

    checkpoint = read(path)
    data = options.data or data_of(checkpoint, "val_path")
    if not data:
        raise UserError(
            f"{path}: its config names no data.val_path; give the test images with --data X.lmdb"
        )
    task = checkpoint["task"]
    if task not in ("gan", "classifier"):
        raise UserError(f"{path}: its task {task!r} is neither gan nor classifier; update Duet")
    kind = KINDS[task]
    for name, optional in KINDS.items():
        if optional.help and optional.task == task and getattr(options, name):
            kind = optional
    for option, default in kind.unsupported.items():
        if getattr(options, option) != default:
            raise UserError(f"--{option.replace('_', '-')} is {kind.reason}; leave it out")
    reader = dataset_for_model(data, checkpoint)
    recorded = None if options.data else Run(run_folder(path)).data.get("held-out")
    if isinstance(recorded, dict) and recorded.get("content_hash") != reader.meta.content_hash:
        say_main(
            f"warning: {data} holds other images than when the run began; --data X.lmdb names the test images"
        )
    return checkpoint, kind, str(data), reader


def evaluate_here(options: Namespace, argv: list[str]) -> int:
    """Evaluate a checkpoint in this process, write and print the results, and return 0.

    If several processes (ranks) share the work, only rank 0 writes and prints.
    """
    from duetgan.metrics.lineage import run_folder
    from duetgan.utils.distributed import collectives
    from duetgan.utils.runlog.run_log import say_main

    path = collectives.from_main_process(lambda: resolve(options.checkpoint, options.which))
    if not (options.out or path.is_file()):
        raise UserError(
            f"--checkpoint {path}: a name has no folder for the results; give one with --out DIR"
        )
    with collectives.raising_together():
        checkpoint, kind, data, reader = opened(path, options)
    out = Path(options.out) if options.out else run_folder(path) / "eval"
    collectives.from_main_process(lambda: check_writable(out))
    with reader:
        metrics = pkgutil.resolve_name(kind.evaluate)(checkpoint, reader, out, options)
    head = {
        "checkpoint": str(path),
        "step": checkpoint["step"],
        "task": checkpoint["task"],
        "data": data,
    }
    document = {**head, "seed": options.seed, **metrics}
    document["data_hash"] = reader.meta.content_hash
    document["training_seed"] = checkpoint["config"].get("seed")
    if history := describe_history(checkpoint):
        document["history"] = history
        say_main(history)
    if kind is KINDS["gan"] and collectives.is_main():
        from duetgan.inference.samples import draw_style_tables

        device = collectives.choose_device(options.device)
        document["images"] += draw_style_tables(
            checkpoint, out, seed=options.seed, device=device, mean=options.truncation_mean
        )
    collectives.from_main_process(lambda: write_atomic(out / kind.file, as_json(document)))
    if collectives.is_main():
        # The command is a file of its own, because metrics.json depends on the model alone.
        if not kind.help:
            write_atomic(
                out / "command.txt", f"{shlex.join(['python', 'evaluate.py', *argv])}\n".encode()
            )
        if options.json:
            print(json.dumps(document, indent=1, allow_nan=False))
        else:
            print(pkgutil.resolve_name(kind.table)(document))
        print(f"wrote {kind.file}, {', '.join(document['images'])} into {out}", file=sys.stderr)
        run = run_folder(path)
        if options.out is None and (run / "config.yaml").is_file():
            from duetgan.reporting.report import write_report

            print(f"report: {write_report(run)}", file=sys.stderr)
    return 0


def compare_runs(options: Namespace) -> int:
    """Compare evaluated runs, print the comparison, and return 0.

    With `--out`, the comparison is also written into that folder.
    """
    from duetgan.metrics.comparison.compare import compare, comparison_table

    default = parser().get_default
    for name, value in vars(options).items():
        if value != default(name) and name not in COMPARE:
            raise UserError(
                f"--compare takes runs that were evaluated before; leave --{name.replace('_', '-')} out"
            )
    if options.out:
        check_writable(Path(options.out))
    document = compare(options.compare)
    if options.out:
        write_atomic(Path(options.out) / "comparison.json", as_json(document))
    if options.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        print(comparison_table(document))
    return 0


extras.attach(__name__)
