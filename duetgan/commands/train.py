"""Train a GAN or a classifier: `python train.py --config configs/quickstart_gan.yaml`.

After an interruption the same command resumes the run from the last checkpoint.
"""

import os
from argparse import SUPPRESS, Namespace
from contextlib import closing, nullcontext
from pathlib import Path

from duetgan.utils import extras
from duetgan.utils.checkpoint import newest_first
from duetgan.utils.config.cli import Parser, UnknownKey, add_import_option, number, positive
from duetgan.utils.config.recipes import listing, recipe_file, recipes
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import launch
from duetgan.utils.distributed.process import leaving_on_signals
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.runlog.run_folder import RunFolder, default_folder

# value of --dry-run -> module whose `predictions` are printed after the plan, and a line of help
DRY_RUNS: dict[str, tuple[str, str]] = {"here": ("", "")}


def parser() -> Parser:
    parse = Parser(
        prog="train.py",
        description=__doc__,
        epilog="Every key of the config is an option, too: --section.key value (docs/keys.md).",
    )
    add = parse.add_argument
    add(
        "--config", metavar="FILE", help="YAML recipe (configs/*.yaml), or the config.yaml of a run"
    )
    add("--run-dir", metavar="DIR", help="run folder (default: runs/<name of the config>)")
    launch.add_options(add)
    add(
        "--device", metavar="cpu|cuda[:i]", help="device (default: the accelerator if there is one)"
    )
    add(
        "--max-steps",
        type=positive,
        metavar="N",
        help="save and stop at step N; the learning rate and other schedules still run as if training "
        "went on to the config's `steps`",
    )
    add(
        "--init-from",
        metavar="FILE|RUN",
        help="start a new run from the weights of another run; only weights whose name and shape "
        "match are loaded",
    )
    add(
        "--new-data",
        action="store_true",
        help="continue the run in the run folder with other images, those of data.path",
    )
    add(
        "--profile",
        type=positive,
        metavar="N",
        help="train and measure N steps, print a table, write RUN/profile/, and stop",
    )
    add(
        "--lr-find",
        action="store_true",
        help="search for a learning rate, draw RUN/lr_find.png, print the option to use, and stop",
    )
    add(
        "--lr-find-steps",
        type=positive,
        metavar="N",
        help="number of learning rates to try (default: 100)",
    )
    rate = number(float, 0, inner=True)
    add(
        "--lr-find-from",
        type=rate,
        metavar="RATE",
        help="lowest learning rate to try (default: 1e-6)",
    )
    add(
        "--lr-find-to", type=rate, metavar="RATE", help="highest learning rate to try (default: 10)"
    )
    add_import_option(parse)
    # `python -m torch.distributed.launch` passes this option; the environment has the same number.
    add("--local-rank", type=int, help=SUPPRESS)
    add("--list", action="store_true", help="list the recipes of configs/ and stop")
    add(
        "--dry-run",
        nargs="?",
        const="here",
        default="",
        choices=list(DRY_RUNS),
        help="do everything up to the first step, print the plan, and stop; 'here' (the same as no "
        "value) plans for this machine"
        + "".join(f"; '{name}' {line}" for name, (_, line) in DRY_RUNS.items() if line)
        + " (default: no dry run)",
    )
    add(
        "--layers",
        action="store_true",
        help="with --dry-run: also print every layer of the networks",
    )
    return parse


def main(argv: list[str]) -> int:
    options, overrides = parser().parse_known(argv)
    if options.list:
        print(listing(recipes()))
        return 0
    if options.config is None:
        raise UserError("--config FILE is missing; `python train.py --list` prints the recipes")
    options.config = recipe_file(options.config)
    read_yaml(options.config)  # reports an error once, and before torch is imported
    values = {
        "steps": options.lr_find_steps,
        "first": options.lr_find_from,
        "last": options.lr_find_to,
    }
    sweep = {name: value for name, value in values.items() if value is not None}
    refuse(
        (
            sweep and not options.lr_find,
            "--lr-find-steps, --lr-find-from and --lr-find-to belong to --lr-find; add it",
        ),
        (
            options.profile is not None and (options.dry_run or options.max_steps is not None),
            "--profile N trains its own few steps and stops; leave --dry-run and --max-steps out",
        ),
        (options.layers and not options.dry_run, "--layers belongs to --dry-run; add it"),
        (
            options.lr_find
            and (options.dry_run or options.max_steps is not None or options.profile is not None),
            "--lr-find makes its own steps and undoes them; leave --dry-run, --max-steps and --profile out",
        ),
    )
    if options.init_from is not None:
        # This is a key of the config, so that it is saved with the run.
        overrides += ["--init_from", options.init_from]
    # Imports are saved with the run too.
    overrides += [f"--import={name}" for name in getattr(options, "imports", ())]
    if (
        code := launch.start_processes("train", argv, options.gpus, options.procs, resumes=True)
    ) is not None:
        return code
    # A launcher reports the end of its processes itself.
    with nullcontext() if launch.under_launcher() else leaving_on_signals():
        return train_here(options, overrides, sweep)


def train_here(options: Namespace, overrides: list[str], sweep: dict[str, float]) -> int:
    folder = RunFolder(options.run_dir or default_folder(Path(options.config)))
    if os.environ.get("RANK", "0") == "0" and not options.dry_run:
        folder.open()  # fails at once if another run is writing there
    if options.new_data and not newest_first(folder.checkpoints):
        raise UserError(
            f"--new-data: {folder.path} has no checkpoint to continue; leave --new-data out to start "
            "a run, or name a run with --run-dir"
        )
    with closing(folder):
        # This imports torch, which must not happen before --gpus is applied.
        from duetgan.training.engine.run import train

        try:
            return train(
                options.config,
                overrides,
                run_dir=folder,
                device=launch.requested_device(options.device, options.gpus, options.procs),
                max_steps=options.max_steps,
                profile_steps=options.profile,
                sweep=sweep if options.lr_find else None,
                dry_run=DRY_RUNS[options.dry_run][0] if options.dry_run else None,
                layers=options.layers,
                new_data=options.new_data,
            )
        except UnknownKey as error:
            # A misspelt option of this script is a key to the parser.
            names = [
                f"--{name.replace('_', '-')}" for name in vars(options) if name[0] == error.name[0]
            ]
            raise UnknownKey(error.source, error.name, [*error.keys, *names]) from error


extras.attach(__name__)
