"""Start one process per GPU, or N on the CPU, on this machine: what `--gpus 0,1` and `--procs N`
do.

Imports no torch: `--gpus` must be applied before CUDA starts. The exit code is the processes' own,
which torchrun's is not; torchrun itself works as well, for several machines or restarts.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn

from duetgan.utils.errors import StoppedBySignal, UserError
from duetgan.utils.memory import cores
from duetgan.utils.script import (
    child_environment,
    die_with_parent,
    leave_imports,
    process_state,
    python_arguments,
)

# what the others get to leave by themselves once one process has ended with an error
GRACE_SECONDS = 30.0
# set in the processes: this launcher tells the user which of them was killed
LAUNCHED = "DUET_LAUNCHED"
REMEDY = "the same command resumes from the last checkpoint"
SAME = "nothing was lost, the same command resumes"
AGAIN = "give the same command again"  # for what does not resume
MOST_PROCESSES = 1024
# what CUDA and ROCm look at, and what XPU does
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object], signals: Iterable[signal.Signals]
) -> Iterator[None]:
    """Inside the block these signals go to `handler`."""
    before = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, former in before.items():
            signal.signal(signum, former)


def leaving_on_signals() -> AbstractContextManager[None]:
    """While training does not listen (at its start and end), SIGTERM, SIGUSR1 and SIGHUP raise
    StoppedBySignal.
    """

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        message = f"{signal.Signals(signum).name}; {SAME}"
        leave_imports(frame, f"stopped: {message}", StoppedBySignal.exit_code)
        raise StoppedBySignal(message)

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    return handling(
        leave, [signum for signum in signals if signal.getsignal(signum) is signal.SIG_DFL]
    )


def parse_gpus(text: str) -> list[str]:
    """`"0,1"` -> `["0", "1"]`; raises UserError for anything but distinct device numbers."""
    gpus = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in gpus) or len(
        set(map(int, gpus))
    ) != len(gpus):
        raise UserError(
            f"--gpus {text}: write distinct device numbers separated by commas, e.g. --gpus 0,1"
        )
    return gpus


def under_launcher() -> bool:
    """Whether this process is one of several already (torchrun's or ours)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def obeyed_signals() -> list[signal.Signals]:
    """STOP_SIGNALS, but SIGHUP where it was ignored before this process started, as nohup does.
    Other ignored ones are obeyed: shells ignore SIGINT for background jobs, and cluster/slurm.sh
    ignores SIGUSR1 for torchrun.
    """
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signum for signum in STOP_SIGNALS if not (deaf and signum == signal.SIGHUP)]


def add_options(add: Callable[..., object]) -> None:
    """`--gpus` and `--procs`, for a parser's `add_argument`."""
    add("--gpus", metavar="0,1", help="GPUs to use, one process each; not under torchrun")
    add(
        "--procs",
        type=int,
        metavar="N",
        help="processes on the CPU (gloo), or to share the --gpus; under torchrun its own number only",
    )


def start_processes(
    command: str, argv: Sequence[str], gpus: str | None, procs: int | None, *, resumes: bool = True
) -> int | None:
    """Start the processes that `--gpus` and `--procs` ask for, of a command of Duet, and return
    their exit code.

    None: this process is to do the work, alone or as one of them; it sees the GPUs named. UserError
    for what cannot be.
    """
    devices = parse_gpus(gpus) if gpus else []
    processes = len(devices) or 1 if procs is None else procs
    if not 1 <= processes <= MOST_PROCESSES:
        raise UserError(
            f"--procs {processes}: at least 1, at most {MOST_PROCESSES} on a machine; give as many as it has cores"
        )
    # torchrun; our launcher hands the options on
    if under_launcher() and LAUNCHED not in os.environ:
        world = os.environ["WORLD_SIZE"]
        if gpus is not None:
            raise UserError(
                f"--gpus {gpus}: torchrun has started the processes; leave --gpus out and call it with "
                f"--nproc-per-node N and CUDA_VISIBLE_DEVICES={gpus}"
            )
        if procs is not None and str(procs) != world:
            raise UserError(
                f"--procs {procs}: torchrun has started {world} process{'es' * (world != '1')}; leave --procs out, "
                "its --nproc-per-node says how many"
            )
    if devices and len(devices) % processes:
        raise UserError(
            f"--gpus {gpus}: {len(devices)} cannot be shared by --procs {processes}; give a multiple"
        )
    if under_launcher():
        return None
    if devices:  # before CUDA starts, here and in the processes below
        os.environ.setdefault(
            "CUDA_DEVICE_ORDER", "FASTEST_FIRST" if os.environ.get(VISIBLE[0]) else "PCI_BUS_ID"
        )
        for name in VISIBLE:
            # by a scheduler
            allotted = [part for part in os.environ.get(name, "").split(",") if part]
            if allotted and max(map(int, devices)) >= len(allotted):
                raise UserError(
                    f"--gpus {gpus}: {name} has {len(allotted)}, {','.join(allotted)}; count them from 0"
                )
            os.environ[name] = (
                ",".join(allotted[int(gpu)] for gpu in devices) if allotted else ",".join(devices)
            )
    if processes == 1:
        return None
    return launch(python_arguments(command, *argv), processes, resumes=resumes)


