"""A small argument parser: one line and exit code 2 on a bad option, `-` and `_` alike; options of
several scripts.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from duetgan.utils.config import plugins
from duetgan.utils.errors import UserError
from duetgan.utils.text import did_you_mean
from duetgan.version import __version__

T = TypeVar("T")
MOST = 2.0**63  # no number of an option is larger


def normalise(argv: Sequence[str]) -> list[str]:
    """Turn `--some-name=x` into `--some_name=x`: hyphens and underscores are the same in option
    names, values stay.
    """
    normal: list[str] = []
    for index, token in enumerate(argv):
        if token == "--":
            return normal + list(argv[index:])
        name, equals, value = token.partition("=")
        if name.startswith("--") and len(name) > 2:
            name = "--" + name[2:].replace("-", "_")
        normal.append(name + equals + value)
    return normal


def hyphens(text: str) -> str:
    """A text for people whose options are written with hyphens: `--on-error`, not `--on_error`."""
    return re.sub(r"(?<![\w-])--[a-z][a-z_]*", lambda option: option[0].replace("_", "-"), text)


def entry(registry: Mapping[str, T], name: str, what: str, *also: str) -> T:
    """What a registry has under a name. Raises UserError, with the near one; there are `also`
    others.
    """
    if name not in registry:
        known = [*registry, *also]
        there = ", ".join(known) or "none, --import FILE adds some"
        raise UserError(f"{what} {name!r} is unknown{did_you_mean(name, known)}; there are {there}")
    return registry[name]


IN_STEPS = """a training is counted in steps, the updates of each network: --steps N, or --steps 90ep for 90 epochs of \
images / batch_size steps (the plan of --dry-run has both)"""
# the key that is meant, without its section: what people type
MEANT = """
steps: iters iterations max_iter max_iters num_steps total_steps n_iter
batch_size: bs batch batchsize train_batch_size
precision: amp fp16 bf16 mixed_precision dtype
lr: learning_rate base_lr max_lr peak_lr
warmup_steps: warmup warmup_epochs
schedule: scheduler sched lr_scheduler
optimizer.name: opt optim
weight_decay: wd l2
clip_norm: grad_clip clip_grad max_grad_norm gradient_clip_val
model.name: arch backbone model_name network
model.weights: pretrained pretrained_weights checkpoint_path initial_checkpoint
model.classes: num_classes n_classes
finetune.freeze: freeze frozen freeze_backbone freeze_layers
z_dim: latent_dim nz z_size
loss.r1_gamma: gamma r1 r1_weight lambda_gp
loss.label_smoothing: smoothing ls
augment.flip: mirror hflip horizontal_flip random_flip
ada.mode: aug augmentation
data.path: data_dir dataset train_path train_dir root
data.val_path: val_dir val_data validation_path test_path
data.resolution: image_size img_size imgsz resolution size
data.workers: num_workers n_workers
checkpoint.every: save_every save_interval snap
log.every: log_every log_interval
evaluation.every: eval_every eval_interval val_interval
"""
SYNONYMS = {word: row.split(":")[0] for row in MEANT.splitlines() for word in row.split()[1:]}
SYNONYMS |= dict.fromkeys(("epoch", "epochs", "max_epochs", "num_epochs", "n_epochs"), IN_STEPS)


class UnknownKey(UserError):
    """A key that the configuration does not have. Says which known key is meant, or which key or
    option is near.
    """

    def __init__(
        self, source: str, name: str, known: Sequence[str], options: Sequence[str] = ()
    ) -> None:
        self.source, self.name, self.known = source, name, known
        section, _, leaf = name.rpartition(".")
        meant = SYNONYMS.get(leaf, leaf)
        if " " in meant:
            super().__init__(f"{source}: there is no {name}; {meant}")
            return
        keys = (
            [key for key in known if f".{key}".endswith(f".{meant}")]
            if leaf in SYNONYMS or not section
            else []
        )
        keys = [key for key in keys if section and key.startswith(f"{section}.")] or keys
        if keys:
            hint = f" (did you mean {' or '.join(map(repr, keys))}?)"
        else:
            typed = {option.removeprefix("--").replace("-", "_"): option for option in options}
            # the key may lack its section
            leaves = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
            hint = did_you_mean(name, typed | dict(zip(known, known, strict=True))) or did_you_mean(
                leaf, leaves
            )
        super().__init__(f"{source}: unknown key {name!r}{hint}".removeprefix(": "))

    def among(self, options: Sequence[str]) -> "UnknownKey":
        """The same, where the script has `options` (`--max-steps`) of its own that may have been
        meant.
        """
        return UnknownKey(self.source, self.name, self.known, options)


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises UserError; hyphens and underscores in option names are
    the same.
    """

    def __init__(
        self, prog: str, description: str | None = None, epilog: str | None = None
    ) -> None:
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
        self.add_argument("--debug", action="store_true", help="print the traceback of an error")
        self.add_argument("--version", action="version", version=f"duet {__version__}")

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """As argparse's; a default that is a number or a word is told at the end of `help` unless
        that speaks of it.
        """
        default, text = kwargs.get("default"), kwargs.get("help", "")
        if (
            isinstance(default, str | int | float)
            and kwargs.get("action") is None
            and "default: " not in text
        ):
            shown = default if isinstance(default, str) else f"{default:g}"
            kwargs["help"] = f"{text} (default: {shown})".lstrip()
        return super().add_argument(*normalise(names), **kwargs)

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(normalise(args))
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            self.error(
                f"unknown argument {unknown[0]}{did_you_mean(unknown[0].partition('=')[0], known)}"
            )
        plugins.load(vars(parsed).pop("imports", ()))
        return parsed

    def parse_known(self, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """This parser's options, and the tokens that are not its own (config overrides)."""
        return self.parse_known_args(normalise(args))

    def format_help(self) -> str:
        return hyphens(super().format_help())

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{hyphens(message)}; `{self.prog} --help` lists the options")


def number(
    kind: type, low: float = -MOST, high: float = MOST, *, inner: bool = False
) -> Callable[[str], Any]:
    """An option's type: finite numbers of a kind from `low` to `high`, or with `inner` between
    these.
    """
    words = "a whole number" if kind is int else "a finite number"
    if high < MOST:
        words += f" between {low:g} and {high:g}" if inner else f" from {low:g} to {high:,.15g}"
    elif low > -MOST:
        words += f" above {low:g}" if inner else f" of at least {low:g}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        digits = text.strip().lstrip("+-")
        if (
            kind is int
            and digits.isdecimal()
            and (len(digits) > len(str(int(MOST))) or abs(int(digits)) >= MOST)
        ):
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is too large; give a whole number from {max(int(low), -int(MOST)):,} to "
                f"{min(int(high), int(MOST) - 1):,}"
            )
        if not (low < value < high if inner else low <= value <= high):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {words}")
        return value

    return read


