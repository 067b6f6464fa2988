"""N11: where memory ran out the message names keys that exist, help this task, and are not on yet."""


from typing import Any

import pytest
import torch

from duetgan.training.engine.health import explain
from duetgan.training.engine.tasks import build_run_config

MICRO, HALF = "a smaller --micro-batch (same global batch)", "--precision bf16"
AUTO = "a smaller --micro-batch (same global batch; auto finds one)"
G, D, M = (f"--{name}.activation_checkpointing true" for name in ("generator", "discriminator", "model"))


@pytest.mark.parametrize(
    ("tree", "helps"),
    [
        ({"task": "gan", "precision": "fp32"}, [MICRO, HALF, G, D]),
        ({"task": "gan", "precision": "bf16", "generator": {"activation_checkpointing": True}}, [MICRO, D]),
        ({"task": "gan", "precision": "fp16", "architecture": "dcgan"}, [MICRO]),
        ({"task": "gan", "precision": "fp16", "architecture": "r3gan", "micro_batch": 1}, [G, D]),
        ({"task": "classifier", "precision": "fp32"}, [AUTO, HALF, M]),
        ({"task": "classifier", "precision": "bf16", "micro_batch": "auto"}, [MICRO, M]),
        (
            {"task": "classifier", "precision": "bf16", "micro_batch": 1, "model": {"activation_checkpointing": True}},
            ["smaller networks or images"],
        ),
    ],
)
def test_what_helps_where_memory_ran_out(tree, helps):
    config = build_run_config(tree, [], "x.yaml")
    told: Any = explain(torch.OutOfMemoryError("no"), config, 3, 32)
    assert f" What helps: {', '.join(helps)}; then " in told
    for option in helps:
        if option.endswith(" true"):
            assert build_run_config(tree, option.split(), "x.yaml") != config
