import math
from typing import Any

import pytest

from duetgan.training.base.config import CheckpointConfig, EvaluationConfig, LogConfig, RunConfig, SyntheticConfig
from duetgan.training.base.monitors import EarlyStoppingConfig, SpikesConfig
from duetgan.training.classifier.config import ClassifierConfig, ClassifierEmaConfig
from duetgan.training.classifier.loss import ClassifierLossConfig
from duetgan.training.classifier.resizing import ResizingConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.ada import AdaConfig
from duetgan.training.gan.config import GanConfig, GanLossConfig
from duetgan.training.gan.diagnostics import WatchConfig
from duetgan.training.gan.growth import ProgressiveConfig
from duetgan.training.optim.updater import OptimizerConfig
from duetgan.utils.errors import UserError


@pytest.mark.parametrize(
    ("batch", "micro", "world", "share", "passes"),
    [(64, None, 1, 64, 64), (64, None, 4, 16, 16), (64, 8, 4, 16, 8), (64, 999, 4, 16, 16), (6, 1, 3, 2, 1)],
)
def test_shares_and_micro_batches(batch, micro, world, share, passes):
    config = RunConfig(task="x", batch_size=batch, micro_batch=micro)
    assert config.rank_batch(world) == share
    assert config.micro(world) == passes


DRAWN = {"path": "x", "share": 0.5}
FREE = {"name": "schedulefree-adamw"}


def test_only_a_classifier_finds_its_micro_batch_by_itself():
    assert ClassifierConfig(micro_batch="auto", batch_size=64).micro(2) == 32
    with pytest.raises(UserError, match=r"micro_batch auto is for classifiers; give a gan a number"):
        GanConfig(micro_batch="auto")
    config = build_run_config({"task": "classifier"}, ["--micro-batch", "auto"], "f.yaml")
    assert config.micro_batch == "auto"


BAD: dict[Any, list[tuple[str, Any]]] = {  # keys that are named with each of these values
    ProgressiveConfig: [("start", 0), ("start", -8), ("stable_kimg", math.inf)],
    AdaConfig: [
        ("p", 1.1),
        ("p", float("nan")),
        ("p_final", -0.1),
        ("target", 1.0),
        ("kimg", 0.0),
        ("kimg", math.inf),
        ("interval", 0),
    ],
    GanConfig: [("steps", 0), ("batch_size", 0), ("nonfinite_cap", -1)],
    ClassifierConfig: [("micro_batch", 0)],
    LogConfig: [("every", 0), ("samples_every", -1), ("layers_every", 0)],
    CheckpointConfig: [("every", 0), ("keep", 0)],
    EvaluationConfig: [("every", -1), ("n", 1), ("batch_size", 0)],
    EarlyStoppingConfig: [("patience", 0), ("min_delta", -0.1), ("min_delta", math.nan)],
    SpikesConfig: [("factor", 1.0), ("factor", math.inf), ("window", 5), ("limit", 0)],
    GanLossConfig: [("r1_gamma", -0.1), ("r1_interval", -1), ("style_mixing", 1.5)],
    ClassifierLossConfig: [("label_smoothing", 1.0)],
    ClassifierEmaConfig: [("decay", 1.0)],
    OptimizerConfig: [
        ("lr", 0.0),
        ("weight_decay", -1.0),
        ("warmup_steps", -1),
        ("betas", [0.9]),
        ("betas", [0.0, 1.0]),
        ("clip_norm", 0.0),
        ("lr_batch_size", 0),
        ("gamma", 0.0),
        ("pct_start", 1.0),
        ("cycle_start", 0.0),
        ("cycle_momentum", [0.9]),
        ("cycle_momentum", [0.9, 1.0]),
    ],
    WatchConfig: [
        ("warmup_kimg", -1.0),
        ("memory", 0.0),
        ("patience", 0),
        ("worse", 1.0),
        ("norm_factor", 0.5),
        ("diversity_fall", 1.0),
    ],
}


@pytest.mark.parametrize(("config", "key", "value"), [(name, *bad) for name, cases in BAD.items() for bad in cases])
def test_a_value_that_makes_no_sense_is_refused_by_its_key(config, key, value):
    with pytest.raises(UserError, match=rf"^{key}\b"):
        config(**{key: value})


