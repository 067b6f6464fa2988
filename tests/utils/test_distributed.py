"""One process: everything is a no-op. Several processes are tried in tests/distributed."""

import pytest
import torch

from utils import distributed
from utils.errors import UserError


def test_alone():
    distributed.start(torch.device("cpu"))
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    distributed.barrier()
    assert distributed.agree(15) == 15
    assert distributed.broadcast_object({"a": 1}) == {"a": 1}
    assert distributed.on_main(lambda: 7) == 7
    assert distributed.all_reduce_sum_(torch.tensor([2.0])).item() == 2.0
    parameter = torch.ones(2, requires_grad=True)
    distributed.all_reduce_gradients([parameter])
    assert parameter.grad is None
    distributed.stop()


class FakeWork:
    """A barrier that is complete as soon as somebody has looked whether the others are alive."""

    def __init__(self, completes):
        self.completes, self.looked = completes, False

    def is_completed(self):
        return self.looked and self.completes

    def wait(self):
        pass


@pytest.mark.parametrize("completes", [True, False])
def test_who_leaves_after_the_barrier_is_not_missed(monkeypatch, completes):
    """Found by review: rank 0 had left in good order while another one still looked for it."""
    work = FakeWork(completes)

    def look():
        work.looked = True
        raise distributed.PeerLost("rank 0 has left")

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(distributed.dist, "barrier", lambda **_: work)
    distributed.on_wait(look)
    try:
        if completes:
            distributed.barrier()
        else:
            with pytest.raises(distributed.PeerLost):
                distributed.barrier()
    finally:
        distributed.on_wait(None)


def test_same_fate_alone():
    assert distributed.gather_objects(3) == [3]
    with pytest.raises(UserError, match="no such file"), distributed.same_fate():
        raise UserError("no such file")
    with distributed.same_fate():
        pass


def test_errors_of_rank_zero_pass():
    def refuse():
        raise UserError("no such file")

    with pytest.raises(UserError, match="no such file"):
        distributed.on_main(refuse)


def test_devices():
    assert distributed.choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="--device gpu7: not a device"):
        distributed.choose_device("gpu7")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is there")
def test_devices_without_an_accelerator():
    assert distributed.choose_device(None) == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda: this machine has no usable cuda device; use --device cpu"):
        distributed.choose_device("cuda")
