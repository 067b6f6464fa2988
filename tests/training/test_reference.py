"""The reference of config keys says what the models say."""

import json
import re
import runpy
from typing import Annotated, Any, Literal

import pytest
import yaml
from annotated_types import Ge

from duetgan.models.registry import ARCHITECTURES
from duetgan.training.engine.tasks import TASKS
from duetgan.utils.config.build import build
from duetgan.utils.config.model import Config, PositiveFraction, PositiveInt, keys_of
from duetgan.utils.config.recipes import CONFIGS
from duetgan.utils.config.yaml_files import read_yaml
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


KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}
KINDS |= {"boolean": bool, "null": type(None)}


def fits(value: Any, rule: Any, root: Any) -> bool:
    """Whether a value keeps a JSON schema, as far as ours go."""
    if isinstance(rule, bool):
        return rule
    checks = [fits(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root)] if "$ref" in rule else []
    checks += [fits(value, each, root) for each in rule.get("allOf", ())]
    checks += [any(fits(value, each, root) for each in rule["anyOf"])] if "anyOf" in rule else []
    if "if" in rule:
        checks.append(fits(value, rule.get("then" if fits(value, rule["if"], root) else "else", True), root))
    if "type" in rule:
        checks.append(isinstance(value, KINDS[rule["type"]]) and isinstance(value, bool) <= (rule["type"] == "boolean"))
    checks += [value in rule.get("enum", [rule["const"]] if "const" in rule else [value])]
    if isinstance(value, dict):
        parts = rule.get("properties", {})
        checks += [key in value for key in rule.get("required", ())]
        checks += [
            fits(item, parts.get(key, rule.get("additionalProperties", True)), root) for key, item in value.items()
        ]
    elif isinstance(value, list):
        checks += [fits(item, rule.get("items", True), root) for item in value]
    elif isinstance(value, str):
        checks.append(re.search(rule.get("pattern", ""), value) is not None)
    elif isinstance(value, (int, float)):
        checks += [value >= rule.get("minimum", value), value <= rule.get("maximum", value)]
        checks += [value > rule["exclusiveMinimum"]] if "exclusiveMinimum" in rule else []
    return all(checks)


def test_an_editor_checks_recipes_by_the_schema():
    root = json.loads((CONFIGS / "schema.json").read_text())
    files = sorted(CONFIGS.glob("*.yaml"))
    assert len(files) > 20
    for file in files:
        assert "\n# yaml-language-server: $schema=schema.json\n" in file.read_text()
        assert fits(read_yaml(file), root, root), file
    for text, right in {
        "{task: gan, steps: 90ep, generator_optimizer: {milestones: [3, 5ep]}}": True,
        "{task: gan, architecture: dcgan, generator: {width: 8}}": True,
        "{task: gan, generator: {width: 8}}": False,  # stylegan2 has no such key
        "{task: gan, architecture: dcgan, generator: {mapping_layers: 8}}": False,
        "{task: gan, model: {name: resnet18}}": False,
        "{task: classifier, model: {nam: resnet18}}": False,
        "{task: classifier, optimizer: {lr: -1}}": False,
        "{task: classifier, optimizer: {name: adamm}}": False,
        "{task: classifier, steps: 90 epochs}": False,
        "{task: gna}": False,
        "{steps: 3}": False,
    }.items():
        assert fits(yaml.safe_load(text), root, root) is right, text
    settings = root["$defs"]["OptimizerConfig"]["properties"]["lr"]
    assert (settings["description"], settings["default"]) == ("peak learning rate", 0.001)
