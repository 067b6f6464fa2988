"""Checkpoints that are cut short, damaged or not what they seem, by number in the project's table of faults (2, 10
to 13): the newest good one is used, loudly, and nothing in a file is ever executed.
"""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from duetgan.utils.checkpoint import file_sha256, load, newest_first, step_of
from tests.end_to_end.helpers import last, log_of, status
from tests.faults import inject
from tests.faults.conftest import Command, Outcome, own_process, with_mounts
from tests.utils.checkpoint.files import damage

SLOW = pytest.mark.slow
QUIET = ["--evaluation.every", "0", "--log.samples-every", "0"]


def checkpoints(run: Path) -> list[int]:
    return [step_of(path) for path in newest_first(run / "checkpoints")]


def strangers(run: Path) -> list[str]:
    """Files among the checkpoints that no complete write leaves."""
    names = {path.name for path in (run / "checkpoints").iterdir()}
    whole = {name for name in names if name.startswith("step-") and name.endswith(".pt")}
    return sorted(names - whole - {f"{name}.sha256" for name in whole} - {"last.json", "best.json"})


# --- 2: killed while writing


@pytest.mark.parametrize("kind", ["kill-before-write", "kill-before-rename"])
def test_fault_02_killed_before_the_rename(command, gan_recipe, tmp_path, kind, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setenv(inject.VARIABLE, f"0:4:{kind}")
    killed = own_process(*gan_recipe, *QUIET)
    assert killed.code == -9, killed.err
    assert checkpoints(run) == [2]
    (left,) = strangers(run)
    assert left.startswith(".step-00000004.pt.")
    assert left.endswith(".tmp")
    again = command(*gan_recipe, *QUIET).success()
    assert "resumed at step 2 of 8" in again.err
    assert (checkpoints(run), last(run), strangers(run)) == ([8, 6], 8, [])


# --- 10: the disk refuses


def refused_by_a_limit(recipe: list[str], run: Path) -> Outcome:
    """Go on where no file may be as large as a checkpoint, which torch finds out while it writes."""
    size = newest_first(run / "checkpoints")[0].stat().st_size // 2
    return own_process(*recipe, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))


def refused_by_a_full_disk(recipe: list[str], run: Path) -> Outcome:
    """Go on on a small disk with room for one checkpoint, as the preflight wants it, but hardly for anything else."""
    copy = run.with_name("copy")
    run.rename(copy)
    run.mkdir()
    left = newest_first(copy / "checkpoints")[0].stat().st_size // 1024 + 700
    fill = f"dd if=/dev/zero of={run}/others bs=1k count=$(($(stat -f -c %a {run}) * 4 - {left})) 2>/dev/null"
    back = f'"$@"; code=$?; rm {run}/others; cp -a {run}/. {copy}; exit $code'
    mounts = with_mounts(f"mount -t tmpfs -o size=64m tmpfs {run}", f"cp -a {copy}/. {run}", fill)
    outcome = own_process(*recipe, prefix=[*mounts, "sh", "-c", back, "sh"])
    run.rmdir()
    copy.rename(run)
    return outcome


@pytest.mark.parametrize("refused", [refused_by_a_full_disk, pytest.param(refused_by_a_limit, marks=SLOW)])
def test_fault_10_disk_full(command, gan_recipe, tmp_path, refused):
    """H5: training goes on without a checkpoint, but a run that lacks its last one has not finished."""
    run, recipe = tmp_path / "run", [*gan_recipe, "--generator.mapping_layers", "8", "--generator.w_dim", "128", *QUIET]
    command(*recipe, "--max-steps", "4").success()
    before = {path: path.read_bytes() for path in newest_first(run / "checkpoints")}
    more = ["--checkpoint.keep", "1", "--log.every", "1"]
    outcome = refused([*recipe, *more], run)
    why = "File too large" if refused is refused_by_a_limit else "No space left on device"
    assert f"warning: checkpoint of step 6 was not written ({why}); the previous one is kept" in outcome.err
    assert {path: path.read_bytes() for path in newest_first(run / "checkpoints")} == before
    assert (checkpoints(run), last(run), strangers(run)) == ([4, 2], 4, [])
    lines = log_of(run)
    assert all(100 < line["memory_mib"] < 10_000 for line in lines if "images" in line)  # N12
    outcome.error("checkpoint of step 8 was not written", why, "it is the run's last; make room, then the same")
    assert lines[-1]["step"] == 8
    assert (outcome.code, *status(run, "state", "exit_code")) == (4, "failed", 4)
    assert "was not written" in status(run)["reason"]
    again = command(*recipe, *more).success()
    assert ("resumed at step 4 of 8" in again.err, checkpoints(run), strangers(run)) == (True, [8], [])


# --- 11 and 12: damaged


def everything_that_loads(path: Path, recipe: list[str], tmp_path: Path) -> list[list[str]]:
    """Commands that are given a checkpoint of a GAN by its name."""
    fresh = [str(tmp_path / "fresh") if part == str(tmp_path / "run") else part for part in recipe]
    commands: list[list[str | Path]] = [
        ["evaluate.py", "--checkpoint", path, "--n", "20", "--out", tmp_path / "eval"],
        ["predict.py", "--checkpoint", path, tmp_path / "a.png"],
        ["generate.py", "grid", "--checkpoint", path, "--out", tmp_path / "grid.png"],
        ["export.py", "--checkpoint", path, "--format", "safetensors", "--out", tmp_path / "x.safetensors"],
        [*fresh, "--init-from", path],
    ]
    return [list(map(str, command)) for command in commands]


