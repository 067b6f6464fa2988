"""Sizes that no memory holds (H12), and what helps where memory ran out (N11)."""

import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from duetgan.commands.train import main
from duetgan.training.base.task import Outline
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine import health, preflight
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.utils.config.recipes import STUDIES
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.machine import total_bytes
from tests.end_to_end.helpers import write_config

CPU = torch.device("cpu")
RECIPES = sorted(path.stem for path in Path("configs").glob("*.yaml") if not path.name.startswith(STUDIES))


def check(tree: Mapping[str, Any], *, memory: int, processes: int = 1, resolution: int = 32) -> Outline:
    """`check_memory` on a machine with `memory` bytes and as many processes; returns the outline."""
    config = build_run_config(dict(tree), [], "x.yaml")
    shape = {"channels": 3, "classes": 10, "resolution": resolution}
    outline = partial(TASKS[config.task].task.outline, config, shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "total_bytes", lambda *_, **__: memory)
        patch.setattr(preflight, "local_processes", lambda: processes)
        preflight.check_memory(config, outline, CPU)
    with torch.device("meta"):
        return outline()


@pytest.mark.parametrize(
    ("task", "options", "told"),
    [
        ("gan", ["--generator.z_dim", "1000000000"], r"generator: .* sizes in this section of the config smaller$"),
        ("gan", ["--discriminator.channel_max=99999999", "--discriminator.channel_base=999999999"], "discriminator"),
        ("classifier", ["--model.head", "hidden", "--model.head-width", str(10**12)], "make the sizes in this section"),
        ("classifier", ["--model.input-size", "1000000000"], "model.input_size 1000000000: must be less than"),
    ],
)
def test_what_cannot_fit_is_refused_in_seconds(tmp_path, packed, task, options, told):
    recipe, began = write_config(tmp_path / "recipe.yaml", task, packed), time.monotonic()
    with pytest.raises(UserError, match=told):
        main(["--config", str(recipe), "--run-dir", str(tmp_path / "run"), "--device", "cpu", *options])
    assert time.monotonic() - began < 20
    assert not (tmp_path / "run").exists()


def test_no_machine_has_so_many_processes():
    with pytest.raises(UserError, match="--procs 1000000000: at least 1, at most 1024 on a machine"):
        main(["--config", "configs/quickstart_gan.yaml", "--procs", "1000000000"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_fit_where_they_are_meant_for(recipe):
    tree = read_yaml(Path("configs") / f"{recipe}.yaml")
    check(tree, memory=16 * 2**30, resolution=tree.get("data", {}).get("resolution") or 32)


@pytest.mark.parametrize("processes", [1, 3])
def test_weights_count_with_what_belongs_to_them(processes):
    tree = {"task": "gan", "generator": {"z_dim": 500_000}}  # its first layer: 0.95 GiB
    networks = check(tree, memory=2**40)
    copies = {"generator": 4, "discriminator": 3}  # weights, gradients, moments (D's first one is 0); an average
    assert {name: count for name, (_, count) in networks.items()} == copies
    least = sum(4 * copies[name] * p.numel() for name, (network, _) in networks.items() for p in network.parameters())
    check(tree, memory=least * processes, processes=processes)
    with pytest.raises(UserError) as refused:
        check(tree, memory=least * processes - 1, processes=processes)
    assert str(refused.value) == (
        f"generator: its weights and what belongs to each need {least / 2**30:.1f} GiB or more, but this machine has "
        f"{least / 2**30:.1f} GiB for a process: make the sizes in this section of the config smaller"
    )


def test_a_classifiers_hidden_layer_counts_with_its_average():
    tree = {"task": "classifier", "model": {"head": "hidden", "head_width": 1000}}
    ((name, (layer, copies)),) = check(tree, memory=2**40).items()
    assert (name, layer.weight.shape, copies) == ("model", (1000, 128), 2)


def test_a_gpu_is_that_of_one_process_and_a_split_network_has_several(monkeypatch):
    gpu, sizes, calls = torch.device("cuda", 0), {"off": 1032, "auto": 1031}, []
    monkeypatch.setattr(preflight, "local_processes", lambda: 4)
    for split, size in sizes.items():
        config: Any = build_run_config({"task": "classifier", "model": {"split": split}}, [], "x.yaml")
        outline = partial(ClassifierTask.outline, config, {})  # a layer of 129 numbers, and its average

        def room(device: torch.device, *, several: bool, size: int = size) -> int:
            calls.append((device, several))
            return size

        monkeypatch.setattr(preflight, "total_bytes", room)
        if split == "off":
            preflight.check_memory(config, outline, gpu)
            continue
        with pytest.raises(UserError, match=r"but the GPU has 0\.0 GiB for a process"):
            preflight.check_memory(config, outline, gpu)
    assert calls == [(gpu, False), (gpu, True)]


def test_a_fault_of_a_network_is_not_called_a_want_of_memory():
    config = build_run_config({"task": "gan"}, [], "x.yaml")

    def outline():
        return torch.zeros(2, 3) @ torch.zeros(2, 3)

    with pytest.raises(RuntimeError, match="reduction dim"):
        preflight.check_memory(config, outline, CPU)


def test_all_the_memory_there_is():
    assert 2**28 < total_bytes(CPU, several=False) < 2**50


@pytest.mark.parametrize(("ranks", "sizes"), [(1, "1 process, at most 24"), (3, "3 processes, at most 8")])
def test_where_memory_ran_out_the_sizes_and_what_helps_are_named(ranks, sizes, monkeypatch):
    monkeypatch.setattr(health.collectives, "world_size", lambda: ranks)
    config = build_run_config({"task": "gan", "precision": "fp32", "batch_size": 24}, [], "x.yaml")
    told: Any = health.explain(torch.OutOfMemoryError("no"), config, 3, 32)
    sizes = f"batch_size 24 over {sizes} samples of 32 px a forward pass, fp32"
    assert told.startswith(f"memory ran out at step 3: {sizes}. What helps: a smaller --micro-batch (same global b")
    growth = {"progressive": {"start": 8, "stable_kimg": 0.096, "fade_kimg": 0.048, "batch_sizes": {8: 48}}}
    config = build_run_config({"task": "gan", "batch_size": 24} | growth, [], "x.yaml")
    for step, size, spec in ((1, 48, "16x8 px"), (2, 24, "32x16 px")):  # those of the stage
        told = health.explain(torch.OutOfMemoryError("no"), config, step, "64x32")
        assert re.search(f"batch_size {size} over .*, at most {size // ranks} samples of {spec} a forward pass", told)
