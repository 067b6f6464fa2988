"""The packages that a machine with torch lacks: found in the lock file, fetched here, installed there. Until they are
installed nothing can be imported but Python's own modules, so this file imports no others.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "build" / "gpu-bundle"
OUT = ROOT / "build" / "gpu"
# what images with PyTorch bring along; `HAS=FILE`, the machine's own `pip list`, says it better
IMAGE = [
    "absl-py",
    "contourpy",
    "cycler",
    "filelock",
    "fonttools",
    "fsspec",
    "grpcio",
    "jinja2",
    "kiwisolver",
    "markdown",
    "markupsafe",
    "matplotlib",
    "mpmath",
    "networkx",
    "numpy",
    "opencv-python-headless",
    "packaging",
    "pillow",
    "protobuf",
    "pyparsing",
    "python-dateutil",
    "pyyaml",
    "safetensors",
    "scipy",
    "setuptools",
    "six",
    "sympy",
    "tensorboard",
    "tensorboard-data-server",
    "torch",
    "torchvision",
    "tqdm",
    "triton",
    "typing-extensions",
    "werkzeug",
    "iniconfig",
    "pluggy",
    "pygments",
    "pytest",
    "pytest-timeout",
]
SPARED = ("av", "waitress", "werkzeug")  # films and the explorer, which no part needs
TOOLS = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "pygments")  # of the developers' lock
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34")


class Unusable(Exception):
    """What the machine lacks cannot be had; the message says it in one line."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_in(text: str) -> set[str]:
    """The packages of `pip list` or `pip freeze`, or of plain names."""
    firsts = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line.strip()) for line in text.splitlines())
    return {canonical(first[0]) for first in firsts if first} - {"package"}


def wanted(has: Collection[str], python: str) -> list[str]:
    """What a Linux machine with these packages and this Python lacks: `name==version` of the lock files."""
    from packaging.requirements import Requirement

    place = {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux"}
    place |= {"python_version": python, "python_full_version": f"{python}.99"}
    found = {}
    for file in ("requirements.lock", "requirements-dev.lock"):
        for line in (ROOT / file).read_text().splitlines():
            if not line or line.lstrip().startswith("#"):
                continue
            pin = Requirement(line)
            name = canonical(pin.name)
            cuda = name.startswith(("nvidia-", "cuda-")) or name in ("torch", "triton")
            needed = file == "requirements.lock" or name in TOOLS
            there = pin.marker is None or pin.marker.evaluate(place)
            if needed and there and not cuda and name not in SPARED and name not in has:
                found[name] = f"{name}{pin.specifier}"
    return sorted(found.values())


def fetch(pins: Iterable[str], python: str, folder: Path) -> None:
    """Download these wheels for that Python on Linux. Raises Unusable, with pip's last line."""
    pins = list(pins)
    if not pins:
        return
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    done = subprocess.run([*command, "-d", str(folder), *pins], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"pip could not fetch the wheels for Python {python}: {last_line(done.stderr)}")


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def lacking(folder: Path) -> list[Path]:
    """The wheels in a folder whose packages are not installed here."""
    there = {canonical(name) for each in importlib.metadata.distributions() if (name := each.metadata["Name"])}
    return [path for path in sorted(folder.glob("*.whl")) if canonical(path.name.split("-")[0]) not in there]


def install(folder: Path, site: Path) -> None:
    """Put the wheels that this machine lacks into `site` and `site` on the path, of processes below too. Raises
    Unusable where pip refuses one or torch is missing.
    """
    if site.is_dir():  # an earlier start has made it
        _use(site)
    missing = lacking(folder)
    if missing:
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
        command += ["--no-deps", "--upgrade", "--target", str(site), *map(str, missing)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            told = f"{folder}: pip cannot install it here ({last_line(done.stderr)})"
            raise Unusable(f"{told}; fill the bundle with PY={version}")
        _use(site)
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise Unusable("torch is not installed here, and no bundle carries it: install it first") from None


def _use(site: Path) -> None:
    site = site.resolve()
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
