"""Two nodes on one machine: network namespaces joined by a veth pair, which see the same files and no other network.

Needs the right to make namespaces (root, CAP_NET_ADMIN) and iproute2.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.faults.torchrun import torchrun

PORT = 29471  # in the namespaces every port is free
INTERFACE = "duet0"


def ip(*arguments: str) -> str:
    """iproute2's `ip`; raises CalledProcessError."""
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@dataclass
class Node:
    """One of them: its namespace, its address, and what runs there."""

    namespace: str
    address: str
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def train(
        self, config: Path, run: Path, *more: str, host: "Node", log: Path, options: tuple[str, ...] = (), **env: str
    ) -> "subprocess.Popen[str]":
        """torchrun with one process here; `host` keeps the rendezvous. Quick to see what is lost."""
        quick = f"is_host={int(host is self)},last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=5"
        process = torchrun(
            config,
            run,
            *more,
            options=[
                "--nnodes=1:2",
                "--nproc-per-node=1",
                "--max-restarts=3",
                "--monitor-interval=0.1",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={host.address}:{PORT}",
                f"--rdzv-conf={quick}",
                "--rdzv-id=duet",
                f"--local-addr={self.address}",
                *options,
            ],
            prefix=["ip", "netns", "exec", self.namespace],
            log=log,
            GLOO_SOCKET_IFNAME=INTERFACE,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # docs/scaling.md: without it, a node that comes later ends the run
            **env,
        )
        self.processes.append(process)
        return process

    def keep_store(self) -> "Node":
        """A store apart from torchrun, as docs/scaling.md has it, in this namespace; `host` of every node's `train`."""
        document = (REPOSITORY / "docs" / "scaling.md").read_text()
        program = document.partition('python -c "')[2].partition('"\n')[0].replace("\n    ", "\n")
        program = program.replace("29400", str(PORT))
        assert "TCPStore" in program
        prefix = ["ip", "netns", "exec", self.namespace]
        self.processes.append(subprocess.Popen([*prefix, sys.executable, "-c", program], text=True))
        return Node("", self.address)

    def pids(self) -> list[int]:
        """Of all processes that run here."""
        try:
            return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]
        except subprocess.CalledProcessError:  # it is gone
            return []

    def lose(self) -> None:
        """kill -9 of all that runs here, the launcher first, as if the power had failed."""
        for process in self.processes:
            process.kill()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def unplug(self) -> None:
        """Take its end of the cable out."""
        ip("-n", self.namespace, "link", "set", INTERFACE, "down")


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Both, joined. Nothing of them is left afterwards. Skips the test where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip (iproute2) on this machine")
    nodes = tuple(Node(f"duet-{os.getpid()}-{end}", f"10.77.0.{end}") for end in (1, 2))
    first, second = nodes
    try:
        try:
            for node in nodes:
                ip("netns", "add", node.namespace)
            peer = ("peer", "name", INTERFACE, "netns", second.namespace)
            ip("-n", first.namespace, "link", "add", INTERFACE, "type", "veth", *peer)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for node in nodes:
            ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                ip("-n", node.namespace, "link", "set", interface, "up")
        yield first, second
    finally:
        for node in nodes:
            node.lose()
            subprocess.run(["ip", "netns", "delete", node.namespace], capture_output=True, check=False)
