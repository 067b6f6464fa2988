"""Which states a network refuses, and the key that the message names."""

from functools import partial

import pytest
import torch
from torch import nn

from duetgan.utils.checkpoint.state_schema import load_network
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises


def build():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def loaded(state, build=build):
    return load_network(build, {"state": {"model": state}}, "model", "x.pt")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("0.bias", None, "state.model.0.bias is missing"),
        ("2.bias", torch.zeros(3), "state.model.2.bias is not a tensor of the network"),
        ("0.weight", torch.zeros(2, 3), r"state.model.0.weight is float32 \[2, 3\], but must be float32 \[3, 2\]"),
        ("0.bias", torch.zeros(3).half(), r"state.model.0.bias is float16 \[3\], but must be float32 \[3\]"),
        ("1.num_batches_tracked", torch.tensor(1.0), r"tracked is float32 \[\], but must be int64 \[\]"),
        ("0.bias", [0.0] * 3, "state.model.0.bias .*: must be a tensor"),
        ("0.bias", torch.zeros(1).expand(3), "state.model.0.bias is not a dense tensor of real numbers"),
        ("0.bias", torch.zeros(3, dtype=torch.complex64), "0.bias is not a dense tensor of real numbers"),
        ("0.bias", torch.zeros(3).to_sparse(), "0.bias is not a dense tensor of real numbers"),
        ("0.bias", torch.zeros(3, device="meta"), "0.bias is not a dense tensor of real numbers"),
        (7, torch.zeros(3), "a key of state.model"),
    ],
)
def test_a_state_that_does_not_fit_is_named(key, value, told):
    state = build().state_dict() | {key: value}
    if value is None:
        del state[key]
    assert_raises(UserError, f"^x.pt: does not fit the network of its config .*{told}", loaded, state)


def test_a_state_that_fits_is_loaded(request):
    state = build().state_dict()
    calls = []

    def computing():
        calls.append(torch.zeros(()).device.type)
        if calls[-1] == "meta":
            raise NotImplementedError
        return build()

    for maker, expected in ((build, []), (computing, ["meta", "cpu"])):
        network = loaded(state, maker)
        assert all(value.equal(state[key]) for key, value in network.state_dict().items())
        assert calls == expected
    assert_raises(UserError, "state.other is missing", load_network, build, {"state": {}}, "other", "x.pt")
    assert_raises(UserError, "state.model .*: must be a mapping of names", loaded, [1])
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    assert loaded(state)[0].weight.equal(state["0.weight"].double())