positive = number(int, 1)


def file(*suffixes: str) -> Callable[[str], Path]:
    """An option's type: a file whose name ends in one of the suffixes ("": in none)."""

    def read(text: str) -> Path:
        path = Path(text)
        if not text or path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(
                f"{text}: its name must end in {' or '.join(filter(None, suffixes))}"
            )
        return path

    return read


def add_speed_options(parser: argparse.ArgumentParser, precision: str) -> None:
    """`--precision`, with this default, `--fold` and `--tta`."""
    add = parser.add_argument
    choices = ("auto", "fp32", "bf16", "fp16")
    add(
        "--precision",
        choices=choices,
        default=precision,
        help=f"of a classifier's outputs; auto: fast on the accelerator, fp32 on a CPU (default: {precision})",
    )
    add(
        "--fold",
        action="store_true",
        help="a classifier's convolutions do their BatchNorm's work: faster",
    )
    add(
        "--tta",
        choices=("off", "flip", "shift"),
        default="off",
        help="mean of a classifier's logits: flip: with the mirror image; shift: and moved by a pixel (default: off)",
    )


TABLE_OPTIONS = {  # of duet pack and the quickstart: the columns of a label table
    "path_column": ("NAME", "of a table: names of the images' files"),
    "label_column": ("NAME", "of a table or .tar file, or several: a,b,c; none: without labels"),
    "label_separator": (
        "TEXT",
        "between several labels of an image, such as '|'; none: one label each",
    ),
    "split_column": (
        "NAME",
        "of training and held-out images; NAME=VALUE: the held-out rows; none: all rows",
    ),
    "root": (
        "DIR",
        "folder of the images that a table names, or of the fashion-mnist, cifar10 or idx files",
    ),
    "suffix": ("TEXT", "that the names in a table lack, such as .jpg"),
}


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add TABLE_OPTIONS."""
    for name, (metavar, text) in TABLE_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)


def table_words(options: argparse.Namespace) -> list[str]:
    """Return those of TABLE_OPTIONS that are set, as words of a command that runs in any folder."""
    chosen = {
        name: getattr(options, name) for name in TABLE_OPTIONS if getattr(options, name) is not None
    }
    if "root" in chosen:
        chosen["root"] = os.path.abspath(os.path.expanduser(chosen["root"]))
    return [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]


PSI = number(float, -10, 10)


def add_truncation_options(parser: argparse.ArgumentParser, *, psi: bool = True) -> None:
    """Add `--truncation-psi`, unless `psi` is False, and `--truncation-mean`."""
    if psi:
        text = "1: all variety; near 0: typical images (default: 1)"
        parser.add_argument("--truncation-psi", type=PSI, default=1.0, metavar="X", help=text)
    text = "what samples are truncated towards: the mean w of their class, or of all samples (default: class)"
    parser.add_argument(
        "--truncation-mean", choices=("class", "global"), default="class", help=text
    )


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """`--import`, whose files and modules `parse_args` imports."""
    parser.add_argument(
        "--import",
        action="append",
        help="import code of your own, a .py file or an installed module, which adds to the registries; repeat it",
        dest="imports",
        default=argparse.SUPPRESS,
        metavar="FILE",
    )


def add_model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """`--checkpoint` (`required` or not), `--which`, `--device`, `--batch-size` and `--import`."""
    add_import_option(parser)
    add = parser.add_argument
    add(
        "--checkpoint",
        required=required,
        metavar="RUN_OR_FILE",
        help="run folder, checkpoint file; for a classifier also torchvision:NAME or timm:NAME, either with =FILE,"
        " torchvision's weights, or a folder of timm's",
    )
    add(
        "--which",
        choices=("last", "best"),
        default="last",
        help="which checkpoint of a run folder (default: last)",
    )
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    add(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="changes speed and memory only (default: 64)",
    )
