import pytest

from models.stylegan2 import DiscriminatorConfig
from training.base.config import CheckpointConfig, EvaluationConfig, LogConfig, RunConfig
from training.classifier.config import ClassifierConfig, ClassifierEmaConfig
from training.classifier.loss import ClassifierLossConfig
from training.engine.tasks import build_run_config
from training.gan.config import GanConfig, GanLossConfig
from training.optim.updater import OptimizerConfig
from utils.errors import UserError


@pytest.mark.parametrize(
    ("batch", "micro", "world", "share", "passes"),
    [
        (64, None, 1, 64, 64),
        (64, None, 4, 16, 16),
        (64, 8, 4, 16, 8),
        (64, 999, 4, 16, 16),
        (6, 1, 3, 2, 1),
        (64, 5, 2, 32, 5),
    ],
)
def test_shares_and_micro_batches(batch, micro, world, share, passes):
    config = RunConfig(task="x", batch_size=batch, micro_batch=micro)
    assert config.share(world) == share
    assert config.micro(world) == passes


ALONE = DiscriminatorConfig(minibatch_std_group=1)


def test_batches_that_cannot_be_shared_name_the_divisor():
    with pytest.raises(UserError, match=r"batch_size 64 cannot be shared by 3 processes; make it a multiple of 3"):
        RunConfig(task="x", batch_size=64).share(3)


def test_only_a_classifier_finds_its_micro_batch_by_itself():
    assert ClassifierConfig(micro_batch="auto", batch_size=64).micro(2) == 32
    with pytest.raises(UserError, match=r"micro_batch auto is for classifiers; give a gan a number"):
        GanConfig(micro_batch="auto")
    config = build_run_config({"task": "classifier"}, ["--micro-batch", "auto"], "f.yaml")
    assert config.micro_batch == "auto"


def test_every_forward_pass_holds_whole_groups():
    def check(config, world_size):
        config.check_batches(config.stages(32), world_size)

    check(GanConfig(batch_size=32), 8)
    with pytest.raises(UserError, match=r"minibatch_std_group 4 does not divide the 2 samples .* multiple of 4"):
        check(GanConfig(batch_size=32), 16)
    with pytest.raises(UserError, match="minibatch_std_group 4 does not divide the 2 samples"):
        check(GanConfig(batch_size=32, micro_batch=2), 1)
    matching = GanLossConfig(feature_matching_weight=1.0, feature_matching_group=8)
    with pytest.raises(UserError, match="feature_matching_group 8 does not divide the 4 samples"):
        check(GanConfig(batch_size=32, micro_batch=4, loss=matching), 1)
    with pytest.raises(UserError, match="path_length_weight"):
        check(GanConfig(batch_size=4, loss=GanLossConfig(path_length_weight=2.0), discriminator=ALONE), 4)


@pytest.mark.parametrize(
    ("config", "bad", "named"),
    [
        (GanConfig, {"steps": 0}, "steps"),
        (GanConfig, {"batch_size": 0}, "batch_size"),
        (GanConfig, {"nonfinite_cap": -1}, "nonfinite_cap"),
        (ClassifierConfig, {"micro_batch": 0}, "micro_batch"),
        (LogConfig, {"every": 0}, "^every "),
        (LogConfig, {"samples_every": -1}, "^samples_every "),
        (CheckpointConfig, {"every": 0}, "^every "),
        (CheckpointConfig, {"keep": 0}, "^keep "),
        (EvaluationConfig, {"every": -1}, "^every "),
        (EvaluationConfig, {"n": 1}, "^n "),
        (EvaluationConfig, {"batch_size": 0}, "^batch_size "),
        (GanLossConfig, {"r1_gamma": -0.1}, "r1_gamma"),
        (GanLossConfig, {"r1_interval": -1}, "r1_interval"),
        (GanLossConfig, {"style_mixing": 1.5}, "style_mixing"),
        (ClassifierLossConfig, {"label_smoothing": 1.0}, "^label_smoothing "),
        (ClassifierEmaConfig, {"decay": 1.0}, "^decay "),
        (OptimizerConfig, {"lr": 0.0}, "lr"),
        (OptimizerConfig, {"weight_decay": -1.0}, "weight_decay"),
        (OptimizerConfig, {"warmup_steps": -1}, "warmup_steps"),
        (OptimizerConfig, {"betas": [0.9]}, "betas"),
        (OptimizerConfig, {"betas": [0.0, 1.0]}, "betas"),
        (OptimizerConfig, {"clip_norm": 0.0}, "clip_norm"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(config, bad, named):
    with pytest.raises(UserError, match=named):
        config(**bad)


def test_the_task_chooses_the_config():
    config = build_run_config({"task": "gan", "batch_size": 8}, ["--seed", "3"], "f.yaml")
    assert isinstance(config, GanConfig)
    assert (config.batch_size, config.seed) == (8, 3)
    assert isinstance(build_run_config({"task": "classifier"}, [], "f.yaml"), ClassifierConfig)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({}, r"f.yaml: has no key 'task'; tasks are gan, classifier"),
        ({"task": "clasifier"}, r"f.yaml: unknown task 'clasifier' \(did you mean 'classifier'\?\)"),
        ({"task": 3}, r"f.yaml: unknown task 3"),
        ({"task": "gan", "model": {}}, r"f.yaml: unknown key 'model'"),
        ({"task": "classifier", "generator": {"z_dim": 3}}, r"f.yaml: unknown key 'generator"),
    ],
)
def test_other_tasks_are_refused(tree, told):
    with pytest.raises(UserError, match=told):
        build_run_config(tree, [], "f.yaml")


@pytest.mark.parametrize("task", [["gan"], {"gan": 1}])
def test_a_task_that_is_no_name_is_refused(task):
    with pytest.raises(UserError, match="unknown task"):
        build_run_config({"task": task}, [], "f.yaml")


def test_defaults_of_the_papers():
    config = GanConfig()
    for optimizer in (config.generator_optimizer, config.discriminator_optimizer):
        assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.eps) == ("adam", 0.0025, [0.0, 0.99], 1e-8)
    assert (config.loss.r1_interval, config.loss.style_mixing) == (16, 0.9)
    assert (config.generator.mapping_lr_multiplier, config.generator.w_avg_beta) == (0.01, 0.995)
    assert config.discriminator.minibatch_std_group == 4
    assert config.ema.ema_rampup == 0.05
