"""cluster/: the SLURM script under stand-ins of SLURM's commands, and the probes of the Kubernetes manifests."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from duetgan.training.base.config import DistributedConfig
from duetgan.utils.distributed.heartbeat import Heartbeat
from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "cluster" / "slurm.sh"
MANIFEST = REPOSITORY / "cluster" / "trainjob.yaml"
PATIENCE = 240  # seconds

SRUN = """#!/bin/bash
# one node's task, started as srun does: options first, then the command
echo "srun $*" >> {folder}/calls
while [[ $1 == --* ]]; do shift; done
echo $$ > {folder}/task.pid
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> {folder}/calls
[ "$1" != show ] || printf '%s\\n' 127.0.0.1 other
"""
# stands for the interpreter: as torchrun it starts a process and waits for it, and dies of USR1 unless that is ignored
PYTHON = """#!/bin/bash
[ "$1" != -c ] || exec "{python}" "$@"
echo "torchrun $*" >> {folder}/calls
"{python}" {folder}/worker.py &
wait
"""
WORKER = """
import json, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
plan = json.loads((folder / "plan.json").read_text())
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append("SIGUSR1"))
signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
(folder / "ready").touch()
while plan["waits"] and not heard:
    time.sleep(0.01)
if heard:
    status = {{"state": "stopped", "reason": heard[0], "exit_code": 3}}
else:
    status = plan["status"]
if status:
    (folder / "run" / "status.json").write_text(json.dumps(status | {{"time": time.time()}}))
"""


class Cluster:
    """SLURM of one node, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.bin = folder / "bin"
        for path in (self.bin, self.run):
            path.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            (self.bin / name).write_text(text.format(folder=folder, python=sys.executable))
            (self.bin / name).chmod(0o755)
        (folder / "worker.py").write_text(WORKER.format(folder=str(folder)))

    def submit(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        """The job, as its batch shell runs it."""
        slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
        slurm |= {"SLURM_SUBMIT_DIR": str(REPOSITORY), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            env=os.environ | slurm | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pretend(self, *, status: dict[str, Any] | None = None, waits: bool = False) -> "subprocess.Popen[str]":
        """The job, with a stand-in for the training that writes `status`; `waits`: for a signal."""
        (self.folder / "plan.json").write_text(json.dumps({"status": status, "waits": waits}))
        return self.submit("--run-dir", str(self.run), "--seed=1", DUET_PYTHON=str(self.bin / "python"), DUET_PROCS="2")

    def signal(self, signum: signal.Signals) -> None:
        """To the task alone, as SLURM does where it tracks processes by control groups."""
        os.kill(int((self.folder / "task.pid").read_text()), signum)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 4711" in self.calls


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def end(job: "subprocess.Popen[str]") -> int:
    _, errors = job.communicate(timeout=PATIENCE)
    assert "Traceback" not in errors, errors
    return job.returncode


def wait_for(condition: Callable[[], object], job: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_what_is_asked_of_slurm():
    directives = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert {"--signal=USR1@120", "--requeue", "--ntasks-per-node=1", "--open-mode=append"} <= set(directives)
    # sbatch reads directives up to the first command
    assert SCRIPT.read_text().rindex("#SBATCH") < SCRIPT.read_text().index("\nset -")
    subprocess.run(["bash", "-n", SCRIPT], check=True)


def test_a_launcher_on_every_node_meets_at_the_first(cluster):
    assert end(cluster.pretend(status={"state": "finished", "reason": "", "exit_code": 0})) == 0
    launched = next(call for call in cluster.calls if call.startswith("torchrun "))
    for option in ("--nnodes=1", "--nproc-per-node=2", "--rdzv-id=4711", "--rdzv-backend=c10d", "is_host=1"):
        assert option in launched
    assert re.search(r"--rdzv-endpoint=127\.0\.0\.1:2\d{4} ", launched)
    assert launched.endswith(f" train.py --run-dir {cluster.run} --seed=1")
    assert "scontrol show hostnames node[1-2]" in cluster.calls
    assert not cluster.requeued


def test_usr1_reaches_the_processes_and_the_job_queues_itself_again(cluster):
    job = cluster.pretend(waits=True)
    wait_for((cluster.folder / "ready").exists, job)
    task = int((cluster.folder / "task.pid").read_text())
    (launcher,) = map(int, Path(f"/proc/{task}/task/{task}/children").read_text().split())
    os.kill(launcher, signal.SIGUSR1)  # where SLURM signals all processes: the launcher must survive it
    time.sleep(0.2)
    cluster.signal(signal.SIGUSR1)
    assert end(job) == 3
    assert cluster.requeued


@pytest.mark.parametrize(
    ("earlier", "status", "code"),
    [
        (None, {"state": "stopped", "reason": "SIGTERM", "exit_code": 3}, 3),  # scancel
        (None, {"state": "failed", "reason": "memory", "exit_code": 4}, 1),
        ({"state": "stopped", "reason": "SIGUSR1", "exit_code": 3}, None, 1),  # of an earlier job
    ],
)
def test_nothing_else_queues_it_again(cluster, earlier, status, code):
    if earlier:
        (cluster.run / "status.json").write_text(json.dumps(earlier))
    assert end(cluster.pretend(status=status)) == code
    assert not cluster.requeued


def seconds(probe: dict[str, Any]) -> int:
    """How long a probe may fail before the container is ended."""
    return probe["periodSeconds"] * probe["failureThreshold"]


def test_probes_look_at_the_age_of_the_heartbeat(tmp_path):
    runtime, job = yaml.safe_load_all(MANIFEST.read_text())
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    spec = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    started, alive = container["startupProbe"], container["livenessProbe"]
    assert seconds(started) > DistributedConfig().start_timeout

    def passed() -> tuple[bool, bool]:
        probes = (
            subprocess.run(probe["exec"]["command"], env=environment, capture_output=True, check=False)
            for probe in (started, alive)
        )
        first, second = (done.returncode == 0 for done in probes)
        return first, second

    run = tmp_path / "a run"
    environment = os.environ | {"RUN": str(run)}
    assert passed() == (False, True)  # it has not begun, or has ended in good order
    heartbeat = Heartbeat(run, 1, interval=60, parent=None)
    heartbeat.start()
    assert passed() == (True, True)
    os.utime(heartbeat.path, (time.time() - 600, time.time() - 600))
    assert passed() == (False, False)
    heartbeat.stop()
