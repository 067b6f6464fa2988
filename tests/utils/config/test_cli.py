import argparse
import contextlib
import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval

from duetgan.commands import COMMANDS, train
from duetgan.utils.config.cli import (
    Parser,
    add_model_options,
    add_table_options,
    normalise,
    number,
    positive,
    table_words,
)
from duetgan.utils.config.model import Count, Stored, Whole
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises


def parser():
    parse = Parser(prog="tool")
    parse.add_argument("source")
    parse.add_argument("--batch-size", type=int, default=1)
    parse.add_argument("--on_error", choices=("stop", "skip"), default="stop")
    parse.add_argument("--json", action="store_true")
    return parse


def test_normalise_changes_names_only():
    argv = ["a-b", "--some-name", "v-1", "--x-y=p-q", "-z-z", "--", "--not-me"]
    assert normalise(argv) == ["a-b", "--some_name", "v-1", "--x_y=p-q", "-z-z", "--", "--not-me"]
    found, rest = parser().parse_known(["x", "--data.some-path", "a-b", "--batch-size", "3", "--lr=1"])
    assert (found.batch_size, rest) == (3, ["--data.some_path", "a-b", "--lr=1"])  # overrides, in order


@pytest.mark.parametrize("size", ["--batch-size", "--batch_size"])
@pytest.mark.parametrize("on_error", ["--on-error", "--on_error"])
def test_hyphens_and_underscores_are_the_same(size, on_error):
    found = parser().parse_args(["my-file", size, "4", f"{on_error}=skip"])
    assert (found.source, found.batch_size, found.on_error, found.json) == ("my-file", 4, "skip", False)
    assert not found.debug


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["x", "--batch-sise", "3"], r"unknown argument --batch-sise \(did you mean '--batch-size'\?\)"),
        (["x", "--batch", "3"], r"unknown argument --batch"),  # no abbreviations
        (["x", "--zzz"], r"unknown argument --zzz;"),
        (["x", "--batch-size", "many"], r"invalid int value: 'many'"),
        (["x", "--on-error", "explode"], r"invalid choice: 'explode'"),
        ([], r"required: source"),
        (["x", "y"], r"unknown argument y"),
    ],
)
def test_a_bad_option_is_one_line(argv, told):
    with pytest.raises(UserError, match=told) as error:
        parser().parse_args(argv)
    assert "\n" not in str(error.value)
    assert "`tool --help`" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "words"),
    [
        (positive, ["1", "64"], ["0", "-1", "1.5", "x", ""], "a whole number of at least 1"),
        (number(int), ["-3", "0"], ["1e3", "nan"], "a whole number"),
        (number(int, 0, 65535), ["0", "65535"], ["-1", "65536"], "a whole number from 0 to 65,535"),
        (number(float, 0), ["0", "1e5"], ["-0.1", "nan", "inf", "1e300"], "a finite number of at least 0"),
        (number(float, 0, inner=True), ["1e-9"], ["0", "-inf", "nan"], "a finite number above 0"),
        (number(float, 0, 1, inner=True), ["0.5"], ["0", "1", "nan"], "a finite number between 0 and 1"),
        (number(float, -10, 10), ["-10", "0.7"], ["10.1", "1e9", "nan"], "a finite number from -10 to 10"),
    ],
)
def test_numbers_of_options_have_a_range_and_are_finite(kind, good, bad, words):
    assert [kind(text) for text in good] == [float(text) for text in good]
    for text in bad:
        assert_raises(argparse.ArgumentTypeError, f"^'{text[:40]}' is not {words}(, below 2.63)?$", kind, text)


MODULES = [module for module, _ in COMMANDS.values()]


@pytest.mark.parametrize("name", MODULES)
def test_no_number_of_a_script_is_infinite_or_none(name, monkeypatch):
    """`generate.py grid --truncation-psi nan` wrote a black image."""
    seen: list[argparse.ArgumentParser] = []

    def note(parser, *_):
        seen.append(parser)
        raise KeyboardInterrupt

    monkeypatch.setattr(Parser, "parse_known_args", note)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(name).main([])
    for parser in seen:  # and its commands'
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                seen += action.choices.values()
            elif action.type not in (None, Path):
                assert callable(action.type)
                for text in ("nan", "inf", "-inf", "1e400", "1e300"):
                    with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
                        assert isinstance(action.type(text), Path)
    assert len(seen) == (9 if name.endswith("generate") else 1)


