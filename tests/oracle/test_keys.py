"""Every key of loss, ema, ada, progressive, the optimizers and finetune changes a step; weights weigh linearly."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from duetgan.training.engine.tasks import TASKS
from duetgan.utils.config.model import keys_of
from tests.oracle import test_classifier, test_gan
from tests.oracle.test_classifier import folder as classifier_folder
from tests.oracle.test_gan import folder as gan_folder

__all__ = ["classifier_folder", "gan_folder"]  # fixtures
SECTIONS = ("loss", "ema", "ada", "progressive", "generator_optimizer", "optimizer", "finetune", "unlabelled")
FREE = {"name": "schedulefree-adamw", "schedule": "constant", "warmup_steps": 0}
MUON = {"name": "muon", "lr": 0.02, "schedule": "constant", "warmup_steps": 0}
PLAIN = {"name": "adam", "lr": 0.01, "betas": [0.5, 0.9], "schedule": "constant", "warmup_steps": 0}
COSINE = PLAIN | {"schedule": "cosine"}
MIXED = PLAIN | {"name": "muon-adam"}
STEPPED = PLAIN | {"schedule": "step", "milestones": [1]}
CYCLE = PLAIN | {"schedule": "one-cycle", "pct_start": 0.3, "cycle_start": 0.2, "cycle_momentum": [0.9, 0.5]}
# key -> what it is changed to, and the optimizer that the other keys of its section make
OPTIMIZER: dict[str, tuple[Any, dict[str, Any]]] = {
    **{"name": ("adamw", PLAIN | {"weight_decay": 0.2}), "lr": (0.02, PLAIN), "betas": ([0.1, 0.9], PLAIN)},
    **{"beta2_final": (0.5, PLAIN), "eps": (0.1, PLAIN), "weight_decay": (0.3, PLAIN), "clip_norm": (1e-3, PLAIN)},
    **{"clip_value": (1e-4, PLAIN), "clip_adaptive": (1e-4, PLAIN), "warmup_steps": (5, PLAIN)},
    **{"momentum": (0.2, PLAIN | {"name": "sgd"}), "schedule": ("linear", PLAIN), "hold": (0.5, COSINE)},
    **{"final_lr": (0.7, COSINE), "milestones": ([2], STEPPED), "gamma": (0.7, STEPPED)},
    **{"step_every": (1, PLAIN | {"schedule": "step", "step_every": 2}), "pct_start": (0.8, CYCLE)},
    **{"cycle_start": (0.6, CYCLE), "cycle_momentum": ([0.9, 0.1], CYCLE)},
    "muon_rms": (1.0, MIXED),
}
GAN: dict[str, tuple[Any, str] | tuple[Any, str, dict[str, Any]]] = {  # key -> its other value, tree, what else
    **{f"generator_optimizer.{key}": (value, "everything", base) for key, (value, base) in OPTIMIZER.items()},
    **{"loss.objective": ("hinge", "everything"), "loss.r1_gamma": (2.0, "everything")},
    **{"loss.r2_gamma": (2.0, "everything"), "loss.gamma_final": (0.6, "everything")},
    "loss.same_pairs": (True, "pairs"),
    **{"loss.gradient_penalty_weight": (2.0, "everything"), "loss.r1_interval": (3, "everything")},
    **{"loss.style_mixing": (0.1, "everything"), "loss.mismatch_weight": (2.0, "everything")},
    **{"loss.path_length_weight": (4.0, "everything"), "loss.path_length_interval": (3, "everything")},
    **{"loss.path_length_decay": (0.5, "everything"), "loss.classifier": (None, "everything")},
    **{"loss.classifier_weight": (2.0, "everything"), "loss.auxiliary_weight": (2.0, "everything")},
    **{"loss.auxiliary_fakes": (False, "everything"), "loss.feature_matching_weight": (3.0, "everything")},
    **{"loss.feature_matching_group": (4, "everything"), "ema.ema_kimg": (0.05, "everything")},
    **{"ema.ema_kimg_start": (0.015, "everything"), "ema.ema_rampup": (0.3, "everything")},
    **{"ada.mode": ("fixed", "ada"), "ada.p": (0.8, "ada"), "ada.target": (0.9, "ada"), "ada.kimg": (0.05, "ada")},
    **{"ada.interval": (3, "ada"), "ada.operations": ({"blit": 0.2}, "ada"), "ada.p_final": (0.2, "r3gan")},
    **{"progressive.start": (None, "growing"), "progressive.fade_kimg": (0.08, "growing")},
    **{"progressive.stable_kimg": (0.032, "growing"), "progressive.batch_sizes": ({8: 8}, "growing")},
    "progressive.reset_optimizer": (False, "growing"),
}
GAN_ELSEWHERE = {  # keys that no step of a GAN reads, and why
    "loss.gradients_every": "looks at gradients and changes no update",
    "generator_optimizer.lr_batch_size": "refused for a GAN",
    **dict.fromkeys((f"generator_optimizer.{key}" for key in ("sgd_momentum", "ns_steps", "unit_filters")), "Muon's"),
}
CLASSIFIER: dict[str, tuple[Any, str] | tuple[Any, str, dict[str, Any]]] = {
    **{f"optimizer.{key}": (value, "plain", base) for key, (value, base) in OPTIMIZER.items()},
    **{"optimizer.lr_batch_size": (32, "plain"), "optimizer.sgd_momentum": (0.1, "plain", MUON)},
    **{"optimizer.ns_steps": (1, "plain", MUON), "optimizer.unit_filters": (True, "plain", MUON)},
    **{"loss.kind": ("squared-error", "plain"), "loss.label_smoothing": (0.5, "plain")},
    **{
        "loss.logit_adjustment": (1.0, "plain"),
        "loss.class_weights": ("balanced", "plain"),
        "ema.decay": (0.11, "plain"),
    },
    **{"loss.teacher_share": (0.2, "taught"), "loss.temperature": (1.0, "taught"), "loss.teacher": (None, "taught")},
    **{"finetune.freeze": (["stem"], "fine-tuning"), "finetune.unfreeze": ({"head": 0, "backbone": 1}, "fine-tuning")},
    **{"finetune.freeze_at": ({"head": 1}, "fine-tuning"), "finetune.unfreeze_by": ("epoch", "fine-tuning")},
    **{"finetune.freeze_bn": (True, "plain"), "finetune.stage_lr": ({"head": 0.1}, "fine-tuning")},
    **{"unlabelled.ratio": (2, "unlabelled"), "unlabelled.weight": (0.2, "unlabelled")},
    **{"unlabelled.spread": (0.9, "unlabelled")},
    **{"unlabelled.threshold": (1.0, "sure"), "unlabelled.adaptive": (False, "unlabelled")},
    **{"finetune.layer_decay": (0.2, "fine-tuning"), "finetune.layer_decay_by": ("block", "stages")},
}
CLASSIFIER_ELSEWHERE = {
    "unlabelled.path": "which images: tests/training/classifier/test_readout.py",
    "finetune.cache": "whether what is frozen is computed again: tests/training/classifier/test_frozen.py",
    "finetune.probe": "where the head begins: tests/training/classifier/test_probe.py",
}
CASES = {"gan": (GAN, test_gan), "classifier": (CLASSIFIER, test_classifier)}
Weights = dict[str, torch.Tensor]


def weights_by_step(module: Any, folder: Any, tree: dict[str, Any], steps: int) -> Iterator[Weights]:
    task, loader = module.made(folder, tree)[:2]
    networks = {name: part for name, part in task.registry().items() if hasattr(part, "state_dict")}
    for step in range(steps):
        task.step(loader, step)
        found: Weights = {}
        for name in ("generator", "discriminator", "generator_ema", "model", "model_ema"):
            if name in networks:
                found |= {f"{name}.{key}": value.clone() for key, value in networks[name].state_dict().items()}
        yield found


def changed(tree: dict[str, Any], key: str, value: Any, section: dict[str, Any] | None) -> tuple[Any, Any]:
    """The tree with its section as given, and with the key changed besides."""
    part, _, name = key.partition(".")
    base = tree | {part: section if section is not None else tree.get(part, {})}
    return base, base | {part: base[part] | {name: value}}


@pytest.mark.parametrize("task", CASES)
def test_every_key_has_a_case(task: str) -> None:
    known = {key for key in keys_of(TASKS[task].config()) if key.partition(".")[0] in SECTIONS and "." in key}
    elsewhere = set(GAN_ELSEWHERE if task == "gan" else CLASSIFIER_ELSEWHERE)
    assert known == set(CASES[task][0]) | elsewhere


@pytest.fixture(scope="module")
def bases() -> Any:
    """Weights after each step of a tree; each is trained once."""
    return {}


@pytest.mark.parametrize(("task", "key"), [(task, key) for task, (cases, _) in CASES.items() for key in cases])
def test_every_key_changes_a_step(task: str, key: str, gan_folder: Any, classifier_folder: Any, bases: Any) -> None:
    cases, module = CASES[task]
    value, name, *section = cases[key]
    before, after = changed(module.TREES[name], key, value, section[0] if section else None)
    folder = gan_folder if task == "gan" else classifier_folder
    steps, base = 4, f"{task} {name} {section}"
    if base not in bases:
        bases[base] = list(weights_by_step(module, folder, before, steps))
    others = weights_by_step(module, folder, after, steps)
    assert any(
        name not in first or not torch.equal(first[name], weights)
        for first, other in zip(bases[base], others, strict=True)
        for name, weights in other.items()
    ), key


UNIT = {"name": "sgd", "lr": 1.0, "momentum": 0.0}  # the update is the gradient
WEIGHTS = [key for key in keys_of(TASKS["gan"].config()) if re.fullmatch(r"loss\..*(_weight|_gamma)", key)]


@cache
def gradients(folder: Any, key: str, value: float) -> Weights:
    """Of a step's losses in all parameters, with a weight at a value and the others as in "everything"."""
    loss = test_gan.EVERYTHING | {"gamma_final": None, key: value}
    loss["auxiliary_fakes"] = loss["auxiliary_weight"] > 0
    tree = test_gan.STYLEGAN2 | {"loss": loss, "generator_optimizer": UNIT, "discriminator_optimizer": UNIT}
    task, loader = test_gan.made(folder, tree)
    networks = {"g": task.generator, "d": task.discriminator}
    before = {f"{n}.{k}": p.detach().clone() for n, network in networks.items() for k, p in network.named_parameters()}
    task.step(loader, 0)
    return {f"{n}.{k}": before[f"{n}.{k}"] - p.detach() for n, m in networks.items() for k, p in m.named_parameters()}


@pytest.mark.parametrize("key", WEIGHTS)
def test_a_gradient_is_linear_in_its_weight(gan_folder: Any, key: str) -> None:
    none, one, two = (gradients(gan_folder, key.partition(".")[2], value) for value in (0.0, 0.8, 1.6))
    differences = []
    for name, gradient in one.items():
        start = none.get(name, torch.zeros([]))  # without its weight there is no auxiliary head
        torch.testing.assert_close(two[name] - gradient, gradient - start, rtol=1e-9, atol=1e-10, msg=name)
        differences.append(float((gradient - start).abs().max()))
    assert max(differences) > 1e-6
