"""Start one process per GPU, or N on the CPU, on this machine, for `--gpus 0,1` and `--procs N`.

Does not import torch, because `--gpus` must be applied before CUDA starts. The exit code is that of
the processes, unlike torchrun's. torchrun works as well, for several machines or restarts. A signal
is forwarded to all processes, and training/engine/signals.py says what they do with it.
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
    """Return `["0", "1"]` for `"0,1"`. Raises UserError for anything but distinct numbers."""
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
    add("--gpus", metavar="0,1", help="GPUs to use, with one process each; not under torchrun")
    add(
        "--procs",
        type=int,
        metavar="N",
        help="number of processes: on the CPU (gloo), or with --gpus in total on these GPUs; not under "
        "torchrun",
    )


def start_processes(
    command: str, argv: Sequence[str], gpus: str | None, procs: int | None, *, resumes: bool = True
) -> int | None:
    """Start the processes of a Duet command that `--gpus` and `--procs` request; return their exit
    code.

    Returns None if this process does the work itself, alone or as one of several; it then sees only
    the requested GPUs. Raises UserError for an impossible request.
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
    """Return the device of `--device`, or the one that `--gpus` and `--procs` imply.

    Raises UserError if the requested GPUs cannot be used, so that no other device replaces them.
    Imports torch if GPUs are requested.
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


def launch(command: Sequence[str], processes: int, *, resumes: bool = True) -> int:
    """Run `python command...` as `processes` ranks and forward signals to them.

    Returns the first failing rank's exit code, or 0. `resumes` is True if the command continues its
    work when it is started again.
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
    """Return the first failing child's exit code, else 0.

    The code is 4 if a signal killed the child, which is reported after all children have ended. It
    is 3 if that was a `forwarded` signal, which ends a child that has not begun to train.
    """
    first: tuple[int, int] | None = None  # number and return code of the first failing child
    failed_at = 0.0
    codes = [child.poll() for child in children]
    while True:
        # A killed child comes first, because others that ended since then left for its absence.
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
