import math
import re
import types
import typing
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge

from duetgan.training.base.config import RunConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.config import GanConfig
from duetgan.utils.config.build import build, to_tree
from duetgan.utils.config.model import Config, Decay, PositiveFloat, PositiveInt, Probability
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises


class Part(Config):
    rate: PositiveFloat = 1.0
    count: Annotated[int, Ge(2)] | Literal["auto", "all"] | None = None
    plain: float = 0.0
    whole: int = 0
    pair: tuple[Decay, Decay] = (0.0, 0.5)
    steps: list[PositiveInt] = []
    shares: dict[str, Probability] = {}
    lengths: Probability | dict[int, PositiveFloat] = 1.0


class Whole(Config):
    size: PositiveInt = 1
    part: Part = Part()


WRONG = [
    ({"rate": 0.0}, "rate 0.0: must be greater than 0"),
    ({"plain": math.nan}, "plain nan: must be a finite number below 2^63"),
    ({"plain": -math.inf}, "plain -inf: must be a finite number below 2^63"),
    ({"whole": 2**63}, "whole 9223372036854775808: must be a finite number below 2^63"),
    ({"count": 1}, "count 1: must be greater than or equal to 2, or 'auto' or 'all'"),
    ({"pair": (0.5, 1.0)}, "pair[1] 1.0: must be less than 1"),
    ({"steps": [3, 0]}, "steps[1] 0: must be greater than 0"),
    ({"shares": {"a": 1.0, "b": 1.5}}, "shares.b 1.5: must be less than or equal to 1"),
    (
        {"lengths": 2.0},
        "lengths 2.0: must be less than or equal to 1, or a valid dictionary",
    ),
    ({"lengths": {8: 0.0}}, "lengths.8 0.0: must be greater than 0"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG)
def test_a_number_out_of_its_range_is_refused_wherever_it_comes_from(wrong, told):
    with pytest.raises(UserError) as error:
        Part(**wrong)
    assert str(error.value) == told
    with pytest.raises(UserError) as error:
        build(Whole, {"part": wrong})
    assert str(error.value) == f"configuration: part.{told}"


def test_numbers_in_their_ranges_stay_plain_and_the_message_has_the_key():
    right = Part(rate=1e-30, count=2, pair=(0.0, 0.99), steps=[1], shares={"a": 0.0, "b": 1.0}, lengths={8: 0.1})
    assert build(Part, to_tree(right)) == right
    assert Part(count="auto").count == "auto"
    assert build(Whole, {}, ["--size", "3", "--part.rate=1e-3"]) == Whole(size=3, part=Part(rate=1e-3))
    assert type(build(Whole, {}, ["--part.rate", "2"]).part.rate) is float
    with pytest.raises(UserError, match=r"^command line: generator_optimizer\.lr 0: must be greater than 0$"):
        build(GanConfig, {}, ["--generator_optimizer.lr", "0"])


def config_classes(config_class: type[Any] = Config) -> set[type[Any]]:
    found: set[type[Any]] = {config_class}
    for below in config_class.__subclasses__():
        found |= config_classes(below)
    return {part for part in found if part is not Config and not part.__module__.startswith("tests.")}


def places(hint: Any, number: Any) -> list[Any]:
    """The values of type `hint` that hold `number`, each in another place; none where it takes no number."""
    kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Annotated:
        return places(inside[0], number)
    if kind in (typing.Union, types.UnionType):
        return [value for arm in inside for value in places(arm, number)]
    if kind in (list, tuple):
        return [kind([value] * 2) for value in places(inside[0], number)]
    if kind is dict:
        return [{"x" if inside[0] is str else 8: value} for value in places(inside[1], number)]
    takes = kind in (int, float) if isinstance(number, int) else kind is float
    return [number] if takes else []


NUMBERS = [math.nan, math.inf, -math.inf, 2**63, -(2**63)]


@pytest.mark.parametrize("number", NUMBERS, ids=["nan", "inf", "-inf", "2^63", "-2^63"])
def test_no_key_of_any_config_takes_what_is_no_number_of_this_world(number):
    """H6 (`optimizer.lr: .nan` trained and ruined the weights) and H22: in every field of every config dataclass,
    whether it is built in Python or from a tree.
    """
    checked = 0
    for config_class in config_classes():
        for name, hint in typing.get_type_hints(config_class, include_extras=True).items():
            for value in places(hint, number) if typing.get_origin(hint) is not typing.ClassVar else []:
                with pytest.raises(UserError, match=rf"(^|\.){name}\b.*: must be "):
                    config_class(**{name: value, **({"task": "gan"} if config_class is RunConfig else {})})
                with pytest.raises(UserError, match=rf"{name}"):
                    build(config_class, {"task": "gan", name: value} if config_class is RunConfig else {name: value})
                checked += 1
    assert checked > (140 if isinstance(number, int) else 70)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"generator": {"mapping_layers": 10**9}}, "generator.mapping_layers 1000000000: must be less than"),
        ({"discriminator": {"mapping_layers": 101}}, "discriminator.mapping_layers 101: must be less than"),
        ({"data": {"workers": 10**6}}, "data.workers 1000000: must be less than or equal to 1024, or 'auto'"),
        ({"data": {"prefetch": 10**6}}, "data.prefetch 1000000: must be less than or equal to 1024"),
        (
            {"distributed": {"timeout": 1e18}},
            "distributed.timeout 1e+18: must be less than or equal to 1",
        ),
    ],
)
def test_counts_that_no_machine_has_are_refused(tree, told):
    """H12: a billion mapping layers took minutes, which Ctrl-C did not end, and then all memory."""
    assert_raises(UserError, f"^configuration: {re.escape(told)}", build, GanConfig, tree)


@pytest.mark.parametrize("given", [[], {}, None, ["stylegan2"]])
def test_an_architecture_is_a_name(given):
    assert_raises(UserError, "architecture", build_run_config, {"task": "gan", "architecture": given}, [], "x.yaml")
