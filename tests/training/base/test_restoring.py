"""A checkpoint's states and image history, as a run takes them over."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from duetgan.training.base.restoring import ImageHistory, load_states
from duetgan.utils.errors import UserError

META: Any = SimpleNamespace(content_hash="1234", count=3, resize_filter="area")
OTHER: Any = SimpleNamespace(content_hash="5678", count=4, resize_filter="none")


def networks() -> dict[str, Any]:
    return {"first": nn.Linear(2, 3), "second": nn.Linear(2, 3)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bias": torch.zeros(4)}, "state.second.bias is float32 [4], but must be float32 [3]"),
        ({"bias": torch.zeros(3, dtype=torch.float16)}, "state.second.bias is float16 [3], but must be float32 [3]"),
        ({"more": torch.zeros(1)}, "state.second.more is not a tensor of the network"),
        ({"bias": None}, "state.second.bias"),
    ],
)
def test_no_state_is_loaded_unless_all_fit(change, problem):
    parts = networks()
    before = {name: part.weight.clone() for name, part in parts.items()}
    states = {name: {k: torch.full_like(v, 5) for k, v in part.state_dict().items()} for name, part in parts.items()}
    refused = states | {"second": states["second"] | change}
    with pytest.raises(UserError, match=rf"^x\.pt: the state of 'second' does not fit \({re.escape(problem)}"):
        load_states(parts, refused, "x.pt")
    assert all(torch.equal(part.weight, before[name]) for name, part in parts.items())
    load_states(parts, states, "x.pt")
    assert all(torch.all(p == 5) for part in parts.values() for p in part.parameters())


def test_only_optional_parts_may_have_no_state():
    parts = networks()
    states = {"first": parts["first"].state_dict()}
    with pytest.raises(UserError, match=r"the state of 'second' does not fit \(KeyError 'second'\)"):
        load_states(parts, states, "x.pt")
    parts["second"].optional = True
    load_states(parts, states, "x.pt")


def test_other_images_are_appended_to_the_history():
    folder: Any = SimpleNamespace(path="run")
    first = ImageHistory("a.lmdb", META).document()
    assert first == {
        **{"content_hash": "1234", "count": 3, "resize_filter": "area"},
        "history": [{"step": 0, "content_hash": "1234", "count": 3, "path": "a.lmdb"}],
    }
    content: Any = {"step": 7, "data": first, "config": {}}
    images = ImageHistory("b.lmdb", OTHER)
    images.adapt = lambda found: f"continued from step {found['step']}"
    told = r"run: was trained on other images \(3 then, 4 in b\.lmdb now\)"
    with pytest.raises(UserError, match=told):
        images.restore(content, folder)
    images.new_data = True
    images.restore(content, folder)
    second = {"step": 7, "content_hash": "5678", "count": 4, "path": "b.lmdb"}
    assert images.document() == {
        **{"content_hash": "5678", "count": 4, "resize_filter": "none"},
        "history": [first["history"][0], second],
    }
    resumed = ImageHistory("b.lmdb", OTHER)
    resumed.restore({"step": 9, "data": images.document(), "config": {}}, folder)
    assert (resumed.document(), resumed.new_data) == (images.document(), True)
