from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval

from duetgan.utils.config.model import Count, Stored, Unfit, Whole
from tests.conftest import assert_raises


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
        ({"count": -1}, "count is -1, but must be a whole number at least 1 and at most 9,999"),
        ({"count": True}, "count is true, but must be a whole number at least 1 and at most 9,999"),
        ({"count": 1.0}, "count is 1.0, but must be a whole number at least 1 and at most 9,999"),
        ({"count": 10**5000}, "count is (of 16610 bits), but must be a whole number at least 1 and at most 9,999"),
        ({"classes": ["a", 3, None]}, "classes[1] is 3, but must be text"),
        ({"classes": "abc"}, "classes is 'abc', but must be a list of: text"),
        ({"classes": b"\xff" * 9999}, "classes is b'" + "\\xff" * 40 + "'..., but must be a list of: text"),
        ({"encoding": "jpeg2000"}, "encoding is 'jpeg2000', but must be one of raw, png"),
        ({"mean": [0.5, float("nan")]}, "mean[1] is nan, but must be a number"),
        ({"mean": [True]}, "mean[0] is true, but must be a number"),
        ({"split": 3}, "split is 3, but must be a mapping of text to any value, or null"),
        ({"shards": [{"path": "a", "size": -1}]}, "shards[0].size is -1, but must be a whole number at least 0"),
        ({"shards": [{"path": "a"}]}, "shards[0].size is missing"),
        ({"shards": [7]}, "shards[0] is 7, but must be a mapping of names"),
        ({"seed": 2**63}, "seed is 9223372036854775808, but must be a whole number"),
    ],
)
def test_what_does_not_fit_a_stored_document_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"must be|is missing") as error:
        Document.read({**RIGHT, **wrong})
    assert str(error.value) == message
    with pytest.raises(ValueError, match=r"must be|is missing") as error:
        Document.read({**RIGHT, **wrong}, "header")
    assert str(error.value) == f"header.{message}"


def test_a_document_may_hold_more_than_is_read() -> None:
    document = Document.read({**RIGHT, "mean": [1], "later": object(), "shards": [{"path": "a", "size": 3, "x": 1}]})
    assert (document.count, document.mean, document.seed) == (3, [1.0], 0)
    assert document.shards == [Shard(path="a", size=3)]
    nothing: object
    for nothing in (None, [], 3, "text"):
        assert_raises(Unfit, r"^header is .*, but must be a mapping of names$", Document.read, nothing, "header")
    assert_raises(ValueError, r"^count is missing$", Document.read, {})
