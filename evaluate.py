"""Evaluate a checkpoint by the protocol in docs/evaluation.md: figures into metrics.json, images beside it."""

import json
import shlex
import sys
from pathlib import Path

from metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED
from utils.checkpoint import load, resolve_for_people
from utils.cli import Parser, add_model_options, positive
from utils.errors import UserError, run_cli
from utils.files import check_writable, write_atomic


def parser() -> Parser:
    """The options of this script."""
    options = Parser(prog="evaluate.py", description=__doc__)
    add = options.add_argument
    add_model_options(options)
    add("--data", metavar="X.lmdb", help="test images (default: data.val_path of the run's config)")
    add("--out", metavar="D", help="folder for the results (default: RUN/eval)")
    add("--n", type=positive, help=f"images to evaluate on (default: all; for a GAN at most {GAN_IMAGES})")
    add("--seed", type=int, default=0, help="of samples and draws (default: 0)")
    add("--json", action="store_true", help="print metrics.json instead of a table; logs go to stderr")
    add("--classifier", metavar="RUN_OR_FILE", help="GAN: independent classifier that judges the samples")
    extractors = "GAN: classifier, classifier:RUN_OR_FILE, resnet50, inception or pixels; repeat it or use commas "
    default = "(default: classifier if one is given, resnet50 if its weights are there)"
    add("--extractor", action="append", metavar="NAME", help=extractors + default)
    add("--weights", metavar="FILE", help="GAN: weights of resnet50 or inception (default for resnet50: $DUET_WEIGHTS)")
    add("--per-class", type=positive, help=f"GAN: images of a class for the diversity (default: {PER_CLASS})")
    searched = f"GAN: training images that are searched for copies; 0: none (default: at most {SEARCHED:,})"
    audit = "GAN: ask what samples and discriminator tell of training images, and nothing else (docs/audit.md)"
    add("--audit", action="store_true", help=audit)
    add("--searched", type=not_negative, metavar="N", help=searched)
    return options


def main(argv: list[str]) -> int:
    """Evaluate, write the results, print them."""
    options = parser().parse_args(argv)
    path = resolve_for_people(options.checkpoint, options.which)
    from data.dataset import dataset_for_model  # and torch with it, now that the options are known to be right
    from metrics.evaluate_audit import AUDIT
    from metrics.evaluate_run import TASKS
    from metrics.judge import run_folder
    from reporting.report import write_report
    from reporting.tensorboard import show_images

    checkpoint = load(path)
    run = run_folder(path)
    out = Path(options.out) if options.out else run / "eval"
    data = options.data or (checkpoint["config"].get("data") or {}).get("val_path")
    if not data:
        raise UserError(f"{path}: its config names no data.val_path; give the test images with --data X.lmdb")
    if checkpoint["task"] not in TASKS:
        raise UserError(f"{path}: its task {checkpoint['task']!r} is none of {', '.join(TASKS)}; update Duet")
    evaluate, table = AUDIT if options.audit else TASKS[checkpoint["task"]]
    name = "audit.json" if options.audit else "metrics.json"
    check_writable(out)
    with dataset_for_model(data, checkpoint) as reader:
        figures = evaluate(checkpoint, reader, out, options)
    head = {"checkpoint": str(path), "step": checkpoint["step"], "task": checkpoint["task"], "data": str(data)}
    document = {**head, "seed": options.seed, **figures}
    text = json.dumps(document, indent=1, allow_nan=False)
    write_atomic(out / name, f"{text}\n".encode())
    if not options.audit:  # what the report repeats; not in the document, which depends on the model alone
        write_atomic(out / "command.txt", f"{shlex.join(['python', 'evaluate.py', *argv])}\n".encode())
    print(text if options.json else table(document))
    print(f"wrote {name}, {', '.join(document['images'])} into {out}", file=sys.stderr)
    if options.out is None and (run / "config.yaml").is_file():
        show_images(run, checkpoint["step"], [out / name for name in document["images"]])
        print(f"report: {write_report(run)}", file=sys.stderr)
    return 0


def not_negative(text: str) -> int:
    """A whole number that is 0 or more."""
    return 0 if text == "0" else positive(text)


if __name__ == "__main__":
    sys.exit(run_cli(main))
