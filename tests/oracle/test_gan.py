"""The GAN's task equals the reference: each key of loss, ema, ada, progressive and the optimizers away from neutral."""

from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.models.gan import generate
from duetgan.training.base.data import make_loader
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.task import GanTask
from tests.distributed.test_oracle import CLASSES, untrained_classifier
from tests.oracle.gan import GanReference
from tests.oracle.ranks import assert_close, of_two_ranks, whole

CPU = torch.device("cpu")
State = dict[str, torch.Tensor]
ADAM = {
    **{"name": "adam", "lr": 0.01, "betas": [0.2, 0.9], "beta2_final": 0.99, "eps": 1e-3, "weight_decay": 0.02},
    **{"clip_norm": 0.7, "warmup_steps": 2, "schedule": "cosine", "hold": 0.2, "final_lr": 0.3},
}
ADAMW = {
    **{"name": "adamw", "lr": 0.02, "betas": [0.0, 0.95], "beta2_final": 0.9, "eps": 1e-4},
    **{"weight_decay": 0.1, "clip_value": 0.05, "schedule": "linear", "final_lr": 0.5},
}
SGD = {
    **{"name": "sgd", "lr": 0.05, "momentum": 0.6, "weight_decay": 0.01, "schedule": "step"},
    "milestones": ["0.3ep", "0.4ep"],  # 1.25 and 1.67 updates
}
CYCLE = {
    **{"name": "adam", "lr": 0.03, "betas": [0.5, 0.9], "eps": 1e-3, "schedule": "one-cycle", "pct_start": 0.25},
    **{"cycle_start": 0.2, "final_lr": 0.1, "cycle_momentum": [0.9, 0.4], "clip_adaptive": 0.05},
}
COMMON: dict[str, Any] = {
    **{"task": "gan", "batch_size": 12, "steps": 10, "seed": 5},
    "ema": {"ema_kimg": 0.02, "ema_kimg_start": 0.004, "ema_rampup": 0.9},
    "generator_optimizer": ADAM,
    "discriminator_optimizer": ADAMW,
}
STYLEGAN2: dict[str, Any] = COMMON | {
    "generator": {"z_dim": 8, "w_dim": 8, "mapping_layers": 2, "channel_base": 64, "channel_max": 8},
    "discriminator": {"channel_base": 64, "channel_max": 8, "minibatch_std_group": 2},
}
EVERYTHING: dict[str, Any] = {
    **{"objective": "nonsaturating", "r1_gamma": 0.7, "r2_gamma": 0.3, "gamma_final": 0.2, "r1_interval": 2},
    **{"gradient_penalty_weight": 0.4},
    **{"style_mixing": 0.6, "mismatch_weight": 0.5, "path_length_weight": 1.5, "path_length_interval": 2},
    **{"path_length_decay": 0.2, "classifier": "classifier", "classifier_weight": 0.4, "auxiliary_weight": 0.3},
    **{"auxiliary_fakes": True, "feature_matching_weight": 0.6, "feature_matching_group": 2},
}
PAIRS = EVERYTHING | {"objective": "relativistic", "mismatch_weight": 0.0}
ADAPTIVE = {"mode": "adaptive", "p": 0.4, "target": -0.2, "kimg": 0.1, "interval": 2}
OPERATIONS = {"operations": {"blit": 0.9, "colour": 0.5, "noise": 0.3}}
# one pass of D serves both players where nothing else needs it
SHARED = {"r1_gamma": 0.7, "r1_interval": 2, "style_mixing": 0.6, "mismatch_weight": 0.5, "auxiliary_weight": 0.3}
ONE_PAIR = {"objective": "relativistic", "mismatch_weight": 0.0, "r2_gamma": 0.3, "same_pairs": True}
NO_STYLES = {"style_mixing": 0.0, "path_length_weight": 0.0}
R3 = {"width": 8, "cardinality": 2, "blocks": 1}
GROWTH = {"start": 8, "fade_kimg": 0.031, "stable_kimg": 0.013, "batch_sizes": {8: 16}}
SMALL = {key: STYLEGAN2[key] for key in ("task", "batch_size", "steps", "seed", "generator")}
TREES: dict[str, dict[str, Any]] = {
    "everything": STYLEGAN2 | {"loss": EVERYTHING},
    "pairs": STYLEGAN2
    | {"loss": PAIRS, "generator_optimizer": CYCLE, "discriminator_optimizer": SGD}
    | {"augment": {"flip": True, "shift": 1}},
    "hinge": STYLEGAN2
    | {"loss": EVERYTHING | {"objective": "hinge", "feature_matching_group": 3}, "generator_optimizer": SGD}
    | {"schedule_kimg": 0.055, "data": {"sampling": "balanced"}}  # 4.6 updates
    | {"ada": {"mode": "scheduled", "p": 0.1, "p_final": 0.7}},
    "wasserstein": STYLEGAN2
    | {"loss": EVERYTHING | {"objective": "wasserstein"}, "discriminator_optimizer": CYCLE}
    | {"data": {"class_rates": {"b": 3.0}}},
    "unconditional": STYLEGAN2
    | {"loss": EVERYTHING | {"classifier": None, "auxiliary_weight": 0.0, "auxiliary_fakes": False}}
    | {"conditional": False},
    "defaults": SMALL | {"discriminator": {"channel_base": 64, "channel_max": 8}},
    "shared": STYLEGAN2 | {"loss": SHARED, "ema": {}, "schedule_kimg": 0.055},
    "shared-fakes": STYLEGAN2 | {"loss": SHARED | {"auxiliary_fakes": True}, "ema": {"ema_rampup": None}},
    # its groups would mix images and samples if both were in one pass
    "pairs-strided": STYLEGAN2
    | {"loss": SHARED | ONE_PAIR | {"same_pairs": False}}
    | {"discriminator": STYLEGAN2["discriminator"] | {"minibatch_std_order": "strided"}},
    "shared-pairs": STYLEGAN2 | {"loss": SHARED | ONE_PAIR},
    "same-pairs": STYLEGAN2 | {"loss": PAIRS | {"same_pairs": True}},
    "apart": STYLEGAN2 | {"loss": EVERYTHING | {"gradients_every": 2}},
    "ada": STYLEGAN2 | {"loss": EVERYTHING, "ada": ADAPTIVE | OPERATIONS},
    # its average has no ramp, and p moves faster
    "transfer": STYLEGAN2
    | {"loss": SHARED, "init_from": "another", "ada": {"mode": "adaptive", "p": 0.4, "interval": 2}},
    "ada-fixed": STYLEGAN2 | {"loss": SHARED, "ada": {"mode": "fixed", "p": 0.6}},
    "growing": STYLEGAN2 | {"loss": EVERYTHING, "progressive": GROWTH},
    "growing-on": STYLEGAN2
    | {"loss": SHARED, "progressive": GROWTH | {"reset_optimizer": False}, "ada": ADAPTIVE}
    | {"ema": {"ema_rampup": None}, "schedule_kimg": 0.068},  # 5.3 updates, one of another batch
    "r3gan": COMMON
    | {"architecture": "r3gan", "generator": R3 | {"z_dim": 8}, "discriminator": R3, "loss": PAIRS | NO_STYLES}
    | {"ada": {"mode": "scheduled", "p": 0.1, "p_final": 0.7}},
    "r3gan-hinge": COMMON
    | {"architecture": "r3gan", "generator": R3 | {"z_dim": 8}, "discriminator": R3, "ada": {"mode": "off"}}
    | {"seed": 6}  # with 5 an activation lies on a kink
    | {"loss": EVERYTHING | NO_STYLES | {"objective": "hinge"}},
    "dcgan": COMMON
    | {"architecture": "dcgan", "generator": {"z_dim": 8, "width": 4}, "discriminator": {"width": 4}}
    | {"loss": EVERYTHING | NO_STYLES},
    "r3gan-defaults": SMALL | {"architecture": "r3gan", "generator": R3 | {"z_dim": 8}, "discriminator": R3},
    "dcgan-defaults": SMALL
    | {"architecture": "dcgan", "generator": {"z_dim": 8, "width": 4}, "discriminator": {"width": 4}},
}
TREES |= {f"several-{name}": TREES[name] | {"several": True} for name in ("everything", "shared", "r3gan", "dcgan")}
SETS = [[], [0], [0, 1, 2], [1, 2]]  # of classes: what images have together
# in micro-batches and over ranks: what is done once a pass, once a step, in pairs, with p, by stages, without styles
SPLIT = ["everything", "pairs", "wasserstein", "shared-fakes", "apart", "ada", "growing", "r3gan", "dcgan"]
SPLIT += ["several-everything", "shared-pairs"]
LONG = ("growing", "several-everything")  # a step of each is compared in one piece


