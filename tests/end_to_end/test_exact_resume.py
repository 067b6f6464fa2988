"""The resume matrix: a run that was interrupted and resumed equals one that was not, with tolerance zero.

Equal are the states of every checkpoint both have (weights, averages, optimizers, schedules, scaler, ADA, path-length
mean, loader position, log window ...), the rows of metrics.jsonl but for their timing, and the images and labels of
every batch after the resume. The interruption lies inside an epoch (5.5 steps) and a log window (3 steps), behind an
evaluation: a stop after step 7, or kill -9 of all ranks then, which goes back to step 5 and cuts off the row of 6.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from duetgan.utils import checkpoint
from tests.end_to_end.helpers import differing, rows, state_of
from tests.end_to_end.ranks import Notes, run
from tests.end_to_end.recipes import BATCH, STEPS, write_recipe

SAVED = (4, 5, 8, 10, 12, 15, 16, STEPS)  # after these steps every run saves
INTERRUPTED, RESTORED = 7, 5  # after this step a run is interrupted; to this one kill -9 sends it back


class Case(NamedTuple):
    """One cell of the matrix."""

    task: str
    processes: int
    precision: str
    workers: int

    @property
    def killed(self) -> bool:
        """By kill -9; else stopped by --max-steps."""
        return (self.precision == "fp32") == (self.workers == 0)

    @property
    def micro_batch(self) -> int | None:
        """Two micro-batches a process, or none."""
        return BATCH // self.processes // 2 if self.precision == "bf16" else None


VALUES = (["gan", "classifier"], [1, 2], ["fp32", "bf16", "fp16"], [0, 2])
CASES = list(itertools.starmap(Case, itertools.product(*VALUES)))
QUICK = {Case("gan", 2, "fp16", 2), Case("classifier", 2, "bf16", 2)}  # one process: test_resumed_kinds.py
MATRIX = [
    pytest.param(case, id="-".join(map(str, case)), marks=[] if case in QUICK else pytest.mark.slow) for case in CASES
]


class Trained(NamedTuple):
    """A run folder and the global batches that its processes have read, of all starts or of the last one."""

    folder: Path
    batches: Notes


Trainer = Callable[..., Trained]


@pytest.fixture
def trainer(tmp_path, images):
    """`trainer("name", case, ...)` starts or goes on with the run of that name."""
    started = itertools.count()

    def train(name: str, case: Case, *more: str, kill_after: int | None = None, **changes: Any) -> Trained:
        recipe = write_recipe(tmp_path / f"{case.task}.yaml", case.task, images, **changes)
        options = ["--config", str(recipe), "--run-dir", str(tmp_path / name), "--precision", case.precision]
        options += ["--data.workers", str(case.workers), *more]
        if case.micro_batch:
            options += ["--micro-batch", str(case.micro_batch)]
        kill_at = None if kill_after is None else kill_after * BATCH
        notes = tmp_path / f"notes-{next(started)}"
        read = run(options, notes, world=case.processes, kill_at=kill_at, saved=RESTORED)
        return Trained(tmp_path / name, read)

    return train


def differences(straight: Trained, resumed: Trained) -> list[str]:
    """What is not the same in two runs, the second being one whose last start went on somewhere."""
    found = []
    for step in SAVED:
        if (resumed.folder / "checkpoints" / f"step-{step:08d}.pt").is_file():
            states = differing(state_of(straight.folder, step), state_of(resumed.folder, step))
            found += [f"step {step}{name}" for name in states]
    found += ["metrics.jsonl"] * (rows(straight.folder) != rows(resumed.folder))
    found += ["batches"] * (straight.batches[-len(resumed.batches) :] != resumed.batches)
    for which in ("last", "best"):
        found += [f"{which}.json"] * (pointed_at(straight, which) != pointed_at(resumed, which))
    return found


def pointed_at(trained: Trained, which: str) -> dict[str, Any]:
    """What last.json or best.json says, but for the file's checksum: it also covers notes such as times."""
    entry = checkpoint.pointer(trained.folder / "checkpoints", which)
    return {key: value for key, value in entry.items() if key != "sha256"}


