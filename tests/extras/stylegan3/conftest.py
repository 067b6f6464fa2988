"""NVIDIA's files of StyleGAN3, from what benchmarks/stylegan3_parity.py --fixture wrote with NVIDIA's own classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stylegan3_parity import fill
from duetgan.extras.official import convert
from tests.extras.official import layouts

# 2026-11-29, NVlabs/stylegan3 on the CPU: shapes, filters, and pixels of the first sample (seed 100) in fp32
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())
T, R = GOLDEN


def write(path: Path, case: str, **changes: Any) -> dict[str, Any]:
    """Write NVIDIA's file of a case with other tensors or arguments, and return the generator's tensors."""
    golden = GOLDEN[case]
    tensors = {
        name: torch.eye(3) if name.endswith("transform") else torch.zeros(shape)
        for name, shape in golden["shapes"].items()
    }
    fill(tensors)
    tensors |= {name: torch.tensor(values) for name, values in golden["filters"].items()}
    arguments = golden["arguments"] | {"mapping_kwargs": {}}
    for name, value in changes.items():
        (tensors if name in tensors else arguments)[name] = value
    classes = arguments["c_dim"]
    critic = layouts.nvidia_discriminator(classes=classes)
    d = layouts.D_ARGUMENTS | {"c_dim": classes}
    layouts.write_nvidia(path, generator=tensors, average=tensors, discriminator=critic, g=arguments, d=d)
    return tensors


@pytest.fixture(scope="package")
def donors(tmp_path_factory):
    """Run folders of the converted files by case."""
    folder = tmp_path_factory.mktemp("stylegan3")
    runs = {}
    for number, case in enumerate(GOLDEN):
        write(folder / f"{number}.pkl", case)
        runs[case] = folder / f"run-{number}"
        assert convert.main([str(folder / f"{number}.pkl"), str(runs[case])]) == 0
    return runs