def test_help_tells_defaults_once_and_writes_options_with_hyphens():
    parse = Parser(prog="tool", description="what it_does")
    parse.add_argument("--lr", type=float, default=0.1, help="rate")
    parse.add_argument("--n", type=int, default=3, help="images (default: all)")
    parse.add_argument("--weight", type=float, default=1e5)
    parse.add_argument("--on-error", choices=("stop", "skip_it"), metavar="WHAT_NOW", help="as --some_other does")
    text = " ".join(parse.format_help().split())
    assert "--lr LR rate (default: 0.1)" in text
    assert "--n N images (default: all) --weight WEIGHT (default: 100000)" in text
    assert "--on-error WHAT_NOW as --some-other does" in text
    assert "--on_error" not in text
    assert "it_does" in text
    with pytest.raises(UserError, match=r"argument --on-error: invalid choice: 'skip' \(choose from .*skip_it"):
        parse.parse_args(["--on_error", "skip"])


def test_model_options():
    parse = Parser(prog="tool")
    add_model_options(parse)
    found = parse.parse_args(["--checkpoint", "runs/x", "--which", "best", "--batch-size", "7"])
    assert (found.checkpoint, found.which, found.device, found.batch_size) == ("runs/x", "best", None, 7)
    assert_raises(UserError, "at least 1", parse.parse_args, ["--checkpoint", "x", "--batch-size", "0"])
    assert_raises(UserError, "--checkpoint", parse.parse_args, [])


def test_table_options_are_passed_on_with_the_whole_path_of_their_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parse = Parser(prog="tool")
    add_table_options(parse)
    words = table_words(parse.parse_args(["--root", "images", "--label-column", "kind"]))
    assert words == ["--label-column=kind", f"--root={tmp_path / 'images'}"]


def test_rates_to_try_are_above_0_and_the_help_names_the_keys():
    for option in ("--lr-find-from", "--lr-find-to"):
        told = f"argument {option}: '0' is not a finite number above 0"
        assert_raises(UserError, told, train.parser().parse_known, [option, "0"])
    assert "Every key of the config is an option" in " ".join(train.parser().format_help().split())


class Shard(Stored):
    path: str
    size: Count


class Document(Stored):
    count: Annotated[int, Interval(ge=1, le=9_999)]
    classes: list[str]
    encoding: Literal["raw", "png"]
    mean: list[float] = []
    split: dict[str, Any] | None = None
    shards: list[Shard] | None = None
    seed: Whole = 0


RIGHT = {"count": 3, "classes": ["a"], "encoding": "raw"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": -1}, "count -1: must be greater than or equal to 1"),
        ({"count": True}, "count true: must be a valid integer"),
        ({"classes": ["a", 3, None]}, "classes[1] 3: must be a valid string"),
        ({"classes": b"\xff" * 9999}, "classes b'" + "\\xff" * 10 + "...: must be a valid list"),
        ({"encoding": "jpeg2000"}, "encoding 'jpeg2000': must be 'raw' or 'png'"),
        ({"mean": [0.5, float("nan")]}, "mean[1] nan: must be a finite number"),
        ({"split": 3}, "split 3: must be a valid dictionary"),
        ({"shards": [{"path": "a", "size": -1}]}, "shards[0].size -1: must be greater than or equal to 0"),
        ({"shards": [7]}, "shards[0] 7: must be a valid dictionary or instance of Shard"),
        ({"seed": 2**63}, "seed 9223372036854775808: must be less than 9223372036854775808"),
    ],
)
def test_what_does_not_fit_a_stored_document_is_named(wrong, message):
    with pytest.raises(ValueError, match=r"must be|is missing") as error:
        Document.read({**RIGHT, **wrong})
    assert str(error.value) == message
    with pytest.raises(ValueError, match=r"must be|is missing") as error:
        Document.read({**RIGHT, **wrong}, "header")
    assert str(error.value) == f"header.{message}"


def test_a_document_may_hold_more_than_is_read():
    document = Document.read({**RIGHT, "mean": [1], "later": object(), "shards": [{"path": "a", "size": 3, "x": 1}]})
    assert (document.count, document.mean, document.seed) == (3, [1.0], 0)
    assert document.shards == [Shard(path="a", size=3)]
    assert_raises(ValueError, r"^header .*: must be a valid dictionary or instance", Document.read, [], "header")
    assert_raises(ValueError, r"^count is missing$", Document.read, {})


@pytest.mark.parametrize("text", ["9" * 20, "-" + "9" * 30])
def test_numbers_that_are_too_large_are_told_the_range(text):
    """G6: a seed of twenty digits was "not a whole number"."""
    for kind in (number(int), positive):
        assert_raises(argparse.ArgumentTypeError, "is not a whole number.* below 2\\^63$", kind, text)
