from dataclasses import dataclass, field
from typing import Literal

import pytest

from training.classifier.config import ClassifierConfig
from training.gan.config import GanConfig
from utils.config.build import RENAMED, UnknownKey, build, differences, keys_of, of_today, renamed, to_tree
from utils.config.yaml_files import near_file, read_yaml, save_yaml
from utils.errors import UserError


@dataclass(kw_only=True)
class Inner:
    learning_rate: float = 0.1
    names: list[str] = field(default_factory=lambda: ["a"])

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise UserError("inner: learning_rate must be positive")


@dataclass(kw_only=True)
class Outer:
    task: Literal["one", "two"] = "one"
    steps: int = 10
    path: str | None = None
    inner: Inner = field(default_factory=Inner)
    other_inner: Inner = field(default_factory=lambda: Inner(learning_rate=0.7))

    def __post_init__(self):
        if self.steps > 100 and self.task == "two":
            raise ValueError("steps above 100 need task one")


def one_line(error):
    return "\n" not in str(error.value)


# --- reading


def written(tmp_path, text, name="recipe.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_read_yaml(tmp_path):
    path = written(tmp_path, "steps: 3\ninner:\n  names: [x, y]\n")
    assert read_yaml(path) == {"steps": 3, "inner": {"names": ["x", "y"]}}
    assert read_yaml(str(path)) == read_yaml(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("inner:\n\tsteps: 1\n", r"line 2, column 1.*spaces, not tabs"),
        ("a: [1, 2\nb: 3\n", r"not valid YAML: line 2"),
        ("inner: {a: 1", r"not valid YAML"),  # cut off
        ("- 1\n- 2\n", r"mapping of keys to values, but this file holds list"),
        ("", r"this file holds NoneType"),
        ("just words", r"this file holds str"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, told):
    path = written(tmp_path, text)
    with pytest.raises(UserError, match=told) as error:
        read_yaml(path)
    assert str(error.value).startswith(f"{path}: ")
    assert one_line(error)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(UserError, match=r"recipe.yaml: (cannot be read|not valid YAML)"):
        read_yaml(path)


def test_a_missing_file_is_named_with_its_near_match(tmp_path):
    near = written(tmp_path, "a: 1", "quickstart_gan.yaml")
    with pytest.raises(UserError, match="no such configuration file") as error:
        read_yaml(tmp_path / "quickstart_gna.yaml")
    assert f"did you mean {str(near)!r}" in str(error.value)
    with pytest.raises(UserError, match="no such configuration file"):
        read_yaml(tmp_path / "nowhere" / "x.yaml")


def test_a_folder_is_no_configuration(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(UserError) as error:
        read_yaml(run)
    assert str(error.value) == f"{run} is a folder: a configuration is a YAML file"
    written(run, "task: gan", "config.yaml")
    with pytest.raises(UserError) as error:
        read_yaml(run)
    assert str(error.value) == f"{run} is a folder: give {run / 'config.yaml'}"


def test_a_file_of_another_name_is_no_near_match(tmp_path):
    written(tmp_path, "a: 1", "unrelated_thing.yaml")
    with pytest.raises(UserError) as error:
        read_yaml(tmp_path / "quickstart_gan.yaml")
    assert "did you mean" not in str(error.value)


# --- building


def test_command_line_beats_yaml_beats_defaults():
    tree = {"steps": 20, "inner": {"learning_rate": 0.5}}
    config = build(Outer, tree, ["--inner.learning_rate", "0.25", "--path=x y"])
    assert config == Outer(steps=20, path="x y", inner=Inner(learning_rate=0.25))
    assert build(Outer, tree).inner.learning_rate == 0.5
    assert build(Outer, {}) == Outer()


def test_a_section_in_yaml_keeps_the_defaults_of_its_owner():
    # the section's own default_factory, not the class's defaults: GAN's betas are not Adam's usual ones
    config = build(Outer, {"other_inner": {"names": ["z"]}})
    assert config.other_inner == Inner(learning_rate=0.7, names=["z"])
    assert build(GanConfig, {"generator_optimizer": {"lr": 0.01}}).generator_optimizer.betas == [0.0, 0.99]
    assert build(ClassifierConfig, {"optimizer": {"lr": 0.01}}).optimizer.name == "sgd"
    assert build(ClassifierConfig, {}, ["--optimizer.lr", "0.01"]).optimizer.name == "sgd"


def test_hyphens_are_underscores_in_names_but_not_in_values():
    config = build(Outer, {}, ["--other-inner.learning-rate", "2", "--path=a-b_c"])
    assert (config.other_inner.learning_rate, config.path) == (2.0, "a-b_c")


def test_values_of_all_kinds():
    config = build(Outer, {"inner": {"learning_rate": "1e-3"}}, ["--inner.names", "[p, q]", "--path", "null"])
    assert config == Outer(inner=Inner(learning_rate=0.001, names=["p", "q"]))
    assert build(Outer, {"path": "x"}, ["--path", "null"]).path is None
    assert build(Outer, {"inner": {"learning_rate": 1}}).inner.learning_rate == 1.0
    assert build(Outer, {}, ["--steps=-5"]).steps == build(Outer, {}, ["--steps", "-5"]).steps == -5


@pytest.mark.parametrize(
    ("tree", "overrides", "told"),
    [
        ({"stpes": 1}, [], r"f.yaml: unknown key 'stpes' \(did you mean 'steps'\?\)"),
        ({"inner": {"lerning_rate": 1}}, [], r"f.yaml: unknown key 'inner.lerning_rate' \(did you mean 'inner.l"),
        ({"learning_rates": 1}, [], r"f.yaml: unknown key 'learning_rates' \(did you mean"),
        ({"zzz": 1}, [], r"f.yaml: unknown key 'zzz'$"),
        ({3: 1}, [], r"f.yaml: unknown key '3'"),
        ({}, ["--stpes", "1"], r"command line: unknown key 'stpes' \(did you mean 'steps'\?\)"),
        ({}, ["--innr.learning-rate=1"], r"unknown key 'innr.learning_rate' \(did you mean 'inner.l"),
        ({}, ["--step", "1"], r"command line: unknown key 'step' \(did you mean 'steps'"),  # no abbreviations
        ({}, ["--inner", "{lerning_rate: 1}"], r"lerning_rate"),
        ({"steps": 1.5}, [], r'f.yaml: key "steps": Expected int'),
        ({"steps": True}, [], r'f.yaml: key "steps": Expected int'),
        ({"inner": {"learning_rate": "fast"}}, [], r'key "inner.learning_rate": Expected float'),
        ({"inner": {"names": "a"}}, [], r'key "inner.names"'),
        ({"path": [1]}, [], r'f.yaml: key "path": Expected str, null. Got value: \[1\]$'),
        ({"task": "three"}, [], r"key \"task\": Expected 'one', 'two'. Got value: three"),
        ({}, ["--steps", "many"], r'key "steps": Expected int'),
        ({}, ["--steps"], r"steps.*expected one argument"),
        ({}, ["--steps", "--path", "x"], r"steps.*expected one argument"),
        ({}, ["5"], r"command line: '5' belongs to no option"),
        ({}, ["--steps", "5", "6"], r"command line: '6' belongs to no option"),
        ({}, ["--steps=5", "6"], r"6"),
        ({}, ["-s", "6"], r"'-s' belongs to no option"),
        ({"inner": 3}, [], r"'inner' is a section with keys of its own, but holds 3"),
        ({"inner": None}, [], r"'inner' is a section with keys of its own, but holds None"),
        ({"inner": {"learning_rate": -1}}, [], r"inner: learning_rate must be positive"),
        ({}, ["--inner.learning_rate", "-1"], r"inner: learning_rate must be positive"),
        ({"task": "two", "steps": 101}, [], r"f.yaml: .*steps above 100 need task one"),
        ({"steps": 101}, ["--task", "two"], r"steps above 100 need task one"),
    ],
)
def test_what_is_refused_is_named(tree, overrides, told):
    with pytest.raises(UserError, match=told) as error:
        build(Outer, tree, overrides, source="f.yaml")
    assert one_line(error)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_step", "--max-steps"),
        ("proc", "--procs"),
        ("gpu", "--gpus"),
        ("devise", "--device"),
        ("steps_", "steps"),  # the nearer of both
        ("learning_rates", "inner.learning_rate"),
        ("lerning_rate", "inner.learning_rate"),
    ],
)
def test_options_of_the_script_are_candidates_too(name, near):
    with pytest.raises(UnknownKey) as error:
        build(Outer, {}, [f"--{name}", "1"])
    told = error.value.among(["--max-steps", "--procs", "--gpus", "--device", "--run-dir"])
    assert str(told) == f"command line: unknown key {name!r} (did you mean {near!r}?)"


def test_null_for_a_number_names_the_key():
    with pytest.raises(UserError, match="steps"):
        build(GanConfig, {"task": "gan", "steps": None}, source="f.yaml")


def test_the_suggestion_for_a_bare_leaf_can_be_typed():
    with pytest.raises(UserError, match=r"did you mean '(generator|discriminator)_optimizer\.lr'"):
        build(GanConfig, {"task": "gan"}, ["--lr", "1"])


def test_a_value_in_place_of_a_section_names_the_file():
    with pytest.raises(UserError, match=r"^f.yaml: 'inner'"):
        build(Outer, {"inner": None}, source="f.yaml")


def test_keys_of_lists_sections_and_leaves():
    assert list(keys_of(Outer)) == [
        *["task", "steps", "path", "inner", "inner.learning_rate", "inner.names"],
        *["other_inner", "other_inner.learning_rate", "other_inner.names"],
    ]


# --- keys that have another name today


@pytest.mark.parametrize(
    ("config_class", "old", "new"),
    [
        (GanConfig, "ema.half_life_kimg", "ema.ema_kimg"),
        (GanConfig, "ema.half_life_kimg_start", "ema.ema_kimg_start"),
        (GanConfig, "ema.ramp", "ema.ema_rampup"),
        (GanConfig, "augment.trivial", "augment.trivial_augment"),
        (GanConfig, "generator_optimizer.cycle_rise", "generator_optimizer.pct_start"),
        (ClassifierConfig, "optimizer.cycle_rise", "optimizer.pct_start"),
        (ClassifierConfig, "augment.mix", "augment.mix_prob"),
        (ClassifierConfig, "train", "finetune"),
        (ClassifierConfig, "train.freeze_bn", "finetune.freeze_bn"),
    ],
)
def test_an_old_key_is_refused_with_the_new_name(config_class, old, new):
    assert renamed(old) == new in keys_of(config_class)
    assert renamed(new) == new
    with pytest.raises(UnknownKey, match=rf"^command line: {old} is now {new}$") as error:
        build(config_class, {}, [f"--{old}", "1"])
    assert str(error.value.among(["--train"])) == str(error.value)
    section, _, leaf = old.partition(".")
    if leaf and section != "train":
        with pytest.raises(UnknownKey, match=rf"^f.yaml: {old} is now {new}$"):
            build(config_class, {section: {leaf: 1}}, source="f.yaml")


def test_every_new_name_is_a_key():
    known = {*keys_of(GanConfig), *keys_of(ClassifierConfig)}
    assert set(RENAMED.values()) <= known
    assert not set(RENAMED) & known


def test_an_old_run_s_config_is_read_by_todays_names():
    old = {
        "train": {"freeze": ["stem"], "stage_lr": {"train": 0.5}},
        "optimizer": {"lr": 0.1, "cycle_rise": 0.2},
        "augment": {"mix": 0.5, "trivial": True, "cutmix": 1.0},
        "data": {"class_rates": {"train": 2.0}},
    }
    assert of_today(old) == {
        "finetune": {"freeze": ["stem"], "stage_lr": {"train": 0.5}},
        "optimizer": {"lr": 0.1, "pct_start": 0.2},
        "augment": {"mix_prob": 0.5, "trivial_augment": True, "cutmix": 1.0},
        "data": {"class_rates": {"train": 2.0}},
    }
    assert of_today({"progressive": {"batch_sizes": {8: 4}}}) == {"progressive": {"batch_sizes": {8: 4}}}
    assert of_today(to_tree(GanConfig())) == to_tree(GanConfig())


# --- saving


@pytest.mark.parametrize(
    "config",
    [
        Outer(steps=3, path="a: b #c", inner=Inner(learning_rate=1e-8, names=["null", "1", "yes"])),
        GanConfig(seed=5, batch_size=32),
        ClassifierConfig(precision="bf16"),
    ],
)
def test_a_saved_config_builds_the_equal_config(tmp_path, config):
    save_yaml(to_tree(config), tmp_path / "config.yaml")
    tree = read_yaml(tmp_path / "config.yaml")
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


# --- names that are near, and names that only look it


def test_a_recipe_of_another_size_is_not_near(tmp_path):
    """U14: `gan_64.yaml` was answered by r3gan_256.yaml."""
    for name in ("r3gan_256.yaml", "gan_64.yaml", "cifar10_gan.yaml"):
        (tmp_path / name).write_text("task: gan")
    for wrong, told in (("gan_96", ""), ("gann_64", "gan_64.yaml"), ("cifar_gan", "cifar10_gan.yaml")):
        assert near_file(tmp_path / f"{wrong}.yaml", "*.yaml").endswith(f"{told}'?)" if told else "")


@pytest.mark.parametrize("name", ["epochs", "num_epochs", "learning_rate", "image_size"])
def test_a_name_without_a_near_match_is_told_what_to_give(name):
    """U14: `--epochs` was answered by "--procs"."""
    with pytest.raises(UnknownKey, match=rf"^command line: there is no {name}; .*--") as error:
        build(GanConfig, {"task": "gan"}, [f"--{name}", "1"])
    assert str(error.value.among(["--procs"])) == str(error.value)
