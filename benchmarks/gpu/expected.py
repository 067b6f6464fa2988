"""What was written down before a run: milliseconds of a step by recipe, variant and GPU, and the roofline's.

`python -m benchmarks.predictions --expected` writes expected.json, on a CPU.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("expected.json")


def of(recipe: str, variant: str, device_name: str) -> dict[str, float]:
    """`predicted_ms`, and `roofline_ms`, of the GPU whose name is part of the device's; {} for an unknown one."""
    steps: dict[str, Any] = json.loads(FILE.read_text())["steps"] if FILE.is_file() else {}
    gpus = steps.get(recipe, {}).get(variant, {})
    return next((values for gpu, values in gpus.items() if gpu in device_name), {})
