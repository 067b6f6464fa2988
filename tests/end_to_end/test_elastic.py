"""A run that goes from 1 to 2 to 4 processes and back to 1 reads what one process would read, and learns the same."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import state_of
from tests.end_to_end.ranks import Notes, run
from tests.end_to_end.recipes import BATCH, write_recipe

PATH = [(1, 3), (2, 7), (4, 11), (1, 14)]  # number of processes, and up to which step
STEPS = PATH[-1][1]
TOLERANCE = 1e-9  # of float64 weights of about 1


def networks(run_folder: Path) -> dict[str, torch.Tensor]:
    """All networks' weights, averages and statistics by name."""
    state = state_of(run_folder, STEPS)
    parts = [name for name in ("generator", "discriminator", "generator_ema", "model", "model_ema") if name in state]
    assert len(parts) >= 2
    return {f"{name}.{key}": value for name in parts for key, value in state[name].items()}


@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_the_samples_and_the_weights_are_those_of_one_process(task, images, tmp_path):
    # longer than it is trained here: the end of a run has an evaluation, which is not for float64
    changes = {"steps": STEPS + 2, "evaluation": {"every": 0}}
    recipe = write_recipe(tmp_path / "recipe.yaml", task, images, **changes)
    options = ["--config", str(recipe), "--run-dir"]
    limit = ["--max-steps", str(STEPS)]
    whole = run([*options, str(tmp_path / "whole"), *limit], tmp_path / "notes", float64=True)
    read: Notes = []
    for number, (world, until) in enumerate(PATH):
        argv = [*options, str(tmp_path / "elastic"), "--max-steps", str(until)]
        read += run(argv, tmp_path / f"notes-{number}", world=world, float64=True)
        assert len(read) == until
    assert [begins for begins, _ in read] == [step * BATCH for step in range(STEPS)]
    assert read == whole
    assert len({row for _, rows in whole for row in rows}) > 100  # 14 batches of 8, cropped at random, not one image
    one, other = networks(tmp_path / "whole"), networks(tmp_path / "elastic")
    assert one.keys() == other.keys()
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < TOLERANCE
