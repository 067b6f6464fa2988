import math

import pytest

from duetgan.training.base.config import CheckpointConfig, DataConfig, LogConfig, RunConfig, SyntheticConfig
from duetgan.training.base.monitors import SpikesConfig
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.loss import ClassifierLossConfig
from duetgan.training.classifier.resizing import ResizingConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.ada import AdaConfig
from duetgan.training.gan.config import GanConfig, config_of
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
    assert config.spans("96x64") == [(0, 64, batch)]


def test_a_trial_has_the_batch_that_is_timed_and_nothing_that_ends_or_interrupts_it():
    section = {"every": 7, "n": 50}
    more = {"init_from": "a run", "evaluation": section, "early_stopping": {"patience": 3}}
    tree = {"task": "gan", "batch_size": 64, "micro_batch": 8, "steps": 90, "log": {"every": 9}, "seed": 4} | more
    config = build_run_config(tree | {"progressive": {"start": 8, "fade_kimg": 1.0}}, [], "f.yaml")
    left = {key: tree[key] for key in ("task", "micro_batch", "log", "seed")}
    assert config.for_trial(16) == build_run_config(left | {"batch_size": 16, "steps": 1090}, [], "f.yaml")
    config = build_run_config(tree | {"task": "classifier", "micro_batch": "auto"}, [], "f.yaml")
    left |= {"task": "classifier", "batch_size": 16, "steps": 1090, "micro_batch": None}
    assert config.for_trial(16) == build_run_config(left, [], "f.yaml")


DRAWN = {"path": "x", "share": 0.5}
FREE = {"name": "schedulefree-adamw"}


def test_only_a_classifier_finds_its_micro_batch_by_itself():
    assert ClassifierConfig(micro_batch="auto", batch_size=64).micro(2) == 32
    with pytest.raises(UserError, match=r"micro_batch auto is for classifiers; give a gan a number"):
        GanConfig(micro_batch="auto")
    config = build_run_config({"task": "classifier"}, ["--micro-batch", "auto"], "f.yaml")
    assert config.micro_batch == "auto"


@pytest.mark.parametrize(
    ("config", "bad", "problem"),
    [
        (GanConfig, {"discriminator_optimizer": {"name": "muon"}}, "muon is for classifiers: take adam"),
        (GanConfig, {"generator_optimizer": {"name": "muon"}}, "muon is for classifiers"),
        (
            GanConfig,
            {"discriminator_optimizer": FREE | {"betas": [0.9, 0.99]}},
            "schedule-free optimizers are for classif",
        ),
        (GanConfig, {"conditional": False, "loss": {"classifier": "x"}}, r"false: loss\.classifier needs the classes"),
        (GanConfig, {"conditional": False, "loss": {"auxiliary_weight": 1}}, r"false: loss\.auxiliary_weight needs"),
        (GanConfig, {"loss": {"same_pairs": True}}, "same_pairs: the nonsaturating objective has no pairs"),
        (config_of("dcgan"), {"loss": {"style_mixing": 0.1}}, "dcgan has no styles"),
        (
            GanConfig,
            {"generator_optimizer": FREE | {"betas": [0.9, 0.99]}},
            "schedule-free optimizers are for classif",
        ),
        (GanConfig, {"data": {"synthetic": DRAWN | {"weight": 0.5}}}, r"data\.synthetic\.weight is of a classifier's"),
        (GanConfig, {"data": {"synthetic": DRAWN}, "progressive": {"start": 8}}, r"set progressive\.start to null"),
        (ClassifierConfig, {"early_stopping": {"patience": 1}, "evaluation": {"every": 0}}, r"set evaluation\.every"),
        (ClassifierConfig, {"compile": "on", "model": {"split": "auto"}}, "compile on cannot be combined with model.s"),
        (DataConfig, {"crop_area": (0.5, 0.3)}, "^crop_area 0.5, 0.3: the first must be at most the second"),
        (DataConfig, {"crop_area": (0.5, 0.5), "crop_aspect": (2.0, 0.5)}, "^crop_aspect 2.0, 0.5: the first must be"),
        (LogConfig, {"layers": ["fc"], "tensorboard": False}, "TensorBoard, which is off"),
        (CheckpointConfig, {"keep_every": 250}, "^keep_every 250: must be a multiple of checkpoint.every 500"),
        (SyntheticConfig, {"path": "x"}, r"share is not set; give the share of each batch"),
        (SyntheticConfig, {"share": 0.5}, r"has settings but no images; give data\.synthetic\.path"),
        (SyntheticConfig, DRAWN | {"checkpoint": "y"}, r"path and checkpoint are both set"),
        (SyntheticConfig, DRAWN | {"until": 2.5}, r"until 2\.5: give a share of the steps, up to 1, or a whole step"),
        (OptimizerConfig, {"clip_value": 1.0, "clip_adaptive": 1.0}, "clip_value and clip_adaptive are given"),
        (OptimizerConfig, {"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value are given"),
        (OptimizerConfig, {"betas": [0.9]}, "betas .0.9.: must be two numbers"),
        (GanConfig, {"steps": 0}, "^steps 0: must be greater than 0"),
        (AdaConfig, {"p": math.nan}, "^p nan"),
        (SpikesConfig, {"factor": math.inf}, "^factor inf"),
        (OptimizerConfig, {"schedule": "step"}, "needs milestones, .* step_every"),
        (OptimizerConfig, {"schedule": "step", "milestones": [3], "step_every": 3}, "and not both"),
        (OptimizerConfig, {"milestones": [3, 2]}, "rising"),
        (OptimizerConfig, {"milestones": [0]}, r"milestones\[0\] 0: must be greater than 0"),
        (OptimizerConfig, {"name": "sgd", "momentum": 0.0, "cycle_momentum": [0.9, 0.8]}, "momentum is 0"),
        (OptimizerConfig, {"name": "sgd", "beta2_final": 0.99}, "Adam's; leave it out with sgd"),
        (OptimizerConfig, FREE | {"schedule": "cosine"}, "set schedule constant"),
        (OptimizerConfig, FREE | {"betas": [0.0, 0.99]}, "the first of betas above 0"),
        (OptimizerConfig, {"name": "schedulefree-sgd", "momentum": 0.0}, "needs momentum above 0"),
        (AdaConfig, {"operations": {"color": 1.0}}, "group 'color' is unknown \\(did you mean 'colour'\\?\\)"),
        (AdaConfig, {"operations": {"colour": 1.5}}, r"^operations.colour 1.5"),
        (AdaConfig, {"mode": "fixed"}, "fixed with p 0"),
        (AdaConfig, {"mode": "scheduled"}, "p_final 0"),
        (AdaConfig, {"mode": "adaptive", "operations": {}}, "adaptive without operations"),
        (ProgressiveConfig, {"start": 24}, r"^start 24: must be a power of two"),
        (ProgressiveConfig, {"stable_kimg": {8: -2}}, r"^stable_kimg\.8 -2"),
        (ProgressiveConfig, {"batch_sizes": {16: 0}}, r"^batch_sizes\.16 0: must be greater than 0"),
        (WatchConfig, {"margin_low": (0.2, 0.1)}, "^margin_low 0.2, 0.1: .* at most the"),
        (WatchConfig, {"margin_high": (1.0, 2.0)}, "^margin_high 1.0, 2.0: .* at least the"),
        (ResizingConfig, {"initial_scale": 1.5}, r"^initial_scale 1\.5: must be less than or equal to 1"),
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