@pytest.mark.parametrize(
    ("config", "bad", "problem"),
    [
        (GanConfig, {"discriminator_optimizer": {"name": "muon"}}, "muon is for classifiers: take adam"),
        (
            GanConfig,
            {"generator_optimizer": FREE | {"betas": [0.9, 0.99]}},
            "schedule-free optimizers are for classif",
        ),
        (GanConfig, {"data": {"synthetic": DRAWN | {"weight": 0.5}}}, r"data\.synthetic\.weight is of a classifier's"),
        (GanConfig, {"data": {"synthetic": DRAWN}, "progressive": {"start": 8}}, r"set progressive\.start to null"),
        (ClassifierConfig, {"early_stopping": {"patience": 1}, "evaluation": {"every": 0}}, r"set evaluation\.every"),
        (LogConfig, {"layers": ["fc"], "tensorboard": False}, "TensorBoard, which is off"),
        (CheckpointConfig, {"keep_every": 250}, "^keep_every 250: must be a multiple of checkpoint.every 500"),
        (SyntheticConfig, {"path": "x"}, r"share is not set; give the share of each batch"),
        (SyntheticConfig, {"share": 0.5}, r"has settings but no images; give data\.synthetic\.path"),
        (SyntheticConfig, {"path": "x", "share": 1.5}, r"^share 1\.5: must be less than or equal to 1"),
        (SyntheticConfig, DRAWN | {"weight": -1.0}, r"^weight -1\.0: must be greater than or equal to 0"),
        (SyntheticConfig, DRAWN | {"checkpoint": "y"}, r"path and checkpoint are both set"),
        (SyntheticConfig, DRAWN | {"until": 2.5}, r"until 2\.5: give a share of the steps, up to 1, or a whole step"),
        (OptimizerConfig, {"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value"),
        (OptimizerConfig, {"clip_adaptive": 0.0}, "clip_adaptive 0.0: must be greater than 0"),
        (OptimizerConfig, {"clip_value": -1.0}, "clip_value -1.0: must be greater than 0"),
        (OptimizerConfig, {"schedule": "step"}, "needs milestones, .* step_every"),
        (OptimizerConfig, {"schedule": "step", "milestones": [3], "step_every": 2}, "needs milestones, .* step_every"),
        (OptimizerConfig, {"milestones": [3, 2]}, "rising"),
        (OptimizerConfig, {"milestones": [0]}, r"milestones\[0\] 0: must be greater than 0"),
        (OptimizerConfig, {"name": "sgd", "momentum": 0.0, "cycle_momentum": [0.9, 0.8]}, "momentum is 0"),
        (OptimizerConfig, {"name": "muon", "momentum": 0.0, "cycle_momentum": [0.9, 0.8]}, "changes a momentum"),
        (OptimizerConfig, {"name": "muon", "ns_steps": 100}, "^ns_steps 100"),
        (OptimizerConfig, {"name": "sgd", "beta2_final": 0.99}, "Adam's; leave it out with sgd"),
        (OptimizerConfig, FREE | {"beta2_final": 0.99}, "beta2_final is Adam's"),
        (OptimizerConfig, FREE | {"schedule": "cosine"}, "set schedule constant"),
        (OptimizerConfig, FREE | {"betas": [0.0, 0.99]}, "the first of betas above 0"),
        (OptimizerConfig, {"name": "schedulefree-sgd", "momentum": 0.0}, "needs momentum above 0"),
        (AdaConfig, {"operations": {"color": 1.0}}, "group 'color' is unknown \\(did you mean 'colour'\\?\\)"),
        (AdaConfig, {"operations": {"colour": 1.5}}, r"^operations.colour 1.5"),
        (AdaConfig, {"mode": "fixed"}, "fixed with p 0"),
        (AdaConfig, {"mode": "scheduled"}, "p_final 0"),
        (AdaConfig, {"mode": "adaptive", "operations": {}}, "adaptive without operations"),
        (AdaConfig, {"mode": "adaptive", "operations": {"blit": 0.0}}, "adaptive without operations"),
        (ProgressiveConfig, {"start": 4}, r"^start 4: must be greater than or equal to 8"),
        (ProgressiveConfig, {"start": 24}, r"^start 24: must be a power of two"),
        (ProgressiveConfig, {"fade_kimg": -1.0}, r"^fade_kimg -1\.0: must be greater than or equal to 0"),
        (ProgressiveConfig, {"stable_kimg": {8: -2}}, r"^stable_kimg\.8 -2"),
        (ProgressiveConfig, {"batch_sizes": {16: 0}}, r"^batch_sizes\.16 0: must be greater than 0"),
        (WatchConfig, {"margin_low": (0.2, 0.1)}, "^margin_low 0.2, 0.1"),
        (WatchConfig, {"margin_high": (1.0, 2.0)}, "^margin_high 1.0, 2.0"),
        (ResizingConfig, {"initial_scale": 0.0}, r"^initial_scale 0\.0: must be greater than 0"),
        (ResizingConfig, {"initial_scale": 1.5}, r"^initial_scale 1\.5: must be less than or equal to 1"),
        (ResizingConfig, {"delay_fraction": -0.1}, r"^delay_fraction -0\.1: must be greater than or equal to 0"),
        (ResizingConfig, {"finetune_fraction": 0}, r"^finetune_fraction 0.*: must be greater than 0"),
        (ResizingConfig, {"delay_fraction": 0.9, "finetune_fraction": 0.2}, r"finetune_fraction 0\.2: together they"),
        (ClassifierLossConfig, {"class_weights": {"a": -1.0}}, r"^class_weights\.a -1.0: must be greater than or"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(config, bad, problem):
    with pytest.raises(UserError, match=problem):
        config(**bad)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({}, r"f.yaml: has no key 'task'; tasks are gan, classifier"),
        ({"task": "clasifier"}, r"f.yaml: task 'clasifier' is unknown \(did you mean 'classifier'\?\)"),
        *(({"task": name}, r"f.yaml: task .* is unknown") for name in (3, ["gan"], {"gan": 1})),
        ({"task": "gan", "model": {}}, r"f.yaml: unknown key 'model'"),
        ({"task": "classifier", "generator": {"z_dim": 3}}, r"f.yaml: unknown key 'generator"),
    ],
)
def test_other_tasks_are_refused(tree, told):
    with pytest.raises(UserError, match=told):
        build_run_config(tree, [], "f.yaml")
