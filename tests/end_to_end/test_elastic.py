"""A run that goes from 1 to 2 to 4 processes and back to 1 reads what one process would read, and learns the same."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import start, state_of
from tests.end_to_end.ranks import Notes, run
from tests.end_to_end.recipes import BATCH, write_recipe

PATH = [(1, 3), (2, 7), (4, 11), (1, 14)]  # number of processes, and up to which step
STEPS = PATH[-1][1]
TOLERANCE = 1e-9  # of float64 weights of about 1
# of float32 ones after two steps on two processes; each further one of this small net with BatchNorm over 8 samples
# multiplies rounding by about ten, in any training of it
BOUND, EARLY = 1e-4, 5


def largest_difference(a: dict, b: dict) -> float:
    """Of two networks' state dicts: of weights, averages and statistics alike."""
    assert a.keys() == b.keys()
    return max(float((a[key].double() - b[key].double()).abs().max()) for key in a)


def networks(run_folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """All networks' tensors of a run's checkpoint by name."""
    state = state_of(run_folder, step)
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
    assert largest_difference(networks(tmp_path / "whole"), networks(tmp_path / "elastic")) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_the_command_line_goes_from_1_to_2_to_4_to_1(task, images, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml", task, images)
    command = ["train.py", "--device", "cpu", "--config", str(recipe), "--run-dir"]
    for folder, path in (("whole", [(1, STEPS)]), ("elastic", PATH)):
        for world, until in path:
            more = ["--procs", str(world), "--max-steps", str(until)]
            process = start(*command, str(tmp_path / folder), *more, OMP_NUM_THREADS="1")
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
            assert f"done: step {until} of" in errors
    process = start(*command, str(tmp_path / "elastic"), "--procs", "3", OMP_NUM_THREADS="1")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "cannot be shared by 3 processes; make it a multiple of 3" in errors
    states = [state_of(tmp_path / folder, STEPS) for folder in ("whole", "elastic")]
    assert states[0]["loader"] == states[1]["loader"]
    difference = largest_difference(networks(tmp_path / "whole", EARLY), networks(tmp_path / "elastic", EARLY))
    assert 0 < difference < BOUND
    if task == "gan":  # without BatchNorm rounding stays small to the end
        assert largest_difference(networks(tmp_path / "whole"), networks(tmp_path / "elastic")) < 20 * BOUND
