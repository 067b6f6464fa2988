"""One training run from a config file to a finished run folder; what `train.py` calls in every
process.
"""

import os
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

from duetgan.training.base import data
from duetgan.training.base.config import RunConfig
from duetgan.training.base.task import Task
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.engine import health, lr_find, preflight, speed, transfer
from duetgan.training.engine import profile as profiling
from duetgan.training.engine.loop import Loop
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.utils import seeding, threads
from duetgan.utils.checkpoint import newest_first
from duetgan.utils.config import plugins
from duetgan.utils.config.build import given_keys, to_tree
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.heartbeat import Heartbeat, clear, silent_ranks
from duetgan.utils.distributed.launch import under_launcher
from duetgan.utils.errors import StoppedBySignal, TrainingHalted, UserError
from duetgan.utils.memory import tune_malloc
from duetgan.utils.provenance import Lineage, join
from duetgan.utils.runlog.run_folder import RunFolder, default_folder
from duetgan.utils.runlog.run_log import say, say_main, say_refused
from duetgan.utils.text import columns


def train(
    config_file: str,
    overrides: list[str],
    *,
    run_dir: str | RunFolder | None = None,
    device: str | None = None,
    max_steps: int | None = None,
    profile_steps: int | None = None,
    sweep: dict[str, Any] | None = None,
    dry_run: str = "",
    layers: bool = False,
) -> int:
    """Train, or resume, or (profile_steps) measure that many steps, or (sweep: options of
    `lr_find.Sweep`) search the learning rate, or (dry_run) say what would be done. Returns the exit
    code; raises what `run_cli` prints.
    """
    folder = (
        run_dir
        if isinstance(run_dir, RunFolder)
        else RunFolder(run_dir or default_folder(Path(config_file)))
    )
    begun = folder.path / "config.yaml"
    with plugins.hinting(lambda: read_yaml(begun) if begun.is_file() else {}):
        config = build_run_config(read_yaml(config_file), overrides, config_file)
    rates = None if sweep is None else lr_find.Sweep(**sweep)
    if rates is not None and (why_not := TASKS[config.task].task.no_rate_search):
        raise UserError(f"--lr-find is not for task {config.task}: {why_not}")
    torch_device = _start_process(config, device)
    loop, lost = None, False
    try:
        loop = prepare(
            config,
            folder,
            torch_device,
            optional_weights="model.weights" not in given_keys(overrides),
        )
        if dry_run:
            collectives.from_main_process(lambda: _print_plan(loop, layers, dry_run == "gpu"))
            return 0
        if rates is not None:
            return _find_rate(loop, rates)
        return _run(loop, max_steps, profile_steps)
    except Exception as error:
        if not collectives.is_peer_error(error):
            # leaving the group in good order waits for ranks that may be in an operation that waits
            # for this one
            lost = (
                not isinstance(error, StoppedBySignal) and getattr(error, "of_rank", None) is None
            )
            raise
        lost = True
        raise health.lost_rank(folder, 0 if loop is None else loop.step, error) from error
    finally:
        folder.close()
        collectives.stop(lost=lost)


def _start_process(config: RunConfig, requested: str | None) -> torch.device:
    """Settings of this process, and its place in the group; returns its device."""
    device = collectives.choose_device(requested, several=config.several_devices)
    if device.type == "cpu":
        tune_malloc()
    if config.deterministic:
        seeding.use_deterministic_kernels()
    elif device.type != "cpu":
        # algorithms by speed: shapes are the same step after step
        torch.backends.cudnn.benchmark = True
    collectives.start(device, config.distributed.start_timeout, several=config.several_devices)
    return device


def prepare(
    config: RunConfig, folder: RunFolder, device: torch.device, *, optional_weights: bool = False
) -> Loop:
    """Check all that can be checked before the first step and build the loop; writes nothing.
    Raises UserError.

    Args:
        optional_weights: Train from scratch where published weights that the recipe names cannot be
            downloaded.
    """
    began = collectives.from_main_process(lambda: folder.saved_config() or {})
    if optional_weights and isinstance(config, ClassifierConfig):
        config = config.with_weights_at_hand(began)
    kept = {
        key: began[key]
        for key in ("precision", "threads")
        if key in began and getattr(config, key) == "auto"
    }
    if isinstance(kept.get("threads"), int):  # begun on a machine of more cores
        kept["threads"] = min(kept["threads"], threads.most())
    config = config.changed(**kept)
    collectives.from_main_process(lambda: _accept_config(folder, config) and None)
    entry = TASKS[config.task].task
    with collectives.raising_together():  # each node may have files of its own
        reader = data.open_training(config.data)
        val_reader = data.open_held_out(config.data, reader)
        data.check_data(config, reader, val_reader)
    data.check_same_images(config.data, reader, val_reader)
    shape = config.shape(reader)
    # before anything of the configured sizes is made; machines differ
    with collectives.raising_together():
        preflight.check_memory(
            config, partial(entry.outline, config, shape), shape, device, len(reader)
        )
    choice = speed.choose(config, reader, device, kept=began.get("precision") == config.precision)
    config = config.changed(precision=choice.precision)
    if config.threads == "auto" and device.type == "cpu":
        config = config.changed(threads=choice.threads)
    if choice.warning:
        say_main(f"warning: {choice.warning}")
    # first, because the task asks whether its weights are new
    donor = transfer.find_donor(config, folder)
    task: Task = entry(config, reader, val_reader, device)
    with collectives.raising_together():
        written = len(newest_first(folder.checkpoints))
        preflight.check_disk(folder.path, task, config.checkpoint.most(config.steps) - written)
    taken = None
    if donor is not None:
        classes = reader.meta.classes[: task.shape["classes"]]  # none, if it is unconditional
        taken = transfer.transfer(
            donor, task.registry(), resolution=reader.resolution, classes=classes
        )
    loader = data.make_loader(config, reader, device)
    reading = data.tune_workers(config, reader, val_reader)
    rows = preflight.plan_rows(config, task, reader, val_reader, reading, device, choice)
    say_main(indent(columns((rows | {"run folder": str(folder.path)}).items(), "<"), "  "))
    if taken is not None:
        say_main(taken)
    loop = Loop(config, task, loader, folder)
    before = Lineage.of()
    if donor is not None:
        before, loop.origin = (
            donor.lineage,
            {"file": donor.file, "step": donor.step, "sha256": donor.sha256},
        )
    loop.manager.lineage = join(data.lineage(config, reader), task.lineage(), before)
    return loop