def steps_of(tree: dict[str, Any]) -> int:
    """Three, or until the last stage of growth has faded in."""
    return 8 if "progressive" in tree else 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory, slim_module):
    """50 random grey images of 16 px in three classes of different sizes, and a classifier's run."""
    path = tmp_path_factory.mktemp("oracle")
    images = np.random.default_rng(0).integers(0, 256, (50, 1, 16, 16), dtype=np.uint8)
    labels = np.array([0, 0, 1, 2, 0, 1, 0] * 8)[:50]
    pack_arrays(path / "data.lmdb", images, labels=labels, classes=CLASSES, smallest=8)
    pack_arrays(path / "held-out.lmdb", 255 - images[:31], labels=labels[:31], classes=CLASSES, smallest=8)
    labels = np.array([0, 1, 2, 3, 1, 0, 3, 3] * 7)[:50]
    pack_arrays(path / "data-several.lmdb", images, labels=labels, classes=CLASSES, label_sets=SETS)
    torch.set_default_dtype(torch.float64)
    untrained_classifier(path / "classifier")
    untrained_classifier(path / "classifier-several", several=True)
    yield path
    torch.set_default_dtype(torch.float32)


def made(folder: Any, tree: dict[str, Any]) -> tuple[GanTask, Any]:
    """The task and its loader."""
    loss, kind = tree.get("loss", {}), "-several" if tree.get("several") else ""
    if loss.get("classifier"):
        loss = loss | {"classifier": str(folder / f"classifier{kind}")}
    data = tree.get("data", {}) | {"path": str(folder / f"data{kind}.lmdb")}
    tree = tree | {"loss": loss, "data": data}
    tree.pop("several", None)
    config: Any = build_run_config(tree, [], "test")
    reader = Dataset(config.data.path)
    return GanTask(config, reader, None, CPU), make_loader(config, reader, CPU)


