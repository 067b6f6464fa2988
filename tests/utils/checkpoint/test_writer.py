import copy
import hashlib
import threading
from collections import namedtuple

import pytest
import torch

from duetgan.utils.checkpoint import load, save
from duetgan.utils.checkpoint import writer as checkpoint_writer
from duetgan.utils.checkpoint.writer import Background, Snapshot
from tests.utils.checkpoint.files import content, names


def everything():
    """State of every kind: a trained module and its optimizer, shared and cut storages, layouts, types, aliases."""
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    flat, word = torch.arange(12.0), "twice"
    kinds = (torch.bfloat16, torch.float16, torch.int64, torch.bool)
    return {
        "module": module.state_dict(),
        "parameters": dict(module.named_parameters()),
        "adam": optimizer.state_dict(),
        "views": {"x": [flat[:4], flat[4:8].view(2, 2), flat[::3], flat]},
        "same": {"x": [flat, flat]},
        "types": {"x": [torch.zeros(2, dtype=kind) for kind in kinds]},
        "empty": {"x": [torch.zeros(0), torch.zeros(0, 3), torch.tensor(5)]},
        "plain": {word: word, 3: (None, True, 1.5), "list": []},
    }


def test_a_copy_makes_the_same_file_to_the_byte(tmp_path):
    state = everything()
    bytes_of = {}
    for own in (False, True):
        path = save(tmp_path / str(own), Snapshot(content(state=state), own=own))
        bytes_of[own] = path.read_bytes()
    assert bytes_of[True] == bytes_of[False]
    torch.save(content(state=state), tmp_path / "plain.pt")
    assert load(path)["state"]["views"]["x"][1].equal(torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    assert len(bytes_of[True]) == pytest.approx((tmp_path / "plain.pt").stat().st_size, abs=200)  # nothing twice


def test_a_copy_does_not_see_what_training_changes(tmp_path):
    state = everything()
    before = copy.deepcopy({name: tensor.clone() for name, tensor in state["module"].items()})
    taken = Snapshot(content(state=state), own=True)
    with torch.no_grad():
        for part in (*state["module"].values(), *state["views"]["x"]):
            part.fill_(7)
    state["plain"]["list"].append(1)
    state["adam"]["param_groups"][0]["lr"] = 9.0
    found = load(save(tmp_path, taken))["state"]
    assert {name: tensor.equal(before[name]) for name, tensor in found["module"].items()} == dict.fromkeys(before, True)
    assert found["views"]["x"][3].equal(torch.arange(12.0))
    assert found["plain"]["list"] == []
    assert found["adam"]["param_groups"][0]["lr"] == 1e-3


def test_what_belongs_together_stays_together():
    taken = Snapshot(content(state=everything()), own=True).content["state"]
    assert taken["same"]["x"][0] is taken["same"]["x"][1] is taken["views"]["x"][3]
    assert len({view.untyped_storage().data_ptr() for view in taken["views"]["x"]}) == 1
    assert isinstance(taken["parameters"]["0.weight"], torch.nn.Parameter)
    assert taken["parameters"]["0.weight"].untyped_storage().data_ptr() == taken["module"]["0.weight"].data_ptr()
    assert taken["module"]["0.weight"].is_contiguous(memory_format=torch.channels_last)
    assert taken["module"]._metadata["1"] == {"version": 2}


def test_without_copying_the_tensors_are_those_of_the_training():
    state = everything()
    taken = Snapshot(content(state=state), own=False).content["state"]
    assert taken["module"]["0.weight"] is state["module"]["0.weight"]


def test_the_size_counts_every_storage_once():
    flat = torch.zeros(1000)
    state = {"views": [flat, flat[:10], flat.view(10, 100)], "other": torch.zeros(50, dtype=torch.float64)}
    for own in (True, False):
        assert Snapshot(content(state=state), own=own).size == 4400


def test_the_hash_is_the_files(tmp_path):
    big = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))  # more than any buffer on the way
    path = tmp_path / "x.pt"
    told = checkpoint_writer.write(Snapshot(content(state={"big": big, "small": torch.ones(3)}), own=False), path)
    assert told == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_would_not_fit_is_not_begun(tmp_path, monkeypatch):
    taken = Snapshot(content(state={"w": torch.zeros(10_000)}), own=False)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(40_000 + checkpoint_writer.SPARE - 1))
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint_writer.write(taken, tmp_path / "x.pt")
    assert names(tmp_path) == []
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(40_000 + checkpoint_writer.SPARE))
    checkpoint_writer.write(taken, tmp_path / "x.pt")
    assert names(tmp_path) == ["x.pt"]


# --- the thread


def fail(what):
    raise KeyError(what)


def test_one_job_at_a_time_in_order():
    background, gate = Background(), threading.Event()
    done: list[object] = []

    def first():
        gate.wait(60)
        done.append(1)

    background.start(first)
    assert done == []
    threading.Timer(0.05, gate.set).start()
    background.start(lambda: done.append((2, threading.current_thread().daemon)))
    assert done[0] == 1  # the second was not begun before
    background.wait()
    assert done == [1, (2, False)]  # no daemon: the process waits for it
    background.wait()


def test_what_a_job_raises_is_raised_once_where_it_is_waited_for():
    background = Background()
    background.start(lambda: fail("missing"))
    with pytest.raises(KeyError, match="missing"):
        background.wait()
    background.wait()
    background.start(lambda: fail("again"))
    with pytest.raises(KeyError, match="again"):
        background.start(lambda: None)
