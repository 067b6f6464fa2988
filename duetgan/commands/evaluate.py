"""Evaluate a checkpoint by the protocol in docs/evaluation.md: figures into metrics.json, images
beside it.
"""

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duetgan.metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED
from duetgan.utils.checkpoint import resolve, resolve_for_people
from duetgan.utils.config.cli import (
    Parser,
    add_model_options,
    add_speed_options,
    add_truncation_options,
    number,
    positive,
)
from duetgan.utils.distributed.launch import add_options, start_processes, wanted_device
from duetgan.utils.errors import UserError
from duetgan.utils.files import as_json, check_writable, write_atomic

COMPARE = ("compare", "out", "json", "debug")  # options that go together
SPEED = {"precision": "fp32", "fold": False, "tta": "off"}
# what is evaluated: options that it does not take and their defaults, and whose they are
NOT_FOR = {
    "gan": (
        SPEED | {"robustness": False, "ood": None},
        "for a classifier, this checkpoint is a GAN's",
    ),
    "classifier": (
        {"audit": False}
        | dict.fromkeys(("classifier", "extractor", "weights", "per_class", "searched")),
        "for a GAN, this checkpoint is a classifier's",
    ),
    "audit": (
        SPEED | {"robustness": False} | dict.fromkeys(("ood", "classifier", "per_class")),
        "not for --audit",
    ),
}


def parser() -> Parser:
    options = Parser(prog="evaluate.py", description=__doc__)
    add = options.add_argument
    add_model_options(options, required=False)
    add_options(add)
    add(
        "--compare",
        nargs="+",
        metavar="RUN",
        help="evaluated runs: each with the first; RUN,RUN: other seeds of one",
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
    add("--seed", type=number(int), default=0, help="of samples and draws")
    add(
        "--robustness",
        action="store_true",
        help="classifier: accuracy under blur, noise, JPEG, brightness and contrast at five strengths (25 passes)",
    )
    add(
        "--ood",
        metavar="X.lmdb",
        help="classifier: images of another kind, which its confidence should give away",
    )
    add(
        "--json",
        action="store_true",
        help="print metrics.json instead of a table; logs go to stderr",
    )
    add(
        "--classifier",
        metavar="RUN_OR_FILE",
        help="GAN: independent classifier that judges the samples",
    )
    extractors = "GAN: classifier, classifier:RUN_OR_FILE, resnet50, inception or pixels; repeat it or use commas "
    default = "(default: classifier if one is given, resnet50 if its weights are there)"
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
        help=f"GAN: images of a class for the diversity (default: {PER_CLASS})",
    )
    searched = f"GAN: training images that are searched for copies; 0: none (default: at most {SEARCHED:,})"
    add(
        "--audit",
        action="store_true",
        help="GAN: ask what samples and discriminator tell of training images, and nothing else (docs/audit.md)",
    )
    add_truncation_options(options, psi=False)
    add("--searched", type=number(int, 0), metavar="N", help=searched)
    return options


def main(argv: list[str]) -> int:
    """Evaluate, write the results, print them; over several processes if that is asked for."""
    options = parser().parse_args(argv)
    if options.compare is not None:
        return compare_runs(options)
    if options.checkpoint is None:
        parser().error("the following arguments are required: --checkpoint")
    # a name that is wrong is told before processes are started
    resolve(options.checkpoint, options.which)
    if (
        code := start_processes("evaluate", argv, options.gpus, options.procs, resumes=False)
    ) is not None:
        return code
    # and torch with it, now that the options are known to be right
    from duetgan.utils.distributed import collectives

    options.device = wanted_device(options.device, options.gpus, options.procs)
    with collectives.group(collectives.choose_device(options.device)):
        return evaluate_here(options, argv)