def check_alive(case: Case, straight: Trained) -> None:
    """What is compared has moved: an equal state that never changes says nothing."""
    first, last = (state_of(straight.folder, step) for step in (SAVED[0], STEPS))
    assert last["loader"]["consumed"] == STEPS * BATCH == 8 * len(straight.batches)
    assert [row["step"] for row in rows(straight.folder) if "images" in row] == list(range(3, STEPS + 1, 3))
    optimizers = [name for name in last if name.endswith("optimizer")]
    still = {"window"} if case.precision == "fp16" else {"window", "scaler"}  # the window is empty at the end
    unmoved = [name for name in last if not differing(first[name], last[name]) and name not in still]
    assert unmoved == []
    assert all(differing(first[name]["param_groups"], last[name]["param_groups"]) for name in optimizers)
    if case.precision == "fp16":
        assert last["scaler"]["_growth_tracker"] > 0
        assert last["scaler"]["scale"] != 2.0**16 or any(row.get("skipped_updates") for row in rows(straight.folder))


@pytest.mark.parametrize("case", MATRIX)
def test_interrupted_and_resumed_equals_straight(case, trainer):
    straight = trainer("straight", case)
    check_alive(case, straight)
    if case.killed:
        before = trainer("resumed", case, kill_after=INTERRUPTED)
        assert rows(before.folder)[-1]["step"] > RESTORED
        step = RESTORED
    else:
        before = trainer("resumed", case, "--max-steps", str(INTERRUPTED))
        step = INTERRUPTED
    assert before.batches == straight.batches[: len(before.batches)]
    resumed = trainer("resumed", case)
    assert resumed.batches[0][0] == step * BATCH
    assert len(resumed.batches) == STEPS - step >= 10
    assert differences(straight, resumed) == []


@pytest.mark.slow
def test_batchnorm_that_is_not_synchronised(trainer):
    """Found by review: each process had running statistics of its own, of which rank 0's were saved. What the two
    processes hold is compared after every step.
    """
    case = Case("classifier", 2, "fp32", 0)
    options = ["--sync-bn", "off", "--distributed.check-every", "1"]
    straight = trainer("straight", case, *options)
    check_alive(case, straight)
    trainer("resumed", case, *options, "--max-steps", str(INTERRUPTED))
    assert differences(straight, trainer("resumed", case, *options)) == []


def test_the_comparison_can_fail():
    state = {"a": [torch.ones(2), {"b": 1.0}], "c": float("nan")}
    assert differing(state, {"a": [torch.ones(2), {"b": 1.0}], "c": float("nan")}) == []
    other = {"a": [torch.ones(2).double(), {"b": 1}], "c": 0.0}
    assert differing(state, other) == [".a[0]", ".a[1].b", ".c"]
    assert differing(state, {"a": []}) == [": other keys"]
    assert differing(state["a"], [torch.tensor([1.0, 1.0000001]), {"b": 1.0}]) == ["[0]"]
    assert differing(state["a"], []) == [": other length"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gan", "classifier"])
def test_the_number_of_decoding_threads_changes_nothing(task, trainer):
    runs = [trainer(f"{workers}", Case(task, 1, "fp32", workers)) for workers in (0, 2)]
    assert differences(*runs) == []


PATH = [(1, 3), (2, 7), (4, 11), (1, 14)]  # number of processes, and up to which step
LAST = PATH[-1][1]
TOLERANCE = 1e-9  # of float64 weights of about 1


def networks(run_folder: Path) -> dict[str, torch.Tensor]:
    """All networks' weights, averages and statistics by name."""
    state = state_of(run_folder, LAST)
    parts = [name for name in ("generator", "discriminator", "generator_ema", "model", "model_ema") if name in state]
    assert len(parts) >= 2
    return {f"{name}.{key}": value for name in parts for key, value in state[name].items()}


@pytest.mark.parametrize("task", ["gan", pytest.param("classifier", marks=pytest.mark.slow)])
def test_the_samples_and_the_weights_are_those_of_one_process(task, images, tmp_path):
    # longer than it is trained here: the end of a run has an evaluation, which is not for float64
    changes = {"steps": LAST + 2, "evaluation": {"every": 0}}
    recipe = write_recipe(tmp_path / "recipe.yaml", task, images, **changes)
    options = ["--config", str(recipe), "--run-dir"]
    limit = ["--max-steps", str(LAST)]
    whole = run([*options, str(tmp_path / "whole"), *limit], tmp_path / "notes", float64=True)
    read: Notes = []
    for number, (world, until) in enumerate(PATH):
        argv = [*options, str(tmp_path / "elastic"), "--max-steps", str(until)]
        read += run(argv, tmp_path / f"notes-{number}", world=world, float64=True)
        assert len(read) == until
    assert [begins for begins, _ in read] == [step * BATCH for step in range(LAST)]
    assert read == whole
    assert len({row for _, rows in whole for row in rows}) > 100  # 14 batches of 8, cropped at random, not one image
    one, other = networks(tmp_path / "whole"), networks(tmp_path / "elastic")
    assert one.keys() == other.keys()
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < TOLERANCE
