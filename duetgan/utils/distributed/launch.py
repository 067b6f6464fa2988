"""Start the processes of `--gpus 0,1` and `--procs N` on this machine.

These are one process for each GPU, or N processes. This module does not import torch, because
`--gpus` must be applied before CUDA starts. Unlike torchrun, the launcher ends with the exit code
of its processes. It forwards signals to all of them; training/engine/signals.py says how they
react. Several machines, or automatic restarts, need torchrun.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from duetgan.utils.distributed.process import (
    SAME,
    child_environment,
    die_with_parent,
    handling,
    obeyed_signals,
    process_state,
    python_arguments,
)
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.machine import cores

# time for the other processes to end by themselves after one has failed
GRACE_SECONDS = 30.0
# set in the environment of the processes: this launcher reports those that a signal kills
LAUNCHED = "DUET_LAUNCHED"
REMEDY = "the same command resumes from the last checkpoint"
AGAIN = "give the same command again"  # for commands that do not resume
MOST_PROCESSES = 1024
# environment variables that select GPUs: of CUDA and ROCm, and of XPU
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def parse_gpus(text: str) -> list[str]:
    """Parse the value of `--gpus`: "0,1" becomes ["0", "1"].

    Raises UserError for anything but distinct numbers.
    """
    gpus = [part.strip() for part in text.split(",")]
    are_numbers = all(part.isascii() and part.isdigit() for part in gpus)
    if not are_numbers or len(set(map(int, gpus))) != len(gpus):
        raise UserError(
            f"--gpus {text}: write distinct device numbers separated by commas, e.g. --gpus 0,1"
        )
    return gpus


def under_launcher() -> bool:
    """Return True if torchrun or Duet's launcher has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def add_options(add: Callable[..., object]) -> None:
    """Add `--gpus` and `--procs` through a parser's `add_argument`."""
    add("--gpus", metavar="0,1", help="GPUs to use, with one process per GPU; not under torchrun")
    add(
        "--procs",
        type=int,
        metavar="N",
        help="number of processes on the CPU (gloo); with --gpus, the total number of processes on "
        "these GPUs; not under torchrun",
    )


def start_processes(
    command: str, argv: Sequence[str], gpus: str | None, procs: int | None, *, resumes: bool
) -> int | None:
    """Start the processes that `--gpus` and `--procs` request, and return their exit code.

    Returns None if this process must do the work itself: only one process is requested, or a
    launcher has started this process. If GPUs are requested, the environment is changed so that
    this process and those that it starts see only these GPUs. Raises UserError for an impossible
    request.

    Args:
        command: the name of the Duet command that the processes run with the arguments `argv`.
        resumes: True if the command continues its work when it is started again.
    """
    devices = parse_gpus(gpus) if gpus else []
    processes = len(devices) or 1 if procs is None else procs
    if not 1 <= processes <= MOST_PROCESSES:
        raise UserError(
            f"--procs {processes}: at least 1, at most {MOST_PROCESSES} on a machine; give as many as it has cores"
        )
    if under_launcher():
        # Duet's launcher passes the options on to the processes.
        differs = gpus is not None or procs not in (None, int(os.environ["WORLD_SIZE"]))
        if LAUNCHED not in os.environ and differs:
            raise UserError(
                "--gpus and --procs: torchrun has started the processes; leave both out, and call it "
                "with --nproc-per-node N and CUDA_VISIBLE_DEVICES=0,1"
            )
        return None
    if devices and len(devices) % processes:
        raise UserError(
            f"--gpus {gpus}: {len(devices)} cannot be shared by --procs {processes}; give a multiple"
        )
    if devices:  # before CUDA starts, here and in the processes below
        os.environ.setdefault(
            "CUDA_DEVICE_ORDER", "FASTEST_FIRST" if os.environ.get(VISIBLE[0]) else "PCI_BUS_ID"
        )
        for name in VISIBLE:
            # A scheduler may have allotted some GPUs.
            allotted = [part for part in os.environ.get(name, "").split(",") if part]
            if allotted and max(map(int, devices)) >= len(allotted):
                raise UserError(
                    f"--gpus {gpus}: {name} has {len(allotted)}, {','.join(allotted)}; count them from 0"
                )
            visible = [allotted[int(gpu)] for gpu in devices] if allotted else devices
            os.environ[name] = ",".join(visible)
    if processes == 1:
        return None
    return launch(python_arguments(command, *argv), processes, resumes=resumes)


def requested_device(device: str | None, gpus: str | None, procs: int | None) -> str | None:
    """Return the device that `--device`, `--gpus` and `--procs` request; None for the default.

    Several processes without GPUs get "cpu". Imports torch if GPUs are requested, and raises
    UserError if they cannot be used; otherwise the CPU would silently replace them.
    """
    if device is not None or not gpus:
        return device or ("cpu" if (procs or 1) > 1 else None)
    import torch

    count = len(parse_gpus(gpus))
    usable = torch.accelerator.device_count()  # among the GPUs in VISIBLE
    refuse(
        (
            not usable,
            f"--gpus {gpus}: no usable GPU of this name here; leave --gpus out, for CPUs give --procs N",
        ),
        (
            usable < count,
            f"--gpus {gpus}: only {usable} of these {count} can be used; nvidia-smi lists what is there",
        ),
    )
    return None  # the accelerator


def launch(command: Sequence[str], processes: int, *, resumes: bool) -> int:
    """Run Python with the arguments `command` as `processes` ranks, and return an exit code.

    The code is that of the first rank that fails, or 0 (see `_wait`). Signals are forwarded to the
    ranks. `resumes` is True if the command continues its work when it is started again.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address, port = probe.getsockname()  # a free port
    world = str(processes)
    threads = str(max(1, cores() // processes))
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
            start_new_session=True,  # a terminal's Ctrl-C reaches the children once, through here
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
    """Wait for all children, and return the exit code of the first one that fails, else 0.

    After a failure the other children have GRACE_SECONDS to end. If a signal killed the failed
    child, a message says so. The code is then 3 if this signal is one of `forwarded`, else 4.
    """
    first: tuple[int, int] | None = None  # number and return code of the first failing child
    failed_at = 0.0
    codes = [child.poll() for child in children]
    while True:
        # A killed child comes first: other children may have failed because it was gone.
        failures = [(code, number) for number, code in enumerate(codes) if code]
        if first is None and failures:
            code, number = min(failures)
            first = number, code
            failed_at = time.monotonic()
        if None not in codes:
            break
        if first is not None:
            late = time.monotonic() - failed_at > GRACE_SECONDS
            for child in children:
                # A stopped process cannot end by itself.
                if late or process_state(child.pid) in ("T", "t"):
                    child.kill()
        time.sleep(0.05)
        codes = [child.poll() for child in children]
    if first is None or first[1] > 0:
        return 0 if first is None else first[1]
    name = signal.Signals(-first[1]).name
    if -first[1] in forwarded:
        when = " before the first step" if resumes else ""
        code, line = 3, f"stopped: {name}{when}; {SAME if resumes else AGAIN}"
    else:
        code, line = (
            4,
            f"error: rank {first[0]} was ended by {name}; {REMEDY if resumes else AGAIN}",
        )
    print(line, file=sys.stderr, flush=True)
    return code
