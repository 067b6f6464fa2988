"""Configuration: a YAML file, then dotted command-line overrides, into keyword-only dataclasses.

The types, defaults and checks live in the dataclasses; jsonargparse does the conversion. Unknown keys are refused and
the near match is named.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jsonargparse
import yaml

from utils.config import yaml_files
from utils.config.cli import did_you_mean, normalise
from utils.config.ranges import check_finite, check_ranges
from utils.config.yaml_files import Tree
from utils.errors import UserError

T = TypeVar("T")

# keys and sections by the names that they had: refused with today's in a recipe, taken in the config of an older run
RENAMED = {
    "augment.mix": "augment.mix_prob",
    "augment.trivial": "augment.trivial_augment",
    "ema.half_life_kimg": "ema.ema_kimg",
    "ema.half_life_kimg_start": "ema.ema_kimg_start",
    "ema.ramp": "ema.ema_rampup",
    "optimizer.cycle_rise": "optimizer.pct_start",
    "train": "finetune",
}


# names that people try and that have no near match -> what to give instead
INSTEAD = {
    **dict.fromkeys(
        ("epoch", "epochs", "max_epochs", "num_epochs", "n_epochs"),
        "a training is counted in steps, the updates of each network: --steps N, or --steps 90ep for 90 epochs of "
        "images / batch_size steps (the plan of --dry-run has both)",
    ),
    "image_size": "--data.resolution N (px), or data.pack --size N",
    "learning_rate": "--optimizer.lr (classifier), --generator_optimizer.lr, --discriminator_optimizer.lr (GAN)",
    "num_workers": "--data.workers N",
}


def renamed(key: str) -> str:
    """The name that a dotted key has today."""
    for old, new in RENAMED.items():
        key = re.sub(rf"^(\w+_)?{re.escape(old)}(?=\.|$)", rf"\g<1>{new}", key)
    return key


def of_today(tree: Tree, prefix: str = "") -> Tree:
    """The config of a run that an older version may have written, by today's names."""
    found: Tree = {}
    for key, value in tree.items():
        name = renamed(f"{prefix}{key}")
        own = name.removeprefix(prefix) if isinstance(key, str) else key
        found[own] = of_today(value, f"{name}.") if isinstance(value, dict) else value
    return found


class UnknownKey(UserError):
    """A key that the config does not have. Says what it is called today, or which known key or option is near."""

    def __init__(self, source: str, name: str, known: Sequence[str], options: Sequence[str] = ()) -> None:
        self.source, self.name, self.known = source, name, known
        if renamed(name) in known:
            super().__init__(f"{source}: {name} is now {renamed(name)}")
            return
        if name in INSTEAD:
            super().__init__(f"{source}: there is no {name}; {INSTEAD[name]}")
            return
        typed = {option.removeprefix("--").replace("-", "_"): option for option in options}
        leaves = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}  # the key may lack its section
        near = did_you_mean(name, typed | dict(zip(known, known, strict=True)))
        super().__init__(f"{source}: unknown key {name!r}{near or did_you_mean(name.rsplit('.', 1)[-1], leaves)}")

    def among(self, options: Sequence[str]) -> "UnknownKey":
        """The same, where the script has `options` (`--max-steps`) of its own that may have been meant."""
        return UnknownKey(self.source, self.name, self.known, options)


def keys_of(config_class: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config dataclass, sections included."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        yield prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from keys_of(hints[field.name], prefix + field.name + ".")


def build(config_class: type[T], tree: Tree, overrides: Sequence[str] = (), *, source: str = "configuration") -> T:
    """An instance of `config_class` from a nested mapping and command-line tokens (`--section.key value`).

    Raises UserError for an unknown key, a value of the wrong type, or whatever a `__post_init__` refuses.
    """
    tokens = normalise(overrides)
    for position, token in enumerate(tokens):
        if not token.startswith("--") and (position == 0 or not tokens[position - 1].startswith("--")):
            raise UserError(f"command line: {token!r} belongs to no option; write overrides as --section.key value")
    known = list(keys_of(config_class))
    _check_tree(tree, config_class, source, known)
    name = ""
    for token in tokens:
        value = token
        if token.startswith("--"):
            name, _, value = token[2:].partition("=")
        if name not in known:
            raise UnknownKey("command line", name, known)
        _check_value("command line", name, value)
    parser, where = _parser(config_class), source  # type: ignore[arg-type]  # a class is hashable
    try:
        namespace = parser.parse_object(tree)
        if tokens:
            where = "command line"
            namespace = parser.parse_args(tokens, namespace=namespace)
        check_ranges(config_class, vars(namespace))
        return config_class(**vars(parser.instantiate(namespace)))
    except UserError:
        raise
    except (jsonargparse.ArgumentError, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: {_plain(str(error))}") from error


@functools.cache
def _parser(config_class: type) -> jsonargparse.ArgumentParser:
    """The parser of a config, which takes half of the time to make that a whole `build` takes."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(config_class)
    return parser


PLAIN = {  # what jsonargparse says -> what a user can read
    r"Parser key": "key",
    r"Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: ": r"Expected \1. Got value: ",
    r"typing\.Annotated\[(\w+), <class '[\w.]+'>\]": r"\1",
    r"<class '(?:types\.)?(\w+)'>": r"\1",
    r"typing\.Literal\[(.*?)\]": r"\1",
    r"Expected a ": "Expected ",
    r"NoneType": "null",
}


def _plain(message: str) -> str:
    message = " ".join(message.split())
    for theirs, ours in PLAIN.items():
        message = re.sub(theirs, ours, message)
    return message


def _check_tree(tree: Tree, config_class: Any, source: str, known: Sequence[str], prefix: str = "") -> None:
    """Raise UserError for an unknown key, a section that is none, and null where a value is needed."""
    hints = typing.get_type_hints(config_class)
    for key, value in tree.items():
        name, hint = f"{prefix}{key}", hints.get(key)
        if name not in known:
            raise UnknownKey(source, name, known)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(f"{source}: {name!r} is a section with keys of its own, but holds {repr(value)[:40]}")
            _check_tree(value, hint, source, known, f"{name}.")
        elif value is None and type(None) not in typing.get_args(hint):
            raise UserError(f"{source}: {name!r} needs a value, but holds null")
        else:
            _check_value(source, name, value)


def _check_value(source: str, key: str, value: Any) -> None:
    """Raise UserError for a number beyond all ranges, and for text that, read as YAML, would be out of bounds."""
    if isinstance(value, str):
        try:
            yaml_files.load(value)
        except yaml_files.BoundError as error:
            raise UserError(f"{source}: {key}: {error.problem}") from error
        except (yaml.YAMLError, ValueError):
            pass
    elif isinstance(value, int):
        check_finite(key, value)
    elif isinstance(value, (list, tuple, dict)):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_value(source, key, part)


def to_tree(config: object) -> Tree:
    """The nested mapping of a config dataclass. Tuples are lists, which is what YAML and checkpoints give back."""

    def plain(items: list[tuple[str, Any]]) -> Tree:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in items}

    return dataclasses.asdict(config, dict_factory=plain)  # type: ignore[call-overload]


def differences(before: Tree, after: Tree, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values; a key that one side lacks counts as None there."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found
