"""The first minutes on a GPU, in one command: `python -m benchmarks.gpu [--only PART...] [--small] [--json]`.

It runs the tests marked gpu, times steps with CUDA graphs off and on and with the fused kernels off and on, beside what
benchmarks/gpu/expected.json said before, then timm's step and NVIDIA's StyleGAN3 code (--nvidia FOLDER, or in the
bundle), and trains CIFAR-10's GAN in the time left: ten minutes. Parts that are named count the waits for the device,
let a process for each device add up gradients, time the presets, and train other networks (--only waits ranks presets
samples cifar10). OUT/gpu.json and OUT/gpu.html are written after every part, and its figures are printed. Each part is
a process with a time of its own; one that fails, hangs or lacks something leaves the others as they are. No network is
asked: `make gpu-bundle` fills the folder that carries what a machine lacks. Parts that are not asked for (--only) keep
what an earlier start has written.

The exit code is 1 where a part failed or was stopped, 2 without a device.
"""

import json
import platform
import signal
import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import wheels
from benchmarks.gpu.book import Setting
from benchmarks.gpu.page import page, shown
from benchmarks.gpu.parts import FIRST, PARTS, run
from benchmarks.gpu.steps import GIB, device_name
from benchmarks.gpu.trainings import PICTURE
from duetgan.utils.config.cli import Parser, number
from duetgan.utils.errors import UserError
from duetgan.utils.files import as_json, replace_file

MINUTES = 10.0
FAILED = ("failed", "stopped", "interrupted", "left out")
SHORTEST = 5.0  # seconds that a part is started with


def machine(setting: Setting) -> dict[str, Any]:
    """What it ran on."""
    device, git = setting.torch_device, ["git", "-C", str(wheels.ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    found: dict[str, Any] = {"device": setting.device, "device_name": device_name(device)}
    if device.type != "cpu":
        found["devices"] = torch.accelerator.device_count()
        found["memory_gib"] = torch.accelerator.get_memory_info(device)[1] / GIB
    found |= {"small": setting.small, "pretend": setting.maker or "no"}
    found |= {"torch": torch.__version__, "python": platform.python_version(), "system": platform.platform()}
    return found | {"commit": commit or "unknown", "at": datetime.now(UTC).isoformat(timespec="seconds")}


def write(document: dict[str, Any], out: Path) -> None:
    """The JSON and the page."""
    replace_file(out / "gpu.json", as_json(document))
    titles = {name: part.title for name, part in PARTS.items()}
    replace_file(out / "gpu.html", page(document, titles, out / PICTURE).encode())


def flat(document: dict[str, Any]) -> dict[str, Any]:
    """The figures by one name each."""
    found = {f"{name}_state": part["state"] for name, part in document["parts"].items()}
    for name, part in document["parts"].items():
        for row, cells in part["rows"].items():
            found |= {f"{name}_{row.replace(' ', '_')}_{key}": value for key, value in cells.items()}
    return found


def parser() -> Parser:
    options = Parser(prog="benchmarks.gpu", description=__doc__)
    add = options.add_argument
    first = [name for name in FIRST if name in PARTS]
    add("--only", nargs="+", default=first, metavar="PART", help=f"of {', '.join(PARTS)} (default: {' '.join(first)})")
    add("--small", action="store_true", help="tiny forms of all parts, to try the command itself; figures mean nothing")
    add("--device", help="cpu, with --small; default: the machine's accelerator")
    add("--maker", metavar="MODULE", help="of a pretend device: tests.accelerator.maker; goes with --small")
    add("--bundle", type=Path, default=wheels.BUNDLE, metavar="DIR", help="default: build/gpu-bundle")
    add("--data", type=Path, metavar="DIR", help="cifar10-train.lmdb and cifar10-test.lmdb, not the bundle's")
    add("--nvidia", type=Path, metavar="DIR", help="NVIDIA's StyleGAN3 code; default: the bundle's peers/stylegan3")
    add("--out", type=Path, default=wheels.OUT, metavar="DIR", help="default: build/gpu")
    add("--minutes", type=number(float, 0, inner=True), default=MINUTES, help=f"for everything (default: {MINUTES:g})")
    add("--json", action="store_true", help="the last line is one flat JSON object")
    return options


def device_of(options: Any) -> str:
    """The device's type. Raises UserError, in one line, where there is none."""
    if options.device == "cpu":
        if not options.small:
            raise UserError("--device cpu goes with --small: on a CPU only the command itself can be tried")
        return "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        told = f"torch {torch.__version__} finds no accelerator on this machine"
        raise UserError(f"{told}; `--small --device cpu` tries the command itself")
    if options.device not in (None, found.type):
        raise UserError(f"--device {options.device}: this machine's accelerator is {found.type}")
    return found.type


def earlier(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """The parts that an earlier start on the same machine has written."""
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    same = ("device_name", "small", "torch", "commit")
    return before["parts"] if all(before["machine"].get(key) == now[key] for key in same) else {}


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    unknown = [name for name in options.only if name not in PARTS]
    if unknown:
        raise UserError(f"--only {unknown[0]}: choose from {', '.join(PARTS)}")
    setting = Setting(
        out=options.out.resolve(),
        bundle=options.bundle.resolve(),
        device="cpu",
        small=options.small,
        maker=options.maker,
        data=options.data and options.data.resolve(),
        nvidia=options.nvidia and options.nvidia.resolve(),
    )
    with setting.device_made():
        setting = replace(setting, device=device_of(options))
        now = machine(setting)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what there is is written then, too
    before = earlier(setting.out / "gpu.json", now)
    document: dict[str, Any] = {"machine": now, "parts": {}}
    end = time.monotonic() + 60 * options.minutes
    for name, part in PARTS.items():
        if name not in options.only:
            document["parts"] |= {name: before[name]} if name in before else {}
            continue
        left = end - time.monotonic()
        try:
            if left < SHORTEST:
                why = f"the {options.minutes:g} minutes were over"
                document["parts"][name] = {"state": "left out", "seconds": 0.0, "reason": why, "rows": {}}
            else:
                print(f"{name}: at most {min(part.seconds, left):.0f} s", flush=True)
                run(name, setting, min(part.seconds, left), document["parts"])
        finally:
            write(document, setting.out)
        result = document["parts"][name]
        for row, cells in result["rows"].items():
            print(f"    {row}: " + ", ".join(f"{key} {shown(value)}" for key, value in cells.items()))
        print(f"  {result['state']} after {result['seconds']:.0f} s{': ' * bool(result['reason'])}{result['reason']}")
    print(f"{setting.out / 'gpu.html'} and gpu.json")
    if options.json:
        print(json.dumps(flat(document)))
    return int(any(document["parts"][name]["state"] in FAILED for name in options.only))
