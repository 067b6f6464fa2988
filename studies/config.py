"""The settings that every study has. A recipe configs/study_*.yaml sets only what differs from the defaults here."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Interval

from duetgan.training.base.config import RunConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.model import Config, InnerShare, NonNegativeInt, PositiveInt
from duetgan.utils.config.recipes import recipe_file
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError

Tail = Annotated[float, Interval(ge=1, le=1e6)]


class StudyData(Config):
    """The images. The study divides those of `path` into training, held-out and held-back ones and leaves out the rest;
    the test images stay as they are.
    """

    path: str | None = None  # packed training images
    test_path: str | None = None  # packed test images
    source: Literal["sample", "fashion-mnist", "cifar10"] | None = None  # instead: a named set, which the study packs
    root: str | None = None  # folder of its files
    size: Annotated[int, Ge(4)] | None = None  # px to which a source is packed
    held_out: InnerShare = 0.1  # of each class: choices are made on these, never on test images
    held_back: InnerShare = 0.3  # of each class at least: only a control sees them
    largest: PositiveInt | None = None  # training images of the largest class at most; null: all that are left
    long_tail: Tail = 1.0  # largest class over rarest: classes fall off exponentially in their order; 1: as they are
    seed: int = 0  # of the division

    def check(self) -> None:
        if self.held_out + self.held_back >= 1:
            raise UserError("held_out and held_back leave no image to train on; make their sum less than 1")


class Recipe(Config):
    """What is trained, and how it differs from a recipe of configs/."""

    config: str = ""  # a recipe for train.py
    overrides: dict[str, Any] = {}  # its keys, dotted: optimizer.lr: 0.1
    run: str | None = None  # a run that was trained on exactly this study's training images; nothing is trained then

    @property
    def file(self) -> Path:
        """The recipe's file; those of configs/ are found from any folder."""
        return Path(recipe_file(self.config))

    def text(self) -> str:
        """What the recipe says; empty where there is none. Raises UserError if it cannot be read."""
        return json.dumps(read_yaml(self.file), sort_keys=True) if self.config else ""

    def key(self) -> dict[str, Any]:
        """What defines a training: what the recipe says, not only its name."""
        return self.model_dump() | {"recipe": self.text()}

    def settings(self) -> RunConfig:
        """Those of its run. Raises UserError for what is wrong in them."""
        return build_run_config(read_yaml(self.file), tokens(self.overrides), str(self.file))


class StudyConfig(Config):
    """The keys every study has."""

    seeds: PositiveInt = 5  # trainings of each arm
    first_seed: NonNegativeInt = 0
    keep_runs: bool = False  # the checkpoints of arms that are done; without them a run takes kilobytes
    data: StudyData = StudyData()
    classifier: Recipe = Recipe()
    gan: Recipe = Recipe()
    # keys that --quick sets, dotted; a mapping is merged into what is there
    quick: dict[str, Any] = {}

    def check(self) -> None:
        data = self.data
        if (data.source is None) == (data.path is None):
            raise UserError("data: give either source (a named set) or path and test_path (packed files)")
        if (data.path is None) != (data.test_path is None):
            raise UserError("data.path and data.test_path: give both, the packed training and test images")
        for name in ("classifier", "gan"):
            recipe: Recipe = getattr(self, name)
            if not recipe.config and recipe.run is None:
                raise UserError(f"{name}.config is not set; name a recipe, such as configs/quickstart_{name}.yaml")

    @property
    def all_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


def quickened(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a recipe with what its `quick` sets. Raises UserError where it sets nothing."""
    quick = tree.get("quick")
    if not isinstance(quick, dict) or not quick:
        raise UserError("the recipe has no section quick; leave --quick out, or name the keys that it is to set there")
    for key, value in quick.items():
        *sections, name = str(key).split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"quick.{key}: {section} is no section")
        before = place.get(name)
        place[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return tree


def tokens(overrides: dict[str, Any]) -> list[str]:
    """Dotted keys as train.py's command line takes them."""
    return [f"--{key}={_text(value)}" for key, value in overrides.items()]


def _text(value: Any) -> str:
    """A value as YAML on one line. What YAML reads as a boolean is the word again, which fits `mode: off` as well."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
