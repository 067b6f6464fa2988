import json

import pytest
import torch
from safetensors.torch import save_file

from duetgan.inference.export.weights_file import ENTRY, contents, write_weights
from duetgan.models.ready_made import read_weights
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import SCHEMA, load, resolve
from duetgan.utils.errors import UserError
from tests.inference.conftest import R3


@pytest.mark.parametrize("name", ["grey", "plain", "r3", "dcgan", "classifier"])
def test_a_network_comes_back_to_the_bit_from_the_file_alone(runs, tmp_path, name):
    checkpoint = load(resolve(runs[name]))
    write_weights(tmp_path / "x.safetensors", checkpoint)
    found = read_weights(tmp_path / "x.safetensors")
    restore = classifier_from if name == "classifier" else generator_from
    expected, rebuilt = restore(checkpoint), restore(found)
    assert type(rebuilt) is type(expected)
    state = rebuilt.state_dict()
    assert all(value.equal(state[key]) for key, value in expected.state_dict().items())
    for key in ("schema", "task", "step", "classes", "shape"):
        assert found[key] == checkpoint[key]
    if name == "r3":
        assert found["config"]["generator"] == R3


def test_a_stage_and_teachers_are_kept_and_paths_are_not(checkpoint, tmp_path):
    config = checkpoint["config"] | {
        "data": {"path": "/home/me/x.lmdb", "resolution": 8},
        "loss": {"classifier": "runs/c"},
    }
    more = {"stage": [4, 0.5], "teachers": ["sha256:1"], "origin": {"file": "/home/me/runs/a"}}
    changed = checkpoint | {"config": config} | more
    write_weights(tmp_path / "x.safetensors", changed)
    found = read_weights(tmp_path / "x.safetensors")
    assert (found["stage"], found["teachers"]) == ([4, 0.5], ["sha256:1"])
    assert found["config"]["data"] == {"resolution": 8}
    assert found["data"]["resize_filter"] == "zero-pad"
    text = json.dumps(contents(changed))
    assert "/home" not in text
    assert "runs/c" not in text
    generator = generator_from(found)
    z, labels = torch.ones(2, generator.z_dim), torch.tensor([0, 1])
    assert generator(z, labels).equal(generator_from(changed)(z, labels))


def test_channels_last_weights_are_written_in_order(checkpoint, tmp_path):
    state = checkpoint["state"]["generator_ema"]
    last = {k: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v for k, v in state.items()}
    write_weights(tmp_path / "x.safetensors", checkpoint | {"state": {"generator_ema": last}})
    found = read_weights(tmp_path / "x.safetensors")["state"]["generator_ema"]
    assert all(value.equal(found[key]) for key, value in state.items())


def test_files_that_do_not_say_what_they_are_or_are_damaged_are_refused(checkpoint, tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(UserError, match="no such file"):
        read_weights(path)
    for metadata in (None, {ENTRY: "[]"}, {ENTRY: '{"task": "gan"}'}):
        save_file({"a": torch.zeros(1)}, str(path), metadata)
        with pytest.raises(UserError, match=r"does not say what its weights are; write it with export\.py"):
            read_weights(path)
    save_file({"a": torch.zeros(1)}, str(path), {ENTRY: "{"})
    with pytest.raises(UserError, match="cannot be read"):
        read_weights(path)
    save_file({"a": torch.zeros(1)}, str(path), {ENTRY: json.dumps(contents(checkpoint) | {"schema": SCHEMA + 1})})
    with pytest.raises(UserError, match="is newer than this program"):
        read_weights(path)
    path = tmp_path / "x.safetensors"
    write_weights(path, checkpoint)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match="cannot be read"):
        read_weights(path)
