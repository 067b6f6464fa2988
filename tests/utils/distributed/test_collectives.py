"""One process: everything is a no-op; buckets of gradients and their order. Several are tried in tests/distributed."""

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock, call

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


OF_ALL = UserError("all ranks leave")
OF_ALL.of_rank = 1


@pytest.mark.parametrize(
    ("error", "lost"),
    [(None, False), (RuntimeError("a bug on this rank"), True), (collectives.PeerLost("gone"), True), (OF_ALL, False)],
)
def test_a_group_is_destroyed_unless_its_work_failed(monkeypatch, error, lost):
    """The other ranks may be waiting in a collective operation, in which destroying the group would wait, too."""
    stops: list[bool] = []
    monkeypatch.setattr(collectives, "stop", lambda *, lost: stops.append(lost))
    expected = pytest.raises((RuntimeError, TrainingHalted, UserError)) if error else nullcontext()
    with expected, collectives.group(torch.device("cpu")):
        if error:
            raise error
    assert stops == [lost]


def test_work_alone_counts_no_other_process(monkeypatch):
    for name, value in (("is_initialized", True), ("get_rank", 3), ("get_world_size", 5)):
        monkeypatch.setattr(collectives.dist, name, lambda value=value: value)

    def place():
        return collectives.rank(), collectives.world_size(), collectives.is_main()

    assert place() == (3, 5, False)
    with collectives.alone():
        with collectives.alone():
            pass
        assert place() == (0, 1, True)
    assert place() == (3, 5, False)


def test_an_interceptor_decides_when_an_operation_runs():
    operation = Mock()
    waiting: list[object] = []
    with collectives.intercepted(waiting.append):
        collectives.perform(operation)
    assert (waiting, operation.call_count) == ([operation], 0)
    collectives.perform(operation)
    assert (waiting, operation.call_count) == ([operation], 1)


@pytest.mark.parametrize(
    ("backend", "several", "is_named"), [("gloo", False, False), ("nccl", False, True), ("nccl", True, False)]
)
def test_a_process_group_has_its_timeouts(monkeypatch, backend, several, is_named):
    """Ranks that wait for one that works alone wait for hours; NCCL's operations outlast the control messages."""
    init, set_timeout, destroy = Mock(), Mock(), Mock()
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    for name in ("_control", "_patient", "_look"):
        monkeypatch.setattr(collectives, name, None)
    monkeypatch.setattr(collectives, "fresh_store", lambda timeout: ("store", timeout))
    monkeypatch.setattr(collectives, "dist", SimpleNamespace(
        get_default_backend_for_device=lambda _: backend, init_process_group=init, new_group=lambda **group: group,
        is_initialized=lambda: init.called, get_world_size=lambda: 3, set_timeout=set_timeout,
        destroy_process_group=destroy,
    ))  # fmt: skip
    device, timeout = torch.device("cuda", 1), timedelta(seconds=7)
    for _ in range(2):
        collectives.start(device, 7, several=several)
    options = {"timeout": timeout, "store": ("store", timeout), "rank": 2, "world_size": 3}
    init.assert_called_once_with(backend, **options, device_id=device if is_named else None)
    control = {"backend": "gloo", "timeout": timeout} if backend == "nccl" else None
    assert (collectives._control, collectives._patient) == (control, {"backend": "gloo", "timeout": timedelta(hours=6)})
    collectives.set_timeout(5)
    seconds = {5: control, 10: None} if control else {5: None}
    assert set_timeout.call_args_list == [call(timedelta(seconds=key), group) for key, group in seconds.items()]
    collectives.watch_while_waiting(print)
    collectives.stop()
    destroy.assert_called_once_with()
    assert (collectives._control, collectives._patient, collectives._look) == (None, None, None)


def test_control_messages_do_not_travel_over_the_devices_backend(monkeypatch):
    groups = {}

    def operation(name):
        def perform(*_, group, **__):
            groups[name] = group
            return Mock()

        return perform

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "_control", "control")
    monkeypatch.setattr(collectives, "_patient", "patient")
    names = ["all_reduce", "broadcast_object_list", "all_gather_object", "gather_object", "barrier"]
    for name in names:
        monkeypatch.setattr(collectives.dist, name, operation(name))
    collectives.all_reduce_max(3)
    collectives.broadcast_object(3)
    collectives.gather_to_main(lambda: 3)
    assert "barrier" not in groups  # a rank that exceeds the timeout is lost
    for wait in (lambda: collectives.gather_objects(3), lambda: collectives.main_first(lambda: 3)):
        groups.pop("barrier", None)
        wait()
        assert groups == dict.fromkeys(names, "control") | {"barrier": "patient"}


