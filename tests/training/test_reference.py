"""The reference of config keys says what the models say."""

import json
import runpy
from typing import Annotated, Literal

import pytest
from annotated_types import Ge

from duetgan.models.registry import ARCHITECTURES
from duetgan.training.engine.tasks import TASKS
from duetgan.utils.config.build import build
from duetgan.utils.config.model import Config, PositiveFraction, PositiveInt, keys_of
from duetgan.utils.config.recipes import CONFIGS
from tests.conftest import REPOSITORY

REFERENCE = runpy.run_path(str(REPOSITORY / "docs" / "keys.py"))
Key, groups, keys, takes = (REFERENCE[name] for name in ("Key", "groups", "keys", "takes"))
MODELS = [TASKS["classifier"].config(), *(TASKS["gan"].config(name) for name in ARCHITECTURES)]


class Inner(Config):
    """A section."""

    rate: PositiveFraction = 0.5  # of change
    kind: Literal["a", "b"] = "a"
    # what they
    # are called
    names: list[str] = []  # None: all


class Outer(Config):
    """Sections with defaults of their own."""

    steps: PositiveInt | None = None  # how many
    inner: Inner = Inner(rate=0.25)


def test_keys_of_a_model_are_explained_each_in_one_group():
    assert list(keys(Outer)) == [
        Key("steps", "null", "int>0|null", "how many"),
        Key("inner.rate", "0.25", "float>0,<=1", "of change"),
        Key("inner.kind", "a", "a|b", ""),
        Key("inner.names", "[]", "[text,...]", "what they are called null: all"),
    ]
    found = groups()
    assert [key.name for listed in found.values() for key in listed if not key.meaning] == []
    common = {key.name for key in found["Every run"]}
    assert all(common.isdisjoint(key.name for key in listed) for title, listed in found.items() if title != "Every run")
    everything = {key.name for listed in found.values() for key in listed}
    assert everything == {key.name for config in MODELS for key in keys(config)}


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        (bool, "true|false"),
        (Annotated[int, Ge(4)] | None, "int>=4|null"),
        (PositiveInt | Literal["auto"], "int>0|auto"),
        (tuple[float, float], "[float,float]"),
        (dict[str, float], "{text:float}"),
    ],
)
def test_types_in_short(hint, told):
    assert takes(hint) == told


@pytest.mark.parametrize("config", MODELS)
def test_every_key_is_there_with_its_default(config):
    listed = {key.name: key for key in keys(config)}
    sections = {name.rpartition(".")[0] for name in keys_of(config)}
    assert set(listed) == {name for name in keys_of(config) if name not in sections}
    built = build(config, {})
    for name in ("generator_optimizer.betas", "optimizer.lr", "loss.objective", "model.name"):
        section, _, leaf = name.partition(".")
        if name in listed:
            assert listed[name].default == str(getattr(getattr(built, section), leaf))
    assert "log.every" in listed


def test_markdown_and_repository_have_every_key():
    """U8. J17: after a change of keys or recipes: `python docs/hooks.py`."""
    found = groups()
    page = " ".join(REFERENCE["as_markdown"](found).split())
    for key in (key for listed in found.values() for key in listed):
        assert f"{key.name.rpartition('.')[2]}: {key.default}`" in page or f"{key.name}: {key.default}`" in page
    for file, text in runpy.run_path(str(REPOSITORY / "docs" / "hooks.py"))["contents"]().items():
        assert file.read_text() == text, f"{file.name} is old: python docs/hooks.py"


def test_an_editor_finds_the_schema_of_each_recipe():
    files = sorted(CONFIGS.glob("*.yaml"))
    assert len(files) > 20
    assert all("\n# yaml-language-server: $schema=schema.json\n" in file.read_text() for file in files)
    settings = json.loads((CONFIGS / "schema.json").read_text())["$defs"]["OptimizerConfig"]["properties"]["lr"]
    assert (settings["description"], settings["default"]) == ("peak learning rate", 0.001)