def _print_plan(loop: Loop, layers: bool, gpu: bool) -> None:
    world_size = collectives.world_size()
    micro = loop.config.micro(world_size)
    for name in loop.task.networks():
        print(preflight.model_summary(loop.task, name, micro, layers=layers))
    if gpu:
        from duetgan.training.engine.on_paper import told  # fake tensors take a while to import

        print(told(loop.config, loop.loader.reader, world_size))
    if not layers:
        print("--layers prints every layer")
    print("dry run: everything up to the first step is in order; nothing was written")


def _accept_config(folder: RunFolder, config: RunConfig) -> list[str]:
    return folder.accept_config(to_tree(config), defaults=to_tree(type(config)(task=config.task)))


def _resume(loop: Loop, doing: str) -> None:
    """Open the run's folder and take its newest checkpoint, if it has one; what is refused leaves
    it as it was.
    """

    def open_folder() -> None:
        loop.folder.open()
        clear(loop.folder.path)
        for notice in _accept_config(loop.folder, loop.config):
            say(notice)

    collectives.from_main_process(open_folder)
    resumed, steps = loop.resume(), loop.config.steps
    if loop.step > steps:
        raise UserError(
            f"--steps {steps}: the run has done {loop.step} already; give as many or more"
        )
    if resumed:
        say_main(f"{doing} step {loop.step} of {steps}")


def _find_rate(loop: Loop, sweep: lr_find.Sweep) -> int:
    """Search the learning rate from where the run stands; beside the curve and the lock nothing is
    written.
    """
    _resume(loop, "searching from")
    try:
        if loop.step == 0:
            loop.task.begin(loop.folder.path)
        curve = lr_find.search(loop, sweep)
    finally:
        loop.loader.close()
    collectives.from_main_process(lambda: print(lr_find.write(curve, loop.folder.path)))
    return 0


def _run(loop: Loop, max_steps: int | None, profile_steps: int | None) -> int:
    """Train, with a sign of life of this process and a status that says how it ended."""
    _resume(loop, "resumed at")
    if profile_steps is not None:
        _check_profile(loop, profile_steps)
    folder, facts = loop.folder, data.facts(loop.loader.reader, loop.task.val_reader)
    collectives.from_main_process(lambda: folder.save_config(to_tree(loop.config), facts))
    loop.heartbeat = _start_heartbeat(folder.path)
    failure, lost = None, False  # why it leaves, if it must not
    try:
        loop.folder_status("running")
        loop.run(max_steps, profile=profile_steps)
    except (StoppedBySignal, TrainingHalted) as error:  # the loop has written the status
        failure = None if isinstance(error, StoppedBySignal) else _one_line(error)
        if not error.rank_specific:  # all ranks are here
            collectives.from_main_process(lambda: _report(folder.path))
        raise
    except BaseException as error:
        failure, lost = _one_line(error), collectives.is_peer_error(error)
        if not lost:
            loop.folder_status("failed", failure, getattr(error, "exit_code", 1))
        raise
    finally:
        loop.heartbeat.stop(failure, lost_peer=lost)
        collectives.watch_while_waiting(None)
    finished = loop.finished
    why = loop.stopping.reason if finished else "max_steps" if profile_steps is None else "profile"
    loop.folder_status(
        "finished" if finished else "stopped", "" if loop.step >= loop.config.steps else why, 0
    )
    if collectives.is_main():
        if profile_steps is not None:
            print((folder.path / "profile" / profiling.SUMMARY).read_text(), end="")
        _report(folder.path)
        say(f"done: step {loop.step} of {loop.config.steps}, {folder.path}")
    return 0


def _start_heartbeat(folder: Path) -> Heartbeat:
    """This process's heartbeat file while it trains; whoever waits long for rank 0 looks at the
    others'.
    """
    rank, world = collectives.rank(), collectives.world_size()

    def look() -> None:
        if missing := [
            silent
            for silent in silent_ranks(folder, world, own=rank)
            if silent.rank == 0 or silent.gone
        ]:
            raise collectives.PeerLost(missing[0].reason)

    heartbeat = Heartbeat(folder, rank, parent=os.getppid() if under_launcher() else None)
    heartbeat.start()
    collectives.barrier()  # from here on everybody's file is there
    collectives.watch_while_waiting(look)
    return heartbeat


def _report(folder: Path) -> None:
    """Write the run's report and say where it is. On a full disk a warning: what was trained is
    safe.
    """
    # a dry run writes none, and its parts take a tenth of a second
    from duetgan.reporting.report import write_report

    try:
        say(f"report: {write_report(folder)}")
    except UserError as error:
        say_refused(folder / "report.html", error, "the report")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _check_profile(loop: Loop, count: int) -> None:
    left, needed = loop.config.steps - loop.step, profiling.WARM_UP + count
    if left < needed:
        raise UserError(
            f"--profile {count}: needs {profiling.WARM_UP} steps to warm up and {count} to measure, but {left} "
            f"of {loop.config.steps} are left; give a smaller N, a larger --steps, or another --run-dir"
        )
