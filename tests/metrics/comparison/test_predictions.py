import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import save

from duetgan.metrics.comparison.predictions import FILE, load_predictions, save_predictions
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises

ABOUT = {"task": "classifier", "data": "ab12", "n": 4, "seed": 0, "training_seed": 3, "classes": ["a", "b"]}
ABOUT |= {"judge": None}
LABEL, PREDICTION = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 1])
COLUMNS = {"label": LABEL, "prediction": PREDICTION, "confidence": np.array([0.9, 0.8, 0.6, 0.7])}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def test_what_is_saved_is_loaded(tmp_path):
    told = save_predictions(tmp_path, ABOUT, COLUMNS)
    first = (tmp_path / FILE).read_bytes()
    assert told == {"file": FILE, "sha256": sha256(first)}
    metadata, columns = load_predictions(tmp_path, told["sha256"])
    assert metadata.model_dump(by_alias=True) == {"schema": 1, **ABOUT}
    for name, column in COLUMNS.items():
        np.testing.assert_array_equal(columns[name], column)
    save_predictions(tmp_path, ABOUT, dict(reversed(COLUMNS.items())))
    assert (tmp_path / FILE).read_bytes() == first
    needed = {name: value for name, value in ABOUT.items() if name not in ("training_seed", "judge")}
    plain = save_predictions(tmp_path, needed, COLUMNS)
    assert load_predictions(tmp_path, plain["sha256"])[0].training_seed is None
    with pytest.raises(UserError, match=r"is not of the evaluation that metrics.json beside it is of"):
        load_predictions(tmp_path, told["sha256"])


def bad(about=None, columns=None):
    told = json.dumps({"schema": 1, **ABOUT, **(about or {})})
    return save(COLUMNS | (columns or {}), {"about": told})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read"),
        (b"\x10\0\0\0\0\0\0\0not json at all!", "cannot be read"),
        (bad()[:-8], "cannot be read"),
        (save(COLUMNS), "cannot be read"),
        (save(COLUMNS, {"about": "[]"}), "about is list"),
        (bad({"schema": 2}), "about.schema is 2"),
        (bad({"n": 5}), "n is 5"),
        (bad({"n": "4"}), "about.n is '4'"),
        (bad(columns={"label": LABEL.astype(np.int32)}), "column label is int32"),
        (bad(columns={"else": LABEL}), "column else"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_in_one_line(tmp_path, content, told):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError, match=told) as caught:
        load_predictions(tmp_path, sha256(content))
    assert "evaluate that run once more" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_pipe_are_told(tmp_path):
    assert_raises(UserError, f"{FILE} cannot be read .*; evaluate that run once more", load_predictions, tmp_path, "")
    (tmp_path / FILE).symlink_to("/dev/zero")
    assert_raises(UserError, "is a device", load_predictions, tmp_path, "")
