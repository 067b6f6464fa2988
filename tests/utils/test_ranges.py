import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from training.base.config import DataConfig
from training.classifier.task import ClassifierConfig
from training.gan.config import GanConfig, config_of
from utils.config import build, read_yaml, to_tree
from utils.errors import UserError
from utils.ranges import Checked, Decay, PositiveFloat, PositiveInt, Probability, at_least, check_ranges


@dataclass(kw_only=True)
class Part(Checked, section="part"):
    rate: PositiveFloat = 1.0
    count: Annotated[int, at_least(2)] | Literal["auto", "all"] | None = None
    plain: float = 0.0
    whole: int = 0
    pair: tuple[Decay, Decay] = (0.0, 0.5)
    steps: list[PositiveInt] = field(default_factory=list)
    shares: dict[str, Probability] = field(default_factory=dict)
    lengths: Probability | dict[int, PositiveFloat] = 1.0


@dataclass(kw_only=True)
class Whole(Checked):
    size: PositiveInt = 1
    part: Part = field(default_factory=Part)


WRONG = [
    ({"rate": 0.0}, "rate 0.0: must be above 0"),
    ({"rate": math.nan}, "rate nan: must be above 0"),
    ({"rate": math.inf}, "rate inf: must be a finite number below 2^63"),
    ({"plain": math.nan}, "plain nan: must be a finite number below 2^63"),
    ({"plain": -math.inf}, "plain -inf: must be a finite number below 2^63"),
    ({"whole": 2**63}, "whole 9223372036854775808: must be a finite number below 2^63"),
    ({"count": 1}, "count 1: must be at least 2, or auto, or all, or null"),
    ({"pair": (0.5, 1.0)}, "pair 1.0: must be at least 0 and below 1"),
    ({"steps": [3, 0]}, "steps 0: must be above 0"),
    ({"shares": {"a": 1.0, "b": 1.5}}, "shares.b 1.5: must be at least 0 and at most 1"),
    ({"lengths": 2.0}, "lengths 2.0: must be at least 0 and at most 1"),
    ({"lengths": {8: 0.0}}, "lengths.8 0.0: must be above 0"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG)
def test_a_number_out_of_its_range_is_refused_wherever_it_comes_from(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        Part(**wrong)
    assert str(error.value) == f"part.{told}"
    with pytest.raises(UserError) as error:
        build(Whole, {"part": wrong})
    assert str(error.value) == f"part.{told}"


def test_numbers_in_their_ranges_are_taken_and_stay_plain() -> None:
    right = Part(rate=1e-30, count=2, pair=(0.0, 0.99), steps=[1], shares={"a": 0.0, "b": 1.0}, lengths={8: 0.1})
    assert build(Part, to_tree(right)) == right
    assert Part(count="auto").count == "auto"
    assert build(Whole, {}, ["--size", "3", "--part.rate=1e-3"]) == Whole(size=3, part=Part(rate=1e-3))
    assert type(build(Whole, {}, ["--part.rate", "2"]).part.rate) is float


def test_a_float_is_no_whole_number_where_a_config_is_built_in_python() -> None:
    with pytest.raises(UserError, match=r"^data\.prefetch 3\.0: must be a whole number$"):
        DataConfig(prefetch=3.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^data\.workers 2\.0: must be a whole number, or auto$"):
        DataConfig(workers=2.0)  # type: ignore[arg-type]


def test_the_message_has_the_key_that_was_given() -> None:
    with pytest.raises(UserError, match=r"^generator_optimizer\.lr 0\.0: must be above 0$"):
        build(GanConfig, {}, ["--generator_optimizer.lr", "0"])
    with pytest.raises(UserError, match=r"^optimizer\.momentum -1\.0: must be at least 0 and below 1$"):
        build(ClassifierConfig, {"optimizer": {"momentum": -1}})


def floats(config_class: Any, prefix: str = "") -> list[tuple[Any, str, str]]:
    """The sections' classes, their prefixes and the keys that take one floating-point number."""
    found = []
    for name, hint in typing.get_type_hints(config_class).items():
        if dataclasses.is_dataclass(hint):
            found += floats(hint, f"{prefix}{name}.")
        elif hint is float or (float in typing.get_args(hint) and typing.get_origin(hint) not in (tuple, list, dict)):
            found.append((config_class, prefix, name))
    return found


@pytest.mark.parametrize("config_class", [GanConfig, config_of("r3gan"), ClassifierConfig])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_every_number_of_a_config_is_finite(config_class: Any, number: float) -> None:
    """H6: `optimizer.lr: .nan` trained and ruined the weights."""
    keys = floats(config_class)
    assert len(keys) > 15
    for section, prefix, name in keys:
        with pytest.raises(UserError, match=rf"^{prefix}{name} {number}: must be "):
            check_ranges(section, {name: number}, prefix)
    with pytest.raises(UserError, match=rf"^{prefix}{name} {number}: must be "):
        build(config_class, {}, [f"--{prefix}{name}={str(number).replace('nan', '.nan').replace('inf', '.inf')}"])


def test_numbers_that_are_too_long(tmp_path: Any) -> None:
    """H22: an integer of 5,000 digits ended in a traceback."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"task: gan\nseed: {'9' * 5000}\n")
    with pytest.raises(UserError, match=r"recipe\.yaml: cannot be read as a configuration"):
        read_yaml(path)
    with pytest.raises(UserError, match=r"seed 999.*: must be a finite number"):
        build(GanConfig, {"seed": int("9" * 400)})
    with pytest.raises(UserError, match=r"schedule_kimg|too large"):
        build(GanConfig, {"schedule_kimg": int("9" * 400)})
    path.write_text("[" * 10_000)
    with pytest.raises(UserError, match=r"recipe\.yaml: "):
        read_yaml(path)
