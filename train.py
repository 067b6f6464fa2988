"""Train a GAN or a classifier: `python train.py --config configs/quickstart_gan.yaml`. The same command resumes."""

import os
import sys
from pathlib import Path

from utils.arguments import positive
from utils.cli import Parser
from utils.errors import UserError, run_cli
from utils.launch import launch, parse_gpus, under_launcher


def parser() -> Parser:
    parse = Parser(
        prog="train.py", description=__doc__, epilog="Any key of the config is overridden by --section.key value."
    )
    parse.add_argument("--config", metavar="FILE", help="YAML recipe (configs/*.yaml), or a run's own config.yaml")
    parse.add_argument("--run-dir", metavar="DIR", help="run folder; default runs/<name of the config>")
    parse.add_argument("--gpus", metavar="0,1", help="GPUs to use, one process each")
    parse.add_argument("--procs", type=int, metavar="N", help="processes on the CPU (gloo), or to share the --gpus")
    parse.add_argument("--device", metavar="cpu|cuda[:i]", help="default: the accelerator where there is one")
    parse.add_argument(
        "--max-steps", type=int, metavar="N", help="stop after saving at step N; schedules keep the config's length"
    )
    parse.add_argument(
        "--init-from", metavar="FILE|RUN", help="start from another run's weights, as far as they fit; not a resume"
    )
    parse.add_argument(
        "--profile", type=positive, metavar="N", help="measure N steps: a table, and RUN/profile/; stops after them"
    )
    parse.add_argument(
        "--lr-find", action="store_true", help="search the learning rate: RUN/lr_find.png, and the option to type"
    )
    parse.add_argument("--lr-find-steps", type=positive, metavar="N", help="rates to try (default: 100)")
    parse.add_argument("--lr-find-from", type=float, metavar="RATE", help="the first of them (default: 1e-6)")
    parse.add_argument("--lr-find-to", type=float, metavar="RATE", help="the last of them (default: 10)")
    parse.add_argument("--dry-run", action="store_true", help="do everything up to the first step and print the plan")
    return parse


def main(argv: list[str]) -> int:
    options, overrides = parser().parse_known(argv)
    if options.config is None:
        raise UserError("--config FILE is missing; recipes are in configs/, e.g. --config configs/quickstart_gan.yaml")
    if options.profile is not None and (options.dry_run or options.max_steps is not None):
        raise UserError("--profile N trains its own few steps and stops; leave --dry-run and --max-steps out")
    given = {"steps": options.lr_find_steps, "first": options.lr_find_from, "last": options.lr_find_to}
    sweep = {name: value for name, value in given.items() if value is not None}
    if sweep and not options.lr_find:
        raise UserError("--lr-find-steps, --lr-find-from and --lr-find-to belong to --lr-find; add it")
    if options.lr_find and (options.dry_run or options.max_steps is not None or options.profile is not None):
        raise UserError("--lr-find makes its own steps and undoes them; leave --dry-run, --max-steps and --profile out")
    if options.init_from is not None:
        overrides += ["--init_from", options.init_from]  # a key of the config: it is saved with the run
    gpus = parse_gpus(options.gpus) if options.gpus else []
    if (options.procs is not None and options.procs < 1) or (options.max_steps is not None and options.max_steps < 1):
        raise UserError("--procs and --max-steps must be 1 or more")
    if gpus and not under_launcher():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # before CUDA starts, here and in the processes below
    processes = options.procs or len(gpus) or 1
    if gpus and len(gpus) % processes:
        raise UserError(f"--gpus {options.gpus}: {len(gpus)} cannot be shared by --procs {processes}; give a multiple")
    if processes > 1 and not under_launcher():
        return launch([str(Path(__file__).resolve()), *argv], processes)

    from training.run import train  # imports torch, which must not happen before --gpus is applied

    wanted = "cuda" if gpus else "cpu" if processes > 1 else None  # asked for, so not to be replaced in silence
    device = options.device or wanted
    return train(
        options.config,
        overrides,
        run_dir=options.run_dir,
        device=device,
        max_steps=options.max_steps,
        profile_steps=options.profile,
        sweep=sweep if options.lr_find else None,
        dry_run=options.dry_run,
    )


if __name__ == "__main__":
    sys.exit(run_cli(main))
