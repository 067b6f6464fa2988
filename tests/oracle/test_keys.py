"""Every key of both tasks changes a step, or a file named here says what else it does; weights weigh linearly."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from duetgan.training.engine.tasks import TASKS
from duetgan.utils.config.model import keys_of
from duetgan.utils.errors import UserError
from tests.conftest import REPOSITORY
from tests.oracle import test_classifier, test_gan
from tests.oracle.test_classifier import folder as classifier_folder
from tests.oracle.test_gan import folder as gan_folder

__all__ = ["classifier_folder", "gan_folder"]  # fixtures
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
    **{
        "beta2_final": (0.5, PLAIN),
        "eps": (0.1, PLAIN),
        "weight_decay": (0.3, PLAIN),
        "clip_norm": (1e-3, PLAIN),
    },
    **{"clip_value": (1e-4, PLAIN), "clip_adaptive": (1e-4, PLAIN), "warmup_steps": (5, PLAIN)},
    **{"momentum": (0.2, PLAIN | {"name": "sgd"}), "schedule": ("linear", PLAIN), "hold": (0.5, COSINE)},
    **{"final_lr": (0.7, COSINE), "milestones": ([2], STEPPED), "gamma": (0.7, STEPPED)},
    **{"step_every": (1, PLAIN | {"schedule": "step", "step_every": 2}), "pct_start": (0.8, CYCLE)},
    **{"cycle_start": (0.6, CYCLE), "cycle_momentum": ([0.9, 0.1], CYCLE)},
    "muon_rms": (1.0, MIXED),
}
GAN: dict[str, tuple[Any, str] | tuple[Any, str, dict[str, Any]]] = {  # key -> its other value, tree, what else
    **{f"generator_optimizer.{key}": (value, "shared", base) for key, (value, base) in OPTIMIZER.items()},
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
    **{
        "ada.mode": ("fixed", "ada"),
        "ada.p": (0.8, "ada"),
        "ada.target": (0.9, "ada"),
        "ada.kimg": (0.05, "ada"),
    },
    **{"ada.interval": (3, "ada"), "ada.operations": ({"blit": 0.2}, "ada"), "ada.p_final": (0.2, "r3gan")},
    **{"progressive.start": (None, "growing"), "progressive.fade_kimg": (0.08, "growing")},
    **{"progressive.stable_kimg": (0.032, "growing"), "progressive.batch_sizes": ({8: 8}, "growing")},
    "progressive.reset_optimizer": (False, "growing"),
}
CLAMPED = {"conv_clamp": 0.5, "clamp_always": True}
SIZES: dict[str, tuple[Any, dict[str, Any]]] = {  # of either network of StyleGAN2
    **{
        "channel_base": (32, {}),
        "channel_max": (4, {}),
        "conv_clamp": (0.1, CLAMPED),
        "clamp_always": (False, CLAMPED),
    },
}
NETWORK = {"channel_base": 64, "channel_max": 8}
GENERATOR = {"z_dim": 8, "w_dim": 8, "mapping_layers": 2} | NETWORK
GAN |= {
    **{f"generator.{key}": (value, "shared", GENERATOR | base) for key, (value, base) in SIZES.items()},
    **{f"discriminator.{key}": (value, "shared", NETWORK | base) for key, (value, base) in SIZES.items()},
    **{f"discriminator_optimizer.{key}": (value, "shared", base) for key, (value, base) in OPTIMIZER.items()},
    **{
        "generator.z_dim": (4, "shared"),
        "generator.w_dim": (4, "shared"),
        "generator.mapping_layers": (1, "shared"),
    },
    **{"generator.mapping_lr_multiplier": (0.1, "shared"), "generator.w_avg_beta": (0.5, "shared")},
    **{"discriminator.architecture": ("plain", "shared"), "discriminator.minibatch_std_group": (4, "shared")},
    **{
        "discriminator.minibatch_std_order": ("strided", "shared"),
        "discriminator.mapping_layers": (1, "shared"),
    },
    **{"schedule_kimg": (0.02, "hinge"), "batch_size": (4, "shared")},
    **{"seed": (6, "shared"), "steps": (5, "r3gan"), "augment.flip": (True, "shared")},
    **{"augment.shift": (2, "shared"), "augment.shift_edge": ("reflect", "shared", {"shift": 2})},
    **{"augment.trivial_augment": (True, "shared"), "augment.erase": (0.9, "shared")},
}
BOTH_ELSEWHERE = {  # keys that no step of a tree reads, and the tests that know them
    "task": "tests/training/base/test_config.py",
    "imports": "tests/end_to_end/test_documented_commands.py",
    "init_from": "tests/end_to_end/test_transfer.py",
    "micro_batch": "no change: tests/oracle/test_gan.py",
    **dict.fromkeys(("precision", "threads", "deterministic"), "tests/training/engine/test_hardware.py"),
    "compile": "tests/training/engine/test_speed.py",
    "channels_last": "tests/training/classifier/test_frozen.py",
    "graphs": "tests/accelerator/test_graphs.py",
    "nonfinite_cap": "tests/end_to_end/test_train_kill_resume.py",
    "data.path": "tests/training/base/test_data.py",
    "data.val_path": "tests/training/base/test_data.py",
    "data.workers": "tests/training/base/test_data.py",
    "data.prefetch": "tests/data/reading/test_dataset_damage.py",
    **dict.fromkeys(("data.synthetic.path", "data.synthetic.checkpoint"), "tests/training/base/test_generated.py"),
    "augment.own": "tests/data/augment/test_transforms.py",
    **dict.fromkeys((f"log.{key}" for key in ("every", "samples_every", "tensorboard")), "tests/end_to_end/helpers.py"),
    "log.tracker": "tests/extras/trackers/test_trackers.py",
    **dict.fromkeys(("log.layers", "log.layers_every"), "tests/training/engine/test_layer_log.py"),
    **dict.fromkeys(("checkpoint.every", "checkpoint.keep"), "tests/training/engine/test_checkpoints.py"),
    **dict.fromkeys(("checkpoint.keep_every", "checkpoint.asynchronous"), "tests/training/engine/test_checkpoints.py"),
    "evaluation.every": "tests/training/engine/test_tasks.py",
    **dict.fromkeys((f"evaluation.{key}" for key in ("n", "extractor", "batch_size")), "tests/oracle/test_gan.py"),
    "evaluation.weights": "test_an_evaluation_has_its_weights below",
    **dict.fromkeys((f"early_stopping.{key}" for key in ("patience", "min_delta")),
                     "tests/training/base/test_stopping.py"),
    **dict.fromkeys((f"spikes.{key}" for key in ("action", "metric", "factor", "window", "limit")),
                    "tests/training/engine/test_rollback.py"),
    "distributed.start_timeout": "tests/test_cluster.py",
    "distributed.timeout": "tests/faults/test_process_faults.py",
    "distributed.compress": "tests/accelerator/ranks/cases.py",
    "distributed.check_every": "tests/training/classifier/test_probe.py",
}  # fmt: skip
GAN_ELSEWHERE = {  # keys that no step of a GAN reads, and why
    "loss.gradients_every": "looks at gradients and changes no update",
    "architecture": "other sections: tests/oracle/test_gan.py",
    "kernels": "tests/models/test_fused.py",
    "conditional": "another tree: tests/oracle/test_gan.py",
    **{f"{part}.{key}": f"tests/models/test_{file}.py" for part in ("generator", "discriminator")
       for key, file in (("activation_checkpointing", "activation_checkpointing"), ("fp16_resolutions", "fp16"))},
    **dict.fromkeys((f"data.{key}" for key in
                      ("resolution", "crop", "crop_area", "crop_aspect", "sampling", "class_rates")),
                    "one config for both tasks: the classifier's cases"),
    **dict.fromkeys((f"data.synthetic.{key}" for key in ("share", "weight", "until", "balance")),
                    "one config for both tasks: the classifier's cases"),
    **dict.fromkeys((key for key in keys_of(TASKS["gan"].config()) if key.startswith("watch.")),
                     "tests/training/gan/test_diagnostics.py"),
    "discriminator_optimizer.lr_batch_size": "refused for a GAN",
    "generator_optimizer.lr_batch_size": "refused for a GAN",
    **{f"{part}_optimizer.{key}": "Muon's" for part in ("generator", "discriminator")
       for key in ("sgd_momentum", "ns_steps", "unit_filters")},
}  # fmt: skip
CLASSIFIER: dict[str, tuple[Any, str] | tuple[Any, str, dict[str, Any]]] = {
    **{f"optimizer.{key}": (value, "plain", base) for key, (value, base) in OPTIMIZER.items()},
    **{"optimizer.lr_batch_size": (32, "plain"), "optimizer.sgd_momentum": (0.1, "plain", MUON)},
    **{"optimizer.ns_steps": (1, "plain", MUON), "optimizer.unit_filters": (True, "plain", MUON)},
    **{"loss.kind": ("squared-error", "plain"), "loss.label_smoothing": (0.5, "plain")},
    **{"loss.label_smoothing_final": (0.9, "plain"), "loss.focal_gamma": (0.5, "focal"), "loss.gce_q": (1.0, "gce")},
    **{
        "loss.logit_adjustment": (1.0, "plain"),
        "loss.class_weights": ("balanced", "plain"),
        "ema.decay": (0.11, "plain"),
    },
    **{
        "loss.teacher_share": (0.2, "taught"),
        "loss.temperature": (1.0, "taught"),
        "loss.teacher": (None, "taught"),
    },
    **{
        "finetune.freeze": (["stem"], "fine-tuning"),
        "finetune.unfreeze": ({"head": 0, "backbone": 1}, "fine-tuning"),
    },
    **{"finetune.freeze_at": ({"head": 1}, "fine-tuning"), "finetune.unfreeze_by": ("epoch", "fine-tuning")},
    **{"finetune.freeze_bn": (True, "plain"), "finetune.stage_lr": ({"head": 0.1}, "fine-tuning")},
    **{"unlabelled.ratio": (2, "unlabelled"), "unlabelled.weight": (0.2, "unlabelled")},
    **{"unlabelled.spread": (0.9, "unlabelled")},
    **{"unlabelled.threshold": (1.0, "sure"), "unlabelled.adaptive": (False, "unlabelled")},
    **{"finetune.layer_decay": (0.2, "fine-tuning"), "finetune.layer_decay_by": ("block", "stages")},
}
SHARED = {"path": "synthetic.lmdb", "share": 0.4}
RANDOM = {"crop": "random"}
MIXING = {"mixup": 0.7, "cutmix": 1.0}
SMALLER = {"initial_scale": 0.5, "delay_fraction": 0.2, "finetune_fraction": 0.2}
CLASSIFIER |= {
    **{"data.resolution": (8, "plain"), "data.crop": ("random", "plain")},
    "data.crop_area": ([0.2, 0.3], "plain", RANDOM),
    **{"data.crop_aspect": ([1.0, 3.0], "plain", RANDOM), "data.sampling": ("balanced", "plain")},
    **{"data.class_rates": ({"b": 9.0}, "plain"), "data.synthetic.share": (0.8, "weighed")},
    **{"data.synthetic.weight": (0.9, "weighed")},
    **{"data.synthetic.balance": ("fill", "weighed"), "seed": (6, "plain"), "batch_size": (4, "plain")},
    **{"steps": (5, "plain"), "model.name": ("convnext_tiny", "plain"), "model.stem": ("small", "plain")},
    **{"model.head": ("hidden", "plain"), "model.normalise": ("imagenet", "plain")},
    **{"model.head_width": (7, "plain", {"head": "hidden"}), "model.input_size": (32, "plain")},
    "model.readout_stages": (1, "plain", {"head": "readout"}),
    "model.readout_parts": (2, "plain", {"head": "readout"}),
    **{"augment.flip": (True, "plain"), "augment.shift": (2, "plain")},
    **{"augment.shift_edge": ("reflect", "plain", {"shift": 2}), "augment.trivial_augment": (True, "plain")},
    **{"augment.erase": (0.9, "plain"), "augment.mixup": (0.2, "plain", MIXING)},
    "augment.cutmix": (0.2, "plain", MIXING),
    "augment.mix_prob": (0.5, "plain", MIXING),
    **{f"resizing.{key}": (value, "plain", SMALLER)
       for key, value in (("initial_scale", 1.0), ("delay_fraction", 0.0), ("finetune_fraction", 0.8))},
}  # fmt: skip
CLASSIFIER_ELSEWHERE = {
    "sync_bn": "tests/distributed/worker.py",
    "model.he_strides": "tests/models/test_backbones.py",
    "model.inplace": "tests/models/test_classifier.py",
    "model.activation_checkpointing": "tests/models/test_activation_checkpointing.py",
    "model.discriminator": "tests/extras/few_labels/test_discriminator.py",
    "model.split": "tests/extras/model_parallel/test_training.py",
    "model.weights": "tests/models/test_weights.py",
    "model.classes": "another number is refused: tests/faults/test_data_faults.py",
    "data.synthetic.until": "tests/training/base/test_synthetic.py",
    "unlabelled.path": "which images: tests/extras/few_labels/test_unlabelled.py",
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
    if not name:
        return tree, tree | {key: value}
    base = tree | {part: section if section is not None else tree.get(part, {})}
    return base, base | {part: changed(base[part], name, value, None)[1]}


@pytest.mark.parametrize("task", CASES)
def test_every_key_has_a_case(task):
    keys = list(keys_of(TASKS[task].config()))
    known = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    elsewhere = BOTH_ELSEWHERE | (GAN_ELSEWHERE if task == "gan" else CLASSIFIER_ELSEWHERE)
    assert known == (set(CASES[task][0]) | set(elsewhere))
    for key, reason in elsewhere.items():
        for file in re.findall(r"tests/\S+\.py", reason):
            assert re.search(rf"\b{key.rpartition('.')[2]}\b", (REPOSITORY / file).read_text()), (key, file)


@pytest.fixture(scope="module")
def bases():
    """Weights after each step of a tree; each is trained once."""
    return {}


@pytest.mark.parametrize(("task", "key"), [(task, key) for task, (cases, _) in CASES.items() for key in cases])
def test_every_key_changes_a_step(task, key, gan_folder, classifier_folder, bases):
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


def test_an_evaluation_has_its_weights(gan_folder):
    tree = test_gan.STYLEGAN2 | {"evaluation": {"extractor": "resnet50", "weights": "nowhere.pth"}}
    with pytest.raises(UserError, match=r"nowhere\.pth: no such file"):
        test_gan.made(gan_folder, tree)


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
def test_a_gradient_is_linear_in_its_weight(gan_folder, key):
    none, one, two = (gradients(gan_folder, key.partition(".")[2], value) for value in (0.0, 0.8, 1.6))
    differences = []
    for name, gradient in one.items():
        start = none.get(name, torch.zeros([]))  # without its weight there is no auxiliary head
        torch.testing.assert_close(two[name] - gradient, gradient - start, rtol=1e-9, atol=1e-10, msg=name)
        differences.append(float((gradient - start).abs().max()))
    assert max(differences) > 1e-6