def check_falls_back(command: Command, recipe: list[str], run: Path, told: str) -> None:
    """Resume from the checkpoint of step 2, with a warning that names the damaged one of step 4."""
    damaged = run / "checkpoints" / "step-00000004.pt"
    again = command(*recipe, *QUIET, "--max-steps", "4").success()
    (warning,) = [line for line in again.err.splitlines() if line.startswith("warning: ")]
    assert [part for part in (str(damaged), told, "falling back to the previous one") if part not in warning] == []
    assert "resumed at step 2 of 8" in again.err
    assert load(damaged)["step"] == 4  # written again


def check_refused(command: Command, recipe: list[str], run: Path, told: str) -> None:
    """Every command that is given the checkpoint of step 4 refuses it by name and writes nothing."""
    damaged = run / "checkpoints" / "step-00000004.pt"
    for arguments in everything_that_loads(damaged, recipe, run.parent):
        command(*arguments).refusal(str(damaged), told)
    assert sorted(path.name for path in run.parent.iterdir()) == ["recipe.yaml", "run"]


def test_fault_11_truncated_where_best_points(command, gan_recipe, run):
    """Neither pointer leads to something else than it says, and all of them damaged is an error."""
    for step in (2, 4):
        path = run / "checkpoints" / f"step-{step:08d}.pt"
        damage(path, keep=0.7)
        path.with_name(path.name + ".sha256").unlink()  # killed between the rename and the checksum
    for which in ("last", "best"):
        arguments = ["evaluate.py", "--checkpoint", run, "--which", which, "--n", "20"]
        command(*arguments).refusal("step-00000004.pt", "use an earlier one")
    command(*gan_recipe).refusal("none of its 2 checkpoints can be read", "--run-dir")
    assert checkpoints(run) == [4, 2]


def truncated(path: Path) -> None:
    damage(path, keep=0.999)


def emptied(path: Path) -> None:
    damage(path, keep=0.0)


def flipped_tensor(path: Path) -> None:
    """A bit in the middle of the largest tensor."""
    largest = max(load(path)["state"]["generator"].values(), key=torch.numel)
    stored = bytes(largest.untyped_storage().tolist())
    damage(path, flip=(path.read_bytes().index(stored) + len(stored) // 2 + 0.5) / path.stat().st_size)


def flipped_metadata(path: Path) -> None:
    """A bit in the name of a class."""
    name = load(path)["classes"][3].encode()
    damage(path, flip=(path.read_bytes().index(name) + 1.5) / path.stat().st_size)


def flipped_checksum(path: Path) -> None:
    """A high bit, which makes it no text at all."""
    checksum = path.with_name(path.name + ".sha256")
    content = bytearray(checksum.read_bytes())
    content[5] ^= 128
    checksum.write_bytes(bytes(content))


def without_checksum(path: Path) -> None:
    flipped_metadata(path)
    path.with_name(path.name + ".sha256").unlink()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (truncated, "damaged"),
        (emptied, "damaged"),
        (flipped_tensor, "SHA-256"),
        (flipped_checksum, "SHA-256"),
        (without_checksum, "damaged (the checksum of its part"),
    ],
)
def test_fault_11_12_damaged(command, gan_recipe, run, change, told):
    change(run / "checkpoints" / "step-00000004.pt")
    if change is truncated:
        check_refused(command, gan_recipe, run, told)
    check_falls_back(command, gan_recipe, run, told)


def test_fault_12_damaged_pointers(command, gan_recipe, run):
    """They lead nowhere else, and a run goes on without them."""
    for which in ("last", "best"):
        (run / "checkpoints" / f"{which}.json").write_bytes(b"\xff{")
    grid = ["generate.py", "grid", "--checkpoint", run, "--out", run.parent / "grid.png", "--n", "4"]
    command(*grid, "--which", "best").refusal("best.json: damaged", "--which last")
    command(*grid).success()
    again = command(*gan_recipe, *QUIET, "--max-steps", "6").success()
    assert ("resumed at step 4 of 8" in again.err, last(run)) == (True, 6)


# --- 13: malicious


class Bomb:
    """Unpickled freely, it makes a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self.canary,)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_fault_13_malicious_pickle(command, gan_recipe, run, tmp_path_factory, form):
    """With the right checksum, in a real checkpoint, in torch's format of today and in its old one."""
    canary = tmp_path_factory.mktemp("mine") / "canary"
    path = run / "checkpoints" / "step-00000004.pt"
    content = load(path)
    content["state"]["window"] = Bomb(canary)
    torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    path.with_name(path.name + ".sha256").write_text(f"{file_sha256(path)}  {path.name}\n")
    if form == "zip":
        check_refused(command, gan_recipe, run, "nothing in it was executed")
    check_falls_back(command, gan_recipe, run, "nothing in it was executed")
    assert not canary.exists()
    torch.save({"x": Bomb(canary)}, run / "x.pt")
    torch.load(run / "x.pt", weights_only=False)
    assert canary.exists()  # the test itself works: loaded freely, it goes off
