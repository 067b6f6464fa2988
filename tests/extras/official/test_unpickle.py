"""Hostile pickles: nothing in them runs, and one line refuses them."""

import io
import os
import pickle
import struct
import sys
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.extras.official.convert import main
from duetgan.utils.errors import UserError
from tests.extras.official import layouts


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


def storage_with(payload):
    """A torch storage whose inner pickle is `payload`."""
    whole = io.BytesIO()
    torch.save(torch.zeros(2).untyped_storage(), whole, _use_new_zipfile_serialization=False)
    return Call(torch.storage._load_from_bytes, pickle.dumps(payload))


def nested_references():
    """Lists of references: 10^40 elements for who walks them all."""
    level: list[Any] = [0] * 10
    for _ in range(40):
        level = [level] * 10
    return {"G": level, "D": level, "G_ema": level}


HOSTILE = {
    "system call": lambda mark: pickle.dumps({"G": Call(os.system, f"touch {mark}")}),
    "eval": lambda mark: pickle.dumps({"G": Call(eval, f"open({str(mark)!r}, 'w')")}),
    "nested": lambda mark: pickle.dumps({"G": storage_with(Call(os.system, f"touch {mark}"))}),
    "objects": lambda mark: pickle.dumps({"G": np.array([Call(os.system, f"touch {mark}")], dtype=object)}),
    "memo": lambda mark: b"\x80\x03}r" + struct.pack("<I", 2**32 - 1) + b".",  # an index that would take 64 GiB
    "persistent id": lambda mark: b"\x80\x03Pevil\n.",
    "extension": lambda mark: b"\x80\x03\x82\x01.",
    "a getattr": lambda mark: pickle.dumps({"G": Call(getattr, "text", "upper")}),
    "not a pickle": lambda mark: b"hello",
    "empty": lambda mark: b"",
    "references": lambda mark: pickle.dumps(nested_references()),
}


@pytest.mark.parametrize("suffix", [".pkl", ".pt"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_run_nothing_and_are_refused_in_one_line(tmp_path, name, suffix):
    mark, file = tmp_path / "mark", tmp_path / f"network{suffix}"
    file.write_bytes(HOSTILE[name](mark))
    with pytest.raises(UserError) as caught:
        main([str(file), str(tmp_path / "run")])
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


def test_the_source_in_a_persistent_object_is_never_compiled(tmp_path):
    mark = tmp_path / "mark"
    path = tmp_path / "network.pkl"
    layouts.write_nvidia(path, source=f"open({str(mark)!r}, 'w')")
    assert main([str(path), str(tmp_path / "run")]) == 0
    assert not mark.exists()
    assert "torch_utils" not in sys.modules


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    """torch's own `set_` would enlarge the storage."""
    storage = torch.zeros(2).untyped_storage()
    kept = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    tensor = Call(torch._utils._rebuild_tensor_v2, kept, 0, (1 << 20,), (1,), False, None)
    (tmp_path / "network.pkl").write_bytes(pickle.dumps({"G": tensor}))
    with pytest.raises(UserError, match="larger than its storage"):
        main([str(tmp_path / "network.pkl"), str(tmp_path / "run")])


def test_the_command_ends_with_2_and_one_line(tmp_path, refused):
    (tmp_path / "network.pkl").write_bytes(HOSTILE["system call"](tmp_path / "mark"))
    assert "posix.system" in refused(main, tmp_path / "network.pkl", tmp_path / "run", alone=True)
