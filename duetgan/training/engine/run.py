"""Run a training, from the config file to the finished run folder.

Each process of `train.py` calls `train`.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

from duetgan.data.reading.loader import InfiniteLoader
from duetgan.training.base import data
from duetgan.training.base.config import RunConfig
from duetgan.training.base.task import Task
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.engine import hardware, health, lr_find, preflight, speed, transfer
from duetgan.training.engine.loop import Callback, Loop
from duetgan.training.engine.outputs import Columns, LayerLog, SampleGrids, StatusFile
from duetgan.training.engine.profile import Profiler
from duetgan.training.engine.rollback import SkippedUpdates, SpikeRollback
from duetgan.training.engine.signals import StopSignals
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.utils import extras, seeding
from duetgan.utils.checkpoint import newest_first
from duetgan.utils.checkpoint.provenance import Lineage, join
from duetgan.utils.config.build import given_keys, to_tree
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.heartbeat import Heartbeat, clear, silent_ranks
from duetgan.utils.distributed.launch import under_launcher
from duetgan.utils.errors import StoppedBySignal, TrainingHalted, UserError
from duetgan.utils.machine import tune_malloc
from duetgan.utils.runlog.run_folder import RunFolder, default_folder
from duetgan.utils.runlog.run_log import say, say_main, say_refused
from duetgan.utils.text import columns, duration

# Functions that return callbacks of a run; extras add theirs.
CALLBACKS: list[Callable[[RunConfig, torch.device], list[Callback]]] = []


def callbacks(
    config: RunConfig, task: Task, loader: InfiniteLoader, folder: RunFolder
) -> list[Callback]:
    """Return the callbacks of a training loop, in the order in which the loop calls them."""
    result: list[Callback] = []
    for make in CALLBACKS:
        result += make(config, loader.device)
    result += [health.FirstStep(), StatusFile(folder), SampleGrids()]
    if config.distributed.check_every and collectives.world_size() > 1:
        result.append(health.EqualWeights(config.distributed.check_every))
    if config.log.layers:
        result.append(LayerLog(config.log, task.registry(), folder))
    result += [
        Columns(task, loader.device),
        SkippedUpdates(config.nonfinite_cap),
        SpikeRollback(config.spikes),
    ]
    return result


def train(
    config_file: str,
    overrides: list[str],
    *,
    run_dir: str | RunFolder | None = None,
    device: str | None = None,
    max_steps: int | None = None,
    profile_steps: int | None = None,
    sweep: Mapping[str, Any] | None = None,
    dry_run: str | None = None,
    layers: bool = False,
    new_data: bool = False,
) -> int:
    """Train or resume a run. On request, search a learning rate or print the plan instead.

    Args:
        overrides: Options that replace values of the config file, such as `--batch_size=64`.
        run_dir: The run folder; None for the default folder of the config file.
        max_steps: Step at which the training stops early; None for the config's last step.
        profile_steps: Number of steps to profile; the training then stops.
        sweep: Arguments of `lr_find.Sweep`; if not None, search a learning rate.
        dry_run: If not None, only print the plan; if it is a module's name, also print the result
            of the module's function `predictions`.
        layers: Print every layer in the plan.
        new_data: Continue the run even if it was trained on other images than the present ones.

    Returns the exit code. Raises errors, which `run_cli` prints.
    """
    if isinstance(run_dir, RunFolder):
        folder = run_dir
    else:
        folder = RunFolder(run_dir or default_folder(Path(config_file)))
    config = build_run_config(read_yaml(config_file), overrides, config_file)
    rates = None if sweep is None else lr_find.Sweep(**sweep)
    unsupported = TASKS[config.task].task.lr_find_unsupported_reason
    if rates is not None and unsupported:
        raise UserError(f"--lr-find is not for task {config.task}: {unsupported}")
    torch_device = _start_process(config, device)
    loop, lost = None, False
    try:
        loop = prepare(
            config,
            folder,
            torch_device,
            optional_weights="model.weights" not in given_keys(overrides),
        )
        loop.manager.images.new_data = new_data
        if dry_run is not None:
            collectives.from_main_process(lambda: _print_plan(loop, layers, dry_run))
            return 0
        if rates is not None:
            return _find_rate(loop, rates)
        return _run(loop, max_steps, profile_steps)
    except Exception as error:
        if not collectives.is_peer_error(error):
            # An orderly exit from the process group would wait for ranks that may in turn be
            # waiting for this one.
            stops_alone = getattr(error, "of_rank", None) is None
            lost = stops_alone and not isinstance(error, StoppedBySignal)
            raise
        lost = True
        raise health.lost_rank(folder, 0 if loop is None else loop.step, error) from error
    finally:
        folder.close()
        collectives.stop(lost=lost)


def _start_process(config: RunConfig, requested: str | None) -> torch.device:
    """Configure this process, join the process group, and return the device of this process.

    `requested` is the name of a device, such as "cuda"; None for the default device.
    """
    device = collectives.choose_device(requested, several=config.several_devices)
    if device.type == "cpu":
        tune_malloc()
    if config.deterministic:
        seeding.use_deterministic_kernels()
    elif device.type != "cpu":
        # cuDNN measures the fastest algorithms, which pays because shapes rarely change.
        torch.backends.cudnn.benchmark = True
    collectives.start(device, config.distributed.start_timeout, several=config.several_devices)
    return device


def prepare(
    config: RunConfig, folder: RunFolder, device: torch.device, *, optional_weights: bool = False
) -> Loop:
    """Check everything that can be checked before the first step, and build the training loop.

    Nothing is written.

    Args:
        optional_weights: Train from scratch if the recipe's pretrained weights cannot be
            downloaded.

    Raises UserError if a check fails.
    """
    saved = collectives.from_main_process(lambda: folder.saved_config() or {})
    if optional_weights and isinstance(config, ClassifierConfig):
        config = config.with_weights_at_hand(saved)
    config, precision = hardware.settle(config, saved, device)
    collectives.from_main_process(lambda: _accept_config(folder, config) and None)
    task_class = TASKS[config.task].task
    with collectives.raising_together():  # Nodes may have different files.
        dataset = data.open_training(config.data)
        val_dataset = data.open_held_out(config.data, dataset)
        data.check_data(config, dataset, val_dataset)
    data.check_same_images(config.data, dataset, val_dataset)
    shape = config.shape(dataset)
    # This precedes any allocation of the configured sizes. Machines may differ.
    with collectives.raising_together():
        preflight.check_memory(config, partial(task_class.outline, config, shape), device)
    config, precision = speed.faster_precision(config, precision, dataset, device)
    # This sets config.init_from, which the task reads.
    donor = transfer.find_donor(config, folder)
    task: Task = task_class(config, dataset, val_dataset, device)
    with collectives.raising_together():
        existing = len(newest_first(folder.checkpoints))
        new_checkpoints = config.checkpoint.max_on_disk(config.steps) - existing
        preflight.check_disk(folder.path, task, new_checkpoints)
    transferred, donor_lineage = None, Lineage.of()
    if donor is not None:
        # empty for an unconditional network, even if its images have classes
        classes = dataset.meta.classes[: task.shape["classes"]]
        transferred, donor_lineage = transfer.transfer(
            donor["file"], task.registry(), resolution=dataset.resolution, classes=classes
        )
    loader = data.make_loader(config, dataset, device)
    rows = preflight.plan_rows(config, task, dataset, val_dataset, device, precision)
    say_main(indent(columns((rows | {"run folder": str(folder.path)}).items(), "<"), "  "))
    if transferred is not None:
        say_main(transferred)
    loop = Loop(config, task, loader, folder, callbacks(config, task, loader, folder))
    loop.manager.origin = donor
    loop.manager.images.adapt = transfer.NewImages(loop).adapt
    loop.manager.lineage = join(data.lineage(config, dataset), task.lineage(), donor_lineage)
    return loop


def _print_plan(loop: Loop, layers: bool, predictions: str) -> None:
    config, device = loop.config, loop.loader.device
    if device.type == "cpu" and collectives.world_size() == 1:
        seconds = speed.seconds_per_image(config, loop.loader.dataset, device)
        total = duration(seconds * loop.task.images_at(config.steps))
        print(f"time: about {total} here, {1 / seconds:,.3g} images/s")
    for name in loop.task.networks() if layers else ():
        print(preflight.layers_text(loop.task, name))
    if predictions:
        module = importlib.import_module(predictions)
        dataset, world_size = loop.loader.dataset, collectives.world_size()
        print(module.predictions(loop.config, dataset, world_size))
    if not layers:
        print("--layers prints every layer")
    print("dry run: everything up to the first step is in order; nothing was written")


def _accept_config(folder: RunFolder, config: RunConfig) -> list[str]:
    return folder.accept_config(to_tree(config), defaults=to_tree(type(config)(task=config.task)))


def _resume(loop: Loop, activity: str) -> None:
    """Open the run folder, and load its newest checkpoint if there is one.

    If the folder refuses the config, its own config does not change. `activity` begins the message
    about the step at which the run continues. Raises UserError if no steps are left.
    """

    def open_folder() -> None:
        loop.folder.open()
        clear(loop.folder.path)
        for notice in _accept_config(loop.folder, loop.config):
            say(notice)

    collectives.from_main_process(open_folder)
    resumed, steps = loop.resume(), loop.config.steps
    # A run with new images must make at least one step on them.
    least = loop.step + (loop.step == loop.manager.images.periods[-1].step > 0)
    if least > steps:
        raise UserError(
            f"--steps {steps}: the run has done {loop.step} already; give {least} or more"
        )
    if resumed:
        say_main(f"{activity} step {loop.step} of {steps}")


def _find_rate(loop: Loop, sweep: lr_find.Sweep) -> int:
    """Search a learning rate from the run's current state, and return the exit code.

    In the run folder, only the curve and the lock are written.
    """
    _resume(loop, "searching from")
    try:
        if loop.step == 0:
            loop.task.begin()
        curve = lr_find.search(loop, sweep)
    finally:
        loop.loader.close()
    collectives.from_main_process(lambda: print(lr_find.write(curve, loop.folder.path)))
    return 0


def _run(loop: Loop, max_steps: int | None, profile_steps: int | None) -> int:
    """Train, write the final status and the report, and return the exit code.

    During the training a thread writes this process's heartbeat.
    """
    _resume(loop, "resumed at")
    folder, facts = loop.folder, data.facts(loop.loader.dataset, loop.task.val_dataset)
    periods = loop.manager.images.periods
    if len(periods) > 1:
        facts["history"] = {f"step {images.step}": images.path for images in periods}
    status = StatusFile(folder)
    signals = StopSignals(status)
    loop.callbacks.append(signals)
    if profile_steps is not None:
        profiler = Profiler(loop, profile_steps)
        max_steps = profiler.last
        if collectives.is_main():
            loop.callbacks.append(profiler)
    collectives.from_main_process(lambda: folder.save_config(to_tree(loop.config), facts))
    heartbeat = _start_heartbeat(folder.path)
    loop.callbacks.append(health.Beat(heartbeat))
    failure = None  # reason for which this rank ends before the others
    lost_peer = False
    try:
        status.write(loop, "running")
        with signals.handled(), health.explaining(loop):
            loop.run(max_steps)
    except StoppedBySignal:
        collectives.from_main_process(lambda: _report(folder.path))
        raise
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}".split("\n")[0]
        lost_peer = collectives.is_peer_error(error)
        if not lost_peer:
            reason = str(error) if isinstance(error, TrainingHalted) else failure
            status.write(loop, "failed", reason, getattr(error, "exit_code", 1))
        # A report needs all ranks.
        if isinstance(error, TrainingHalted) and not error.rank_specific:
            collectives.from_main_process(lambda: _report(folder.path))
        raise
    finally:
        heartbeat.stop(failure, lost_peer=lost_peer)
        collectives.watch_while_waiting(None)
    reason = "max_steps" if profile_steps is None else "profile"
    if loop.finished:
        reason = loop.stopping.reason if loop.step < loop.config.steps else ""
    status.write(loop, "finished" if loop.finished else "stopped", reason, 0)
    if collectives.is_main():
        _report(folder.path)
        say(f"done: step {loop.step} of {loop.config.steps}, {folder.path}")
    return 0


def _start_heartbeat(folder: Path) -> Heartbeat:
    """Start the thread that writes this process's heartbeat file, and return its object.

    From now on, if this process waits long for rank 0, it reads the heartbeat files of the other
    ranks. It raises PeerLost if one of these ranks is gone or rank 0 is silent.
    """
    rank, world_size = collectives.rank(), collectives.world_size()

    def check_peers() -> None:
        for silent in silent_ranks(folder, world_size, own_rank=rank):
            if silent.rank == 0 or silent.gone:
                raise collectives.PeerLost(silent.reason)

    heartbeat = Heartbeat(folder, rank, parent=os.getppid() if under_launcher() else None)
    heartbeat.start()
    collectives.barrier()  # Now the files of all ranks exist.
    collectives.watch_while_waiting(check_peers)
    return heartbeat


def _report(folder: Path) -> None:
    """Write the run's report and print its path.

    A full disk only causes a warning, since the trained weights are saved.
    """
    # Imported here because it takes a tenth of a second and a dry run writes no report.
    from duetgan.reporting.report import write_report

    try:
        say(f"report: {write_report(folder)}")
    except UserError as error:
        say_refused(folder / "report.html", error, "the report")


extras.attach(__name__)
