import argparse

import pytest

from utils.config.cli import Parser, add_model_options, did_you_mean, normalise, positive
from utils.errors import UserError


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
    assert normalise([]) == []


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
        (["x", "--batch_siz=3"], r"did you mean '--batch-size'"),
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


def test_parse_known_leaves_overrides_in_order():
    found, rest = parser().parse_known(["x", "--data.some-path", "a-b", "--batch-size", "3", "--lr=1"])
    assert found.batch_size == 3
    assert rest == ["--data.some_path", "a-b", "--lr=1"]


def test_did_you_mean():
    assert did_you_mean("stpes", ["steps", "seed"]) == " (did you mean 'steps'?)"
    assert did_you_mean("qqq", ["steps", "seed"]) == ""
    assert did_you_mean("x", []) == ""


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_positive_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        positive(text)


def test_model_options():
    parse = Parser(prog="tool")
    add_model_options(parse)
    found = parse.parse_args(["--checkpoint", "runs/x", "--which", "best", "--batch-size", "7"])
    assert (found.checkpoint, found.which, found.device, found.batch_size) == ("runs/x", "best", None, 7)
    with pytest.raises(UserError, match="at least 1"):
        parse.parse_args(["--checkpoint", "x", "--batch-size", "0"])
    with pytest.raises(UserError, match="--checkpoint"):
        parse.parse_args([])


def test_help_and_messages_write_options_with_hyphens(capsys):
    """U20."""
    parser = Parser("x.py", description="what it_does")
    parser.add_argument("--on-error", choices=("stop", "skip_it"), metavar="WHAT_NOW", help="as --some_other does")
    text = parser.format_help()
    assert "--on-error WHAT_NOW" in text
    assert "as --some-other does" in text
    assert "--on_error" not in text
    assert "it_does" in text
    with pytest.raises(UserError, match=r"argument --on-error: invalid choice: 'skip' \(choose from .*skip_it"):
        parser.parse_args(["--on_error", "skip"])
    with pytest.raises(UserError, match=r"unknown argument --on-eror \(did you mean '--on-error'\?\)"):
        parser.parse_args(["--on-eror", "skip"])
    assert parser.parse_args(["--on_error", "stop"]).on_error == "stop"
