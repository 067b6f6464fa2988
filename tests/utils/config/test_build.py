import re
from typing import Literal

import pytest

from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.gan.config import GanConfig
from duetgan.utils.config.build import build, differences, to_tree
from duetgan.utils.config.cli import UnknownKey
from duetgan.utils.config.model import Config
from duetgan.utils.config.yaml_files import near_file, read_yaml, save_yaml
from duetgan.utils.errors import UserError


class Inner(Config):
    rate: float = 0.1
    names: list[str] = ["a"]
    mode: Literal["off", "on"] = "off"

    def check(self):
        if self.rate <= 0:
            raise UserError("rate must be positive")


class Outer(Config):
    task: Literal["one", "two"] = "one"
    steps: int = 10
    path: str | None = None
    inner: Inner = Inner()
    other_inner: Inner = Inner(rate=0.7)

    def check(self):
        if self.steps > 100 and self.task == "two":
            raise UserError("steps above 100 need task one")


SECTION = "a valid dictionary or instance of Inner"


def one_line(error):
    return "\n" not in str(error.value)


def written(tmp_path, text, name="recipe.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("inner:\n\tsteps: 1\n", r"line 2, column 1.*spaces, not tabs"),
        ("a: [1, 2\nb: 3\n", r"not valid YAML: line 2"),
        ("inner: {a: 1", r"not valid YAML"),  # cut off
        ("- 1\n- 2\n", r"mapping of keys to values, but this file holds list"),
        ("", r"this file holds NoneType"),
        ("just words", r"this file holds str"),
        (b"\xff\xfe\x00a", r"(cannot be read|not valid YAML)"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, told):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=told) as error:
        read_yaml(path)
    assert str(error.value).startswith(f"{path}: ")
    assert one_line(error)


def test_missing_files_and_folders_are_named_with_what_is_near(tmp_path):
    near = written(tmp_path, "a: 1", "quickstart_gan.yaml")
    written(tmp_path, "a: 1", "unrelated_thing.yaml")
    written(tmp_path, "a: 1", "quickstart_gna.yml")  # is no recipe
    run = tmp_path / "run"
    run.mkdir()
    missing = r"no such configuration file(?!.*did you mean)"
    for path, told in (
        (tmp_path / "quickstart_gna.yaml", rf"no such configuration file.*did you mean {str(near)!r}"),
        (tmp_path / "nowhere" / "x.yaml", missing),
        (tmp_path / "classifier.yaml", missing),
        (run, f"^{run} is a folder: a configuration is a YAML file$"),
        (run, f"^{run} is a folder: give {run / 'config.yaml'}$"),
    ):
        with pytest.raises(UserError, match=told):
            read_yaml(path)
        if path == run:
            written(run, "task: gan", "config.yaml")


def test_command_line_beats_yaml_beats_the_owners_defaults():
    # the section's own default, not the class's defaults: GAN's betas are not Adam's usual ones
    config = build(Outer, {"other_inner": {"names": ["z"]}})
    assert config.other_inner == Inner(rate=0.7, names=["z"])
    assert build(GanConfig, {"generator_optimizer": {"lr": 0.01}}).generator_optimizer.betas == [0.0, 0.99]
    assert build(ClassifierConfig, {"optimizer": {"lr": 0.01}}).optimizer.name == "sgd"
    assert build(ClassifierConfig, {}, ["--optimizer.lr", "0.01"]).optimizer.name == "sgd"
    tree = {"steps": 20, "inner": {"rate": 0.5}}
    config = build(Outer, tree, ["--inner.rate", "0.25", "--path=x y"])
    assert config == Outer(steps=20, path="x y", inner=Inner(rate=0.25))
    assert build(Outer, tree).inner.rate == 0.5
    assert build(Outer, {}) == Outer()


@pytest.mark.parametrize(
    ("tree", "overrides", "expected"),
    [
        ({"inner": {"rate": "1e-3"}}, ["--inner.names", "[p, q]"], {"inner": Inner(rate=0.001, names=["p", "q"])}),
        ({"inner": {"rate": 0.5}}, ["--inner", "{names: [q]}"], {"inner": Inner(rate=0.5, names=["q"])}),
        ({"path": "x"}, ["--path", "null"], {"path": None}),
        ({"inner": {"rate": 1}}, [], {"inner": Inner(rate=1.0)}),
        ({}, ["--other-inner.rate", "2"], {"other_inner": Inner(rate=2.0)}),
        ({}, ["--path=a-b_c"], {"path": "a-b_c"}),  # hyphens are underscores in names alone
        ({}, ["--steps=-5"], {"steps": -5}),
        ({}, ["--steps", "-5"], {"steps": -5}),
    ],
)
def test_values_of_all_kinds(tree, overrides, expected):
    assert build(Outer, tree, overrides) == Outer(**expected)


