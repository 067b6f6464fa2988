"""One training run from a config file to a finished run folder; what `train.py` calls in every process."""

import shlex
from pathlib import Path

import torch

from training import data, plan
from training.config import RunConfig
from training.loop import Loop, Task
from training.tasks import TASKS, build_run_config
from utils import distributed
from utils.config import read_yaml, to_tree
from utils.errors import StoppedBySignal, TrainingHalted
from utils.logging import say
from utils.report import write_report
from utils.run_folder import RunFolder


def train(
    config_file: str,
    overrides: list[str],
    *,
    run_dir: str | None = None,
    device: str | None = None,
    max_steps: int | None = None,
    dry_run: bool = False,
) -> int:
    """Train, or resume, or (dry_run) say what would be done. Returns the exit code; raises what `run_cli` prints."""
    config = build_run_config(read_yaml(config_file), overrides, config_file)
    torch_device = distributed.choose_device(device)
    distributed.start(torch_device)
    folder = RunFolder(run_dir or default_folder(Path(config_file)))
    try:
        loop = prepare(config, folder, torch_device)
        if dry_run:
            distributed.on_main(lambda: _print_plan(loop))
            return 0
        return _run(loop, max_steps)
    finally:
        folder.close()
        distributed.stop()


def default_folder(config_file: Path) -> Path:
    """runs/<name of the config>; for a run's own config.yaml that run."""
    if config_file.name == "config.yaml" and (config_file.parent / "checkpoints").is_dir():
        return config_file.parent
    return Path("runs") / config_file.stem


def prepare(config: RunConfig, folder: RunFolder, device: torch.device) -> Loop:
    """Check everything that can be checked before the first step and build the loop. Nothing is written.

    Raises UserError with the remedy.
    """
    distributed.on_main(lambda: folder.accept_config(to_tree(config)) and None)
    reader = data.open_training(config.data)
    val_reader = data.open_held_out(config.data, reader)
    data.check_data(config, reader, val_reader)
    task: Task = TASKS[config.task].task(config, reader, val_reader, device)
    plan.check_disk(folder.path, task, config.checkpoint.keep)
    loader = data.make_loader(config, reader, device)
    reading = data.tune_workers(config, reader, val_reader)
    rows = plan.plan_rows(config, task, reader, val_reader, reading, device)
    if distributed.is_main():
        say(plan.table(rows | {"run folder": str(folder.path)}))
    return Loop(config, task, loader, folder)


def again(run: Path) -> str:
    """The command that trains a run once more from its own config."""
    return shlex.join(["python", "train.py", "--config", str(run / "config.yaml"), "--run-dir", f"{run}-again"])


def _print_plan(loop: Loop) -> None:
    for name, (network, inputs) in loop.task.networks().items():
        print(plan.model_summary(name, network, inputs, loop.config.micro(distributed.world_size())))
    print("dry run: everything up to the first step is in order; nothing was written")


def _open_folder(loop: Loop) -> None:
    loop.folder.open()
    for notice in loop.folder.accept_config(to_tree(loop.config)):
        say(notice)


def _run(loop: Loop, max_steps: int | None) -> int:
    distributed.on_main(lambda: _open_folder(loop))
    if loop.resume() and distributed.is_main():  # refused here, the folder is left as it was
        say(f"resumed at step {loop.step} of {loop.config.steps}")
    distributed.on_main(lambda: loop.folder.save_config(to_tree(loop.config)))
    try:
        loop.folder_status("running")
        loop.run(max_steps)
    except (StoppedBySignal, TrainingHalted):
        raise  # the loop has written the status
    except BaseException as error:
        loop.folder_status("failed", f"{type(error).__name__}: {error}".split("\n")[0], getattr(error, "exit_code", 1))
        raise
    loop.folder_status(
        "finished" if loop.step >= loop.config.steps else "stopped",
        "" if loop.step >= loop.config.steps else "max_steps",
        0,
    )
    if distributed.is_main():
        report = write_report(loop.folder.path, commands=[again(loop.folder.path)])
        say(f"report: {report}")
        say(f"done: step {loop.step} of {loop.config.steps}, {loop.folder.path}")
    return 0
