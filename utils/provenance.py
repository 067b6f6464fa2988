"""Where a result comes from: versions, hardware and commit, as text for reports and summaries."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """Versions and hardware, for people: Python, packages, platform, processor, accelerator, git commit."""
    found = {"python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in ("torch", "torchvision", "numpy", "lmdb")}
    found |= {"platform": platform.platform(), "processor": _processor(), "cores": str(os.cpu_count())}
    if torch.cuda.is_available():
        found["accelerator"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit:
        found["commit"] = commit + (" with local changes" if _git("status", "--porcelain") else "")
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    """The output of a git command on this checkout; empty where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
