"""Where a result comes from: versions, hardware and commit."""

import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Versions and hardware, for people: Python, packages, platform, processor, accelerator, git
    commit.
    """
    import torch  # here and below: who asks for --help does not wait for it

    found = {"python": platform.python_version()}
    found |= {
        name: importlib.metadata.version(name) for name in ("torch", "torchvision", "numpy", "lmdb")
    }
    found |= {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        named = getattr(
            torch.get_device_module(accelerator), "get_device_name", lambda: accelerator.type
        )
        found["accelerator"] = f"{torch.accelerator.device_count()} x {named()}"
    git = commit(ROOT)
    return found | ({"commit": git.replace("-dirty", " with local changes")} if git else {})


def versions() -> dict[str, str | None]:
    """What the numbers of a run may depend on, for its checkpoints."""
    import torch
    import torchvision  # the version with its build, as torch's; the report needs no torchvision

    packages = {"torch": str(torch.__version__), "torchvision": str(torchvision.__version__)}
    return {"python": platform.python_version(), **packages, "git": commit(ROOT)}


@cache
def commit(checkout: Path) -> str | None:
    """The commit of a checkout, "-dirty" behind it where tracked files differ from it:
    `0123456789ab-dirty`. None without git or where `checkout` is none; never waits for long.
    """
    # set in git's hooks
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # none of a folder above
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


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