def opened(path: Path, options: Namespace) -> tuple[dict[str, Any], str, str, Any]:
    """The checkpoint, what is to be evaluated of it, and the test images: their place and they.
    Raises UserError.
    """
    from duetgan.data.reading.dataset import dataset_for_model
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
    kind = "audit" if options.audit and task == "gan" else task
    unwanted, whose = NOT_FOR[kind]
    for option, default in unwanted.items():
        if getattr(options, option) != default:
            raise UserError(f"--{option.replace('_', '-')} is {whose}; leave it out")
    reader = dataset_for_model(data, checkpoint)
    then = None if options.data else Run(run_folder(path)).data.get("held-out")
    if isinstance(then, dict) and then.get("content_hash") != reader.meta.content_hash:
        say_main(
            f"warning: {data} holds other images than when the run began; --data X.lmdb names the test images"
        )
    return checkpoint, kind, str(data), reader


def evaluate_here(options: Namespace, argv: list[str]) -> int:
    """Evaluate in this process, which may be one of several: rank 0 writes and prints."""
    from duetgan.metrics.evaluate_audit import audit_gan_run
    from duetgan.metrics.evaluate_classifier import evaluate_classifier_run
    from duetgan.metrics.evaluate_gan import evaluate_gan_run
    from duetgan.metrics.lineage import run_folder
    from duetgan.metrics.samples.membership_inference import audit_table
    from duetgan.metrics.tables import classifier_table, gan_table
    from duetgan.utils.distributed import collectives

    evaluations: dict[
        str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], str]]
    ] = {
        "gan": (evaluate_gan_run, gan_table),  # and its table for people
        "classifier": (evaluate_classifier_run, classifier_table),
        "audit": (audit_gan_run, audit_table),
    }
    path = collectives.from_main_process(
        lambda: resolve_for_people(options.checkpoint, options.which)
    )
    if not (options.out or path.is_file()):
        raise UserError(
            f"--checkpoint {path}: a name has no folder for the results; give one with --out DIR"
        )
    with collectives.raising_together():
        checkpoint, kind, data, reader = opened(path, options)
    evaluate, table = evaluations[kind]
    name = "audit.json" if options.audit else "metrics.json"
    out = Path(options.out) if options.out else run_folder(path) / "eval"
    collectives.from_main_process(lambda: check_writable(out))
    with reader:
        figures = evaluate(checkpoint, reader, out, options)
    head = {
        "checkpoint": str(path),
        "step": checkpoint["step"],
        "task": checkpoint["task"],
        "data": data,
    }
    document = {**head, "seed": options.seed, **figures}
    if kind == "gan" and collectives.is_main():
        from duetgan.inference.samples import draw_style_tables

        device = collectives.choose_device(options.device)
        how = {"seed": options.seed, "device": device, "mean": options.truncation_mean}
        document["images"] += draw_style_tables(checkpoint, out, **how)
    collectives.from_main_process(lambda: write_atomic(out / name, as_json(document)))
    if collectives.is_main():
        # beside the document, which depends on the model alone; the report repeats it
        if not options.audit:
            write_atomic(
                out / "command.txt", f"{shlex.join(['python', 'evaluate.py', *argv])}\n".encode()
            )
        print(json.dumps(document, indent=1, allow_nan=False) if options.json else table(document))
        print(f"wrote {name}, {', '.join(document['images'])} into {out}", file=sys.stderr)
        run = run_folder(path)
        if options.out is None and (run / "config.yaml").is_file():
            from duetgan.reporting.report import show_images, write_report

            show_images(run, checkpoint["step"], [out / name for name in document["images"]])
            print(f"report: {write_report(run)}", file=sys.stderr)
    return 0


def compare_runs(options: Namespace) -> int:
    """Compare evaluated runs, print the comparison, and write it where `--out` says."""
    from duetgan.metrics.comparison.compare import compare, comparison_table

    default = parser().get_default
    if other := [
        name
        for name, value in vars(options).items()
        if value != default(name) and name not in COMPARE
    ]:
        raise UserError(
            f"--compare takes runs that were evaluated before; leave --{other[0].replace('_', '-')} out"
        )
    if options.out:
        check_writable(Path(options.out))
    document = compare(options.compare)
    if options.out:
        write_atomic(Path(options.out) / "comparison.json", as_json(document))
    print(
        json.dumps(document, indent=1, allow_nan=False)
        if options.json
        else comparison_table(document)
    )
    return 0
