"""The reference of config keys says what the models say."""

from typing import Annotated, Literal

import pytest
from annotated_types import Ge

import train
from models.registry import ARCHITECTURES
from training.engine.reference import Key, as_markdown, as_text, groups, keys, matching
from training.engine.tasks import TASKS
from utils.config.build import build
from utils.config.model import Config, PositiveInt, Share, keys_of, takes
from utils.errors import UserError

CONFIGS = [TASKS["classifier"].config(), *(TASKS["gan"].config(name) for name in ARCHITECTURES)]


class Inner(Config):
    """A section."""

    rate: Share = 0.5  # of change
    kind: Literal["a", "b"] = "a"
    # what they
    # are called
    names: list[str] = []  # None: all


class Outer(Config):
    """Sections with defaults of their own."""

    steps: PositiveInt | None = None  # how many
    inner: Inner = Inner(rate=0.25)


def test_keys_of_a_model():
    assert list(keys(Outer)) == [
        Key("steps", "null", "a whole number above 0, or null", "how many"),
        Key("inner.rate", "0.25", "a number above 0 and at most 1", "of change"),
        Key("inner.kind", "a", "one of a, b", ""),
        Key("inner.names", "[]", "a list of: text", "what they are called null: all"),
    ]


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        (bool, "true or false"),
        (Annotated[int, Ge(4)] | None, "a whole number at least 4, or null"),
        (PositiveInt | Literal["auto"], "a whole number above 0, or auto"),
        (tuple[float, float], "a pair of: a number"),
        (dict[str, float], "a mapping of text to a number"),
    ],
)
def test_types_in_words(hint, told):
    assert takes(hint) == told


@pytest.mark.parametrize("config", CONFIGS)
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


def test_every_key_is_explained_and_in_one_group_of_its_own():
    found = groups()
    assert [key.name for listed in found.values() for key in listed if not key.meaning] == []
    common = {key.name for key in found["Every run"]}
    assert all(common.isdisjoint(key.name for key in listed) for title, listed in found.items() if title != "Every run")
    everything = {key.name for listed in found.values() for key in listed}
    assert everything == {key.name for config in CONFIGS for key in keys(config)}


def test_a_word_selects():
    found = matching("r1-gamma")
    assert "loss.r1_gamma" in {key.name for key in found["GAN"]}
    assert "Classifier" not in found
    with pytest.raises(UserError, match="no key has this"):
        matching("nothing of this name")


def test_as_text_and_as_markdown_have_every_key():
    """U8."""
    found = groups()
    text, page = as_text(found), as_markdown(found)
    for key in (key for listed in found.values() for key in listed):
        assert f"--{key.name} {key.default}\n" in text
        assert f"- `{key.name}`: `{key.default}`" in page


def test_the_option(capsys):
    assert train.main(["--keys", "ada.target"]) == 0
    assert capsys.readouterr().out.startswith("GAN\n===\n--ada.target 0.6\n")
