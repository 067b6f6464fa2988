"""One process: everything is a no-op; buckets of gradients and their order. Several are tried in tests/distributed."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from duetgan.utils.distributed import collectives, gradients
from duetgan.utils.distributed.gradients import GradientExchange, buckets_of
from duetgan.utils.errors import TrainingHalted, UserError
from tests.conftest import assert_raises


def test_alone():
    """Errors pass as they are."""

    def refuse():
        raise UserError("no such file")

    collectives.start(torch.device("cpu"))
    assert (collectives.rank(), collectives.world_size(), collectives.is_main()) == (0, 1, True)
    collectives.barrier()
    assert collectives.all_reduce_max(15) == 15
    assert collectives.broadcast_object({"a": 1}) == {"a": 1}
    assert collectives.from_main_process(lambda: 7) == collectives.main_first(lambda: 7) == 7
    assert collectives.gather_to_main(lambda: 7) == [7]
    assert collectives.all_reduce_sum_(torch.tensor([2.0])).item() == 2.0
    assert collectives.gather_objects(3) == [3]
    with pytest.raises(UserError, match="no such file"), collectives.raising_together():
        refuse()
    assert_raises(UserError, "no such file", collectives.from_main_process, refuse)
    collectives.stop()


@pytest.mark.parametrize(
    ("error", "lost"), [(None, False), (RuntimeError("a bug on this rank"), True), (collectives.PeerLost("gone"), True)]
)
def test_a_group_is_destroyed_unless_its_work_failed(monkeypatch, error, lost):
    """The other ranks may be waiting in a collective operation, in which destroying the group would wait, too."""
    stops: list[bool] = []
    monkeypatch.setattr(collectives, "stop", lambda *, lost: stops.append(lost))
    expected = pytest.raises((RuntimeError, TrainingHalted)) if error else nullcontext()
    with expected, collectives.group(torch.device("cpu")):
        if error:
            raise error
    assert stops == [lost]


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
        raise collectives.PeerLost("rank 0 has left")

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(collectives.dist, "barrier", lambda **_: work)
    collectives.watch_while_waiting(look)
    try:
        with nullcontext() if completes else pytest.raises(collectives.PeerLost):
            collectives.barrier()
    finally:
        collectives.watch_while_waiting(None)


@pytest.mark.parametrize("told", ["[/x/pair.cc:5] Connection closed by peer", "Timed out waiting 600000ms"])
def test_a_lost_rank_where_nothing_can_be_resumed(monkeypatch, told):
    """One line with the remedy; under our launcher it is the launcher's, unless the lost rank still lives."""
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "start", lambda *_: None)
    for launched in (False, True):
        monkeypatch.setenv("DUET_LAUNCHED", "1") if launched else monkeypatch.delenv("DUET_LAUNCHED", raising=False)
        with (
            pytest.raises(TrainingHalted, match=r"does not answer .*; give the same command again") as caught,
            collectives.group(torch.device("cpu")),
        ):
            raise RuntimeError(told)
        assert caught.value.quiet == (launched and "peer" in told)
    with pytest.raises(ZeroDivisionError), collectives.group(torch.device("cpu")):
        _ = 1 / 0
    monkeypatch.setattr(collectives, "world_size", lambda: 1)
    assert not collectives.is_peer_error(RuntimeError(told))  # one process has lost no other


def test_devices():
    assert collectives.choose_device("cpu") == torch.device("cpu")
    assert_raises(UserError, "--device gpu7: not a device", collectives.choose_device, "gpu7")
    if not torch.accelerator.is_available():
        assert collectives.choose_device(None) == torch.device("cpu")
        with pytest.raises(UserError, match="--device cuda: this machine has no usable cuda device; use --device cpu"):
            collectives.choose_device("cuda")


@pytest.fixture
def sent(sent, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 4)
    return sent


def parameters(*sizes: int) -> list[Tensor]:
    return [torch.nn.Parameter(torch.ones(size)) for size in sizes]


def test_one_process_sends_nothing():
    (parameter,) = parameters(2)
    exchange = GradientExchange([parameter], compress="off")
    exchange.overlap()
    parameter.sum().backward()
    exchange.finish()
    assert parameter.grad.tolist() == [1, 1]


def test_buckets_begin_with_the_last_parameter(sent):
    """A2: every gradient is sent once, in few pieces."""
    frozen = torch.ones(100)
    found = buckets_of([frozen, *parameters(1, 3, 5, 2, 3)])
    assert [[len(p) for p in bucket] for bucket in found] == [[3, 2], [5], [3, 1]]


def test_complete_buckets_are_sent_while_the_last_backward_pass_goes_on(sent):
    first, second, third = parameters(4, 4, 5)
    exchange = GradientExchange([first, second, third], compress="off")
    (first.sum() + second.sum() + third.sum()).backward()  # a pass before the last
    assert sent == []
    exchange.overlap()
    (second.sum() + third.sum()).backward()
    assert sent == [5, 4]  # the first parameter's gradient may still come
    exchange.finish()
    assert sent == [5, 4, 4]
    grads = [p.grad[0].item() for p in (first, second, third) if p.grad is not None]
    assert grads == [2, 4, 4]
    third.sum().backward()
    assert sent == [5, 4, 4]  # the next pass is not the last
    exchange.overlap()
    first.sum().backward()
    assert sent == [5, 4, 4]  # a bucket waits for those before it
    exchange.finish()
    assert sent == [5, 4, 4] * 2


def test_without_a_gradient_parameters_are_left_out(sent):
    first, second, third = parameters(1, 1, 5)
    exchange = GradientExchange([first, second, third], missing="skip", compress="off")
    exchange.overlap()
    first.sum().backward()
    exchange.finish()
    assert sent == [1]
    assert [p.grad if p.grad is None else p.grad.item() for p in (first, second, third)] == [2, None, None]