@pytest.mark.parametrize(
    ("tree", "overrides", "message"),
    [
        ({"stpes": 1}, [], "f.yaml: unknown key 'stpes' (did you mean 'steps'?)"),
        ({"inner": {"rat": 1}}, [], "f.yaml: unknown key 'inner.rat' (did you mean 'inner.rate'?)"),
        ({"ratee": 1}, [], "f.yaml: unknown key 'ratee' (did you mean 'inner.rate'?)"),
        ({"zzz": 1}, [], "f.yaml: unknown key 'zzz'"),
        ({"steps": 1.5, "zzz": 1}, [], "f.yaml: unknown key 'zzz'"),  # before others
        ({}, ["--stpes", "1"], "command line: unknown key 'stpes' (did you mean 'steps'?)"),
        ({}, ["--step", "1"], "command line: unknown key 'step' (did you mean 'steps'?)"),  # no abbreviations
        ({}, ["--inner", "{rat: 1}"], "command line: unknown key 'inner.rat' (did you mean 'inner.rate'?)"),
        ({"steps": True}, [], "f.yaml: steps true: must be a valid integer"),
        ({"steps": None}, [], "f.yaml: steps null: must be a valid integer"),
        ({"steps": [1]}, ["--steps", "2.5"], "command line: steps 2.5: must be a valid integer"),
        ({"inner": {"rate": "fast"}}, [], "f.yaml: inner.rate 'fast': must be a valid number"),
        ({"inner": {"names": "a"}}, [], "f.yaml: inner.names 'a': must be a valid list"),
        ({"inner": {"names": [["a"]]}}, [], "f.yaml: inner.names[0] list: must be a valid string"),
        ({"task": "three"}, [], "f.yaml: task 'three': must be 'one' or 'two'"),
        ({}, ["--steps"], "command line: --steps has no value; write --steps VALUE"),
        ({}, ["--steps", "--path", "x"], "command line: --steps has no value; write --steps VALUE"),
        *(
            ({}, tokens, f"command line: {tokens[-1]!r} belongs to no option; write overrides as --section.key value")
            for tokens in (["5"], ["--steps", "5", "6"], ["--steps=5", "6"], ["-s"])
        ),
        ({"inner": 3}, ["--inner.rate=1"], f"f.yaml: inner 3: must be {SECTION}"),
        ({"inner": None}, [], f"f.yaml: inner null: must be {SECTION}"),
        ({"inner": {"rate": -1}}, [], "inner.rate must be positive"),
        ({}, ["--other_inner.rate", "-1"], "other_inner.rate must be positive"),
        ({"steps": 101}, ["--task", "two"], "steps above 100 need task one"),
    ],
)
def test_what_is_refused_is_named(tree, overrides, message):
    with pytest.raises(UserError) as error:
        build(Outer, tree, overrides, source="f.yaml")
    assert str(error.value) == message


@pytest.mark.parametrize(
    "config",
    [
        Outer(steps=3, path="a: b #c", inner=Inner(rate=1e-8, names=["null", "1", "yes"])),
        GanConfig(seed=5, batch_size=32),
        ClassifierConfig(precision="bf16"),
    ],
)
def test_a_saved_config_builds_the_equal_config(tmp_path, config):
    save_yaml(to_tree(config), tmp_path / "config.yaml")
    tree = read_yaml(str(tmp_path / "config.yaml"))
    assert tree == to_tree(config)
    assert build(type(config), tree) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_differences():
    before = {"a": 1, "b": {"c": 2, "d": [1]}, "gone": 5, "e": {"f": 1}}
    after = {"a": 1, "b": {"c": 3, "d": [1, 2]}, "new": None, "more": 4, "e": 7}
    assert differences(before, after) == {
        "b.c": (2, 3),
        "b.d": ([1], [1, 2]),
        "e": ({"f": 1}, 7),
        "gone": (5, None),
        "more": (None, 4),
    }
    assert differences(before, before) == {}


def test_a_recipe_of_another_size_is_not_near(tmp_path):
    """U14: `gan_64.yaml` was answered by r3gan_256.yaml."""
    for name in ("r3gan_256.yaml", "gan_64.yaml", "cifar10_gan.yaml"):
        (tmp_path / name).write_text("task: gan")
    for wrong, told in (("gan_96", ""), ("gann_64", "gan_64.yaml"), ("cifar_gan", "cifar10_gan.yaml")):
        assert near_file(tmp_path / f"{wrong}.yaml", "*.yaml").endswith(f"{told}'?)" if told else "")


@pytest.mark.parametrize(
    ("config_class", "name", "hint"),
    [
        (ClassifierConfig, "model.freeze", "did you mean 'finetune.freeze'?"),
        (GanConfig, "lr", "did you mean 'generator_optimizer.lr'?"),
    ],
)
def test_the_key_that_is_meant_is_named(config_class, name, hint):
    with pytest.raises(UnknownKey, match=re.escape(hint)):
        build(config_class, {}, [f"--{name}", "1"])