def wanted_device(device: str | None, gpus: str | None, procs: int | None) -> str | None:
    """What `--device` would say: it, or what `--gpus` and `--procs` ask for, so that nothing
    replaces it in silence.

    Imports torch where GPUs are named. Raises UserError where they cannot be used.
    """
    if device is not None or not gpus:
        return device or ("cpu" if (procs or 1) > 1 else None)
    import torch

    # of those, as VISIBLE names them
    count, usable = len(parse_gpus(gpus)), torch.accelerator.device_count()
    if not usable:
        raise UserError(
            f"--gpus {gpus}: no usable GPU of this name here; leave --gpus out, for CPUs give --procs N"
        )
    if usable < count:
        raise UserError(
            f"--gpus {gpus}: only {usable} of these {count} can be used; nvidia-smi lists what is there"
        )
    return None  # the accelerator


def launch(command: Sequence[str], processes: int, *, resumes: bool = True) -> int:
    """Run `python command...` as `processes` ranks, forward signals, return the first failing
    rank's exit code or 0. `resumes`: what is done goes on where it ended if it is started again.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address, port = probe.getsockname()  # one that is free
    world, threads = str(processes), str(max(1, cores() // processes))
    common = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    common |= {LAUNCHED: "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    children = [
        subprocess.Popen(
            [sys.executable, *command],
            env=child_environment() | common | {"RANK": str(index), "LOCAL_RANK": str(index)},
            start_new_session=True,  # a terminal's Ctrl-C reaches the children once, through us
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        for index in range(processes)
    ]

    forwarded: list[int] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        forwarded.append(signum)
        for child in children:
            if child.poll() is None:
                child.send_signal(signum)

    with handling(forward, obeyed_signals()):
        return _wait(children, forwarded, resumes)


def _wait(children: list[subprocess.Popen[bytes]], forwarded: list[int], resumes: bool) -> int:
    """The first failing child's exit code (4 for a killed one, which is reported when all have
    ended), else 0. A child that a `forwarded` signal has ended had not begun to train: 3.
    """
    failed_at: float | None = None
    code, killed, running = 0, "", True
    while running:
        running = None in [child.poll() for child in children]
        # of those that ended since the last look a killed one comes first: the others left because
        # it was gone
        for index, child in sorted(
            enumerate(children), key=lambda one: (one[1].returncode or 0) >= 0
        ):
            if failed_at is None and child.returncode not in (None, 0):
                failed_at = time.monotonic()
                code = child.returncode if child.returncode > 0 else 4
                if -child.returncode in forwarded:
                    when = " before the first step" if resumes else ""
                    code, killed = 3, f"stopped: {signal.Signals(-child.returncode).name}{when}"
                elif child.returncode < 0:
                    killed = (
                        f"error: rank {index} was ended by {signal.Signals(-child.returncode).name}"
                    )
        if failed_at is not None:
            late = time.monotonic() - failed_at > GRACE_SECONDS
            for child in children:
                # who is stopped cannot leave by itself
                if late or process_state(child.pid) in ("T", "t"):
                    child.kill()
        time.sleep(0.05)
    if killed:
        remedy = AGAIN if not resumes else REMEDY if code == 4 else SAME
        print(f"{killed}; {remedy}", file=sys.stderr, flush=True)
    return code