def test_a_snapshot_is_written_back_unless_it_is_told_not_to():
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(4.0).double(), torch.arange(2), torch.ones(3)]
    before = [tensor.clone() for tensor in tensors]
    snapshot = collectives.Snapshot(tensors)
    for unless in (torch.tensor(True), torch.tensor(False), None):
        for tensor in tensors:
            tensor.add_(1)
        snapshot.restore(unless)
        added = 1 if unless is not None and unless else 0
        assert all(tensor.equal(value + added) for tensor, value in zip(tensors, before, strict=True))


def test_fingerprints_are_sums_of_bits_with_odd_weights():
    floats, integers, booleans = torch.tensor([1.5, -2.0]), torch.tensor([3, -(2**62)]), torch.tensor([[True], [False]])
    bits = [0x3FC00000 + 0xC0000000 - 2**32, 3 - 2**62, 1]
    parts = {"a": [floats, integers, booleans], "b": [integers, floats, floats.bfloat16()]}
    expected = [bits[0] + 3 * bits[1] + 5 * bits[2], bits[1] + 3 * bits[0] + 5 * (0x3FC0 + 0xC000 - 2**16)]
    found = collectives.fingerprints(parts, torch.device("cpu")).tolist()
    assert [(value - other) % 2**64 for value, other in zip(found, expected, strict=True)] == [0, 0]


@pytest.mark.parametrize(
    ("prints", "expected"),
    [
        ([[1, 2], [1, 2]], {}),
        ([[1, 2], [1, 3]], {"b": [1]}),
        ([[1, 9], [1, 3], [1, 3]], {"b": [0]}),
        ([[1, 3], [0, 3], [1, 2], [1, 2], [0, 2], [1, 2]], {"a": [1, 4], "b": [0, 1]}),
    ],
)
def test_the_majority_of_the_ranks_is_right(monkeypatch, prints, expected):
    monkeypatch.setattr(collectives, "world_size", lambda: len(prints))
    monkeypatch.setattr(collectives, "gather_objects", lambda value, *, patient: [torch.tensor(row) for row in prints])
    assert collectives.unequal_ranks({"a": [torch.ones(1)], "b": []}, torch.device("cpu")) == expected


class FakeWork:
    """A barrier that is complete as soon as somebody has looked whether the others are alive."""

    def __init__(self, completes):
        self.completes, self.looked, self.waited = completes, False, False

    def is_completed(self):
        return self.looked and self.completes

    def wait(self):  # torch raises the error of a barrier that failed
        self.waited = True


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
    assert work.waited is completes


@pytest.mark.parametrize(
    "told",
    [
        *("[/x/pair.cc:5] Connection closed by peer", "Timed out waiting 600000ms", "Connection reset by peer"),
        *("[/gloo/x.cc:5] no\nmore", "Broken pipe"),
    ],
)
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
        assert (caught.value.rank_specific, told.split("\n")[0] in str(caught.value)) == (True, True)
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


def test_the_accelerator_of_a_process(monkeypatch):
    current = Mock()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for requested, index in ((None, 0), ("cuda:1", 1)):
        assert collectives.choose_device(requested) == torch.device("cuda", index)
        current.assert_called_with(index)
    with pytest.raises(UserError, match="cuda:2 does not exist: 2 visible; give fewer --gpus") as caught:
        collectives.choose_device("cuda:2")
    assert caught.value.rank_specific
    assert_raises(UserError, "--device xpu: this machine has no usable xpu", collectives.choose_device, "xpu")
    assert current.call_count == 2


@pytest.fixture
def sent(sent, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 4)
    return sent


def parameters(*sizes: int) -> list[Tensor]:
    return [torch.nn.Parameter(torch.ones(size)) for size in sizes]


def test_one_process_sends_nothing():
    (parameter,) = parameters(2)
    exchange = GradientExchange([parameter], missing="zeros", compress="off")
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
    exchange = GradientExchange([first, second, third], missing="zeros", compress="off")
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