def state(task: GanTask) -> State:
    """A copy of what a step changes: weights, averages, `w_avg`, the path-length mean and ADA's p."""
    networks = {"generator": task.generator, "discriminator": task.discriminator, "average": task.ema.model}
    named = {f"{n}.{key}": value for n, network in networks.items() for key, value in network.state_dict().items()}
    named |= {"path_length": task.generator_step.path_length.mean, "p": task.context.ada.p}
    return {name: value.clone() for name, value in named.items()}


def trained(folder: Any, tree: dict[str, Any]) -> list[State]:
    """The task's state before its first step and after each."""
    task, loader = made(folder, tree)
    states = [state(task)]
    for step in range(steps_of(tree)):
        metrics = task.step(loader, step)
        states.append(state(task) | whole(metrics))
    return states


def assert_equal(folder: Any, tree: dict[str, Any], states: list[State]) -> None:
    """The states and metrics are the reference's, to 1e-10; and training changes most of them."""
    task, batches = made(folder, tree)
    reference = GanReference(task, tree)
    for step in range(steps_of(tree)):
        reference.step(batches, step)
        assert_close(states[step + 1], reference.state(), f"step {step}")
    changed = [name for name, value in reference.state().items() if not torch.equal(value, states[0].get(name, value))]
    assert len(changed) > len(states[0]) / 2


@pytest.mark.parametrize("name", TREES)
def test_a_step_is_the_papers(folder, name):
    assert_equal(folder, TREES[name], trained(folder, TREES[name]))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in SPLIT])
def test_micro_batches_are_the_whole_batch(folder, name):
    assert_equal(folder, TREES[name], trained(folder, TREES[name] | {"micro_batch": 4}))


def test_two_ranks_are_one(folder):
    found = of_two_ranks(folder, "tests.oracle.test_gan", SPLIT)
    for name in SPLIT:
        assert_equal(folder, TREES[name], found[name])


# --- what the task hands to its evaluation, and where a stage of growth begins


