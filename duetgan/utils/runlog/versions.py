"""The versions, the hardware and the commit that a result was made with."""

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def environment() -> dict[str, str]:
    """Return the versions of software, and the hardware, as text for people.

    The keys are python, torch and other packages, platform, processor and cores; also accelerator
    and commit (of git) if there are any.
    """
    import torch  # here and below, so that --help need not wait for it

    result = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "numpy", "lmdb"):
        result[package] = importlib.metadata.version(package)
    result["platform"] = platform.platform()
    result["processor"] = platform.processor() or platform.machine()
    result["cores"] = str(os.cpu_count())
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        device_name = getattr(
            torch.get_device_module(accelerator), "get_device_name", lambda: accelerator.type
        )
        result["accelerator"] = f"{torch.accelerator.device_count()} x {device_name()}"
    if git := commit(ROOT):
        result["commit"] = git.replace("-dirty", " with local changes")
    return result


def versions() -> dict[str, str | None]:
    """Return the versions that a checkpoint records, because a run's numbers may depend on them.

    The keys are python, torch, torchvision and git (Duet's commit).
    """
    import torch
    import torchvision  # its version has the build's suffix, unlike the package metadata

    packages = {"torch": str(torch.__version__), "torchvision": str(torchvision.__version__)}
    return {"python": platform.python_version(), **packages, "git": commit(ROOT)}


@cache
def commit(checkout: Path) -> str | None:
    """Return the git commit of a checkout, such as `0123456789ab`.

    `-dirty` is appended if tracked files have changed. Returns None if git is missing, fails or
    takes more than 5 s, or if `checkout` is not a repository.
    """
    # git's hooks set variables that would redirect the command to another repository.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # The ceiling keeps git from finding a repository in a parent folder.
    clean |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    command = [
        "git",
        "-C",
        str(checkout),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(
            command, env=clean, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() or None