@pytest.mark.parametrize(("name", "steps", "limit"), [("everything", 2, 512), ("everything", 1, 27), ("growing", 3, 9)])
def test_what_is_evaluated(folder, name, steps, limit, monkeypatch):
    """The held-out images, the average as the stage shows it, the config's seed and n."""
    tree = TREES[name] | {"evaluation": {"n": 24, "extractor": "pixels", "batch_size": 16}}
    task, loader = made(folder, tree)
    task.val_dataset = Dataset(folder / "held-out.lmdb")
    reference, batches = GanReference(task, tree), make_loader(task.config, task.dataset, CPU)
    for step in range(steps):
        task.step(loader, step)
        reference.step(batches, step)
    asked: dict[str, Any] = {}

    def evaluate(generator: Any, dataset: Any, **how: Any) -> dict[str, Any]:
        z, labels = torch.ones(2, 8), torch.tensor([0, 2])
        noise = [torch.zeros(2, *shape) for shape in task.generator.noise_shapes()]
        asked.update(how, dataset=dataset, images=generator(z, labels, noise=noise))
        row = {"frechet": 1.0, "kernel": 2.0, "diversity_ratio": 3.0}
        return {"n": 24, "distances": [row], "memorisation": None}

    monkeypatch.setattr("duetgan.training.gan.evaluation.evaluate_generator", evaluate)
    monkeypatch.setattr("duetgan.training.gan.evaluation.LOGIT_IMAGES", limit)
    figures = task.evaluate()
    stage = reference.stage(steps - 1)
    noise = [torch.zeros(2, *shape) for shape in reference.g.noise_shapes()]
    z, labels = torch.ones(2, 8), torch.tensor([0, 2])
    ws = reference.average.mapping(z, labels)[:, None].expand(-1, reference.g.num_ws, -1)
    expected = reference.average.synthesis(ws, noise)
    scale = 16 // stage.side
    torch.testing.assert_close(asked["images"][..., ::scale, ::scale], expected, rtol=1e-9, atol=1e-9)
    del asked["images"]
    assert [extractor.name for extractor in asked.pop("extractors")] == ["pixels"]
    assert asked.pop("real").batch_size == 16
    assert asked == {
        **{"dataset": task.val_dataset, "train_dataset": task.dataset, "seed": tree["seed"], "n": 24},
        **{"batch_size": 16, "floor": False, "details": False, "searched": 4 * 24},
    }
    assert figures["frechet/pixels"] == 1.0
    held_out, task.val_dataset = task.val_dataset, None
    assert task.evaluate() == {name: value for name, value in figures.items() if not name.startswith("logits/")}
    assert (asked["dataset"], asked["train_dataset"]) == (task.dataset, None)
    task.val_dataset = held_out
    if stage.side < 16 or stage.alpha < 1:
        assert "logits/held_out" not in figures
        return
    sets = {"held_out": task.val_dataset, "real": task.dataset}
    count = min(limit, len(task.val_dataset), len(task.dataset)) // 2 * 2
    rows = {key: [row * (len(reader) - 1) // (count - 1) for row in range(count)] for key, reader in sets.items()}
    given = {key: [torch.tensor(part) for part in reader.read(rows[key])] for key, reader in sets.items()}
    drawn = generate(reference.average, labels=given["real"][1], indices=range(count), seed=5)
    for key, (images, own) in (given | {"fake": (drawn, given["real"][1])}).items():
        logits = reference.d(images.to(torch.get_default_dtype()) / 127.5 - 1, own)
        assert figures[f"logits/{key}"] == pytest.approx(float(logits.detach().mean()), rel=1e-6), key


def test_a_stage_begins_with_its_images_batch_and_moments(folder):
    """The first step of 16 px equals the stage before, scaled up, and Adam's moments are those of one update."""
    task, loader = made(folder, TREES["growing"])
    task.step(loader, 0)
    batch = next(loader)
    assert batch.images.shape == (12, 1, 16, 16)
    assert task.images_at(1) == 16
    loader = make_loader(task.config, task.dataset, CPU)
    task, _ = made(folder, TREES["growing"])
    for step, count in ((0, 1), (1, 1), (2, 2)):
        task.step(loader, step)
        for updater in (task.generator_step.updater, task.discriminator_step.updater):
            counts = {int(kept["step"]) for kept in updater.optimizer.state.values()}
            assert counts - {0} == {count}, (step, counts)  # 0: of what has not trained yet
