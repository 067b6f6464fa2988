"""Both halves of a GAN's step: what each touches, what the settings do, and what stays bounded."""

import gc
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.models.layers import convolution, fused
from duetgan.training.base import graphs
from duetgan.training.base import teacher as teacher_module
from duetgan.training.base.data import make_loader
from duetgan.training.base.phases import PhaseClock, listening
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.context import Context
from duetgan.training.gan.discriminator_step import DiscriminatorStep
from duetgan.training.gan.generator_step import GeneratorStep
from duetgan.training.gan.joint_step import JointStep
from duetgan.training.gan.losses import OBJECTIVES, path_lengths
from duetgan.training.gan.task import GanTask
from duetgan.training.gan.terms import PathLength
from duetgan.training.optim.ema import half_life_beta
from duetgan.training.optim.updater import Precision
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.distributed.test_oracle import CLASSES, untrained_classifier
from tests.distributed.worker import ADA, GAN, LOSSES, PAIRS, R3
from tests.end_to_end.helpers import differing

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data.lmdb: 32 random 16 px grey images of three classes, with 8 px stored; and a classifier's run."""
    path = tmp_path_factory.mktemp("phases")
    sample_images = np.random.default_rng(0).integers(0, 256, (32, 1, 16, 16), dtype=np.uint8)
    pack_arrays(path / "data.lmdb", sample_images, labels=np.arange(32) % 3, classes=CLASSES, smallest=8)
    untrained_classifier(path / "classifier")
    return path


class Run:
    """A task and its loader; `step()` takes one step and returns its metrics."""

    def __init__(self, folder, tree: dict[str, Any], **more):
        loss = {**tree.get("loss", {}), **more.get("loss", {})}
        if loss.get("classifier"):
            loss["classifier"] = str(folder / "classifier")
        tree = {**tree, **more, "data": {"path": str(folder / "data.lmdb")}, "loss": loss}
        config = build_run_config(tree, [], "test")
        assert isinstance(config, GanConfig)
        reader = Dataset(config.data.path)
        self.task = GanTask(config, reader, None, CPU)
        self.loader, self.count = make_loader(config, reader, CPU), 0

    def step(self):
        metrics = self.task.step(self.loader, self.count)
        assert {value.dtype for value in metrics.values()} == {torch.float32}  # in every precision
        self.count += 1
        return {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(("donor", "kimg", "rampup"), [(None, 500, 0.05), ("other/run", 100, None)])
def test_transferred_networks_adapt_and_average_as_trained_ones(folder, donor, kimg, rampup, monkeypatch):
    """Augmentation adapts five times as fast (2006.06676, appendix C.2); no limit of the average's half-life."""
    found = []

    def noted(batch: int, seen: int, half_life: float, limit: float | None) -> float:
        found.append(limit)
        return half_life_beta(batch, seen, half_life, limit)

    monkeypatch.setattr("duetgan.training.gan.generator_step.half_life_beta", noted)
    run = Run(folder, GAN | {"ada": {"mode": "adaptive"}, "init_from": donor})
    assert run.task.context.ada.adjustment_images == 1000 * kimg
    run.step()
    assert found == [rampup]


def test_the_plan_names_the_kernels_of_an_accelerator(folder, monkeypatch):
    monkeypatch.setattr(fused, "setting", "auto")  # put back afterwards
    task = Run(folder, GAN | {"kernels": "off"}).task
    assert "kernels" not in task.describe()
    task.device = torch.device("cuda")
    assert task.describe()["kernels"] == "plain, because kernels is off"


@pytest.mark.parametrize(
    ("conditional", "rows"), [(True, {}), (False, {"labels": "not used: the GAN is unconditional"})]
)
def test_the_plan_says_how_networks_grow_and_that_labels_are_not_used(folder, conditional, rows):
    eager = {"graphs": "eager, because the device is cpu"}
    assert Run(folder, GAN | {"conditional": conditional}).task.describe() == rows | eager
    off = {"graphs": "eager, because graphs is off"}
    assert Run(folder, GAN | {"conditional": conditional, "graphs": "off"}).task.describe() == rows | off
    task = Run(folder, GAN | {"conditional": conditional, "progressive": {"start": 8, "stable_kimg": 0.01}}).task
    growth = zip(("growth 1", "growth 2", "growth 3"), task.stages.describe(), strict=True)  # the last is a warning
    assert task.describe() == dict(growth) | rows | eager


def test_a_ranks_logged_sign_is_its_own_and_not_the_sum_over_ranks(folder, monkeypatch):
    """ADA sums the signs of all ranks; what is logged is averaged over them later."""
    alone = Run(folder, GAN | {"ada": ADA}).step()["logits/real_sign"]
    monkeypatch.setattr("duetgan.utils.distributed.collectives.all_reduce_sum_", lambda sign: sign.mul_(2))
    run, received = Run(folder, GAN | {"ada": ADA}), []
    monkeypatch.setattr(run.task.context.ada, "update", lambda *arguments: received.append(float(arguments[2])))
    assert run.step()["logits/real_sign"] == alone != 0
    assert received == [2 * alone]


def same(one, other):
    return differing(one, other) == []


def state(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def test_the_classifier_that_gives_a_loss_stays_as_it_is_and_is_in_the_lineage(folder, monkeypatch):
    restored = teacher_module.classifier_from

    def with_weights(checkpoint: Any, device: torch.device, **options: Any) -> Any:
        network = restored(checkpoint, device, **options)
        network.lineage = Lineage.of(trained_on=["images"], pretrained=["weights"])
        return network

    monkeypatch.setattr(teacher_module, "classifier_from", with_weights)
    run = Run(folder, GAN, loss=LOSSES)
    teacher: Any = run.task.teacher.network
    before = state(teacher)
    for _ in range(2):
        assert run.step()["loss/classifier"] > 0
    assert same(state(teacher), before)
    assert not teacher.training
    assert all(p.grad is None for p in teacher.parameters())
    teachers: Any = run.task.provenance()["teachers"]
    assert len(teachers) == 1
    lineage = run.task.teacher.lineage
    assert run.task.lineage() == lineage == Lineage.of(teachers=teachers, pretrained=["weights"])


def test_a_classifier_of_other_classes_is_refused(folder, tmp_path):
    sample_images = np.zeros((16, 1, 16, 16), np.uint8)
    pack_arrays(tmp_path / "data.lmdb", sample_images, labels=np.arange(16) % 3, classes=["a", "b", "other"])
    untrained_classifier(tmp_path / "classifier")
    assert_raises(UserError, r"loss\.classifier .* classes differ", Run, tmp_path, GAN, loss=LOSSES)


def test_the_path_length_mean_ignores_nonsense():
    mean = PathLength(0.01)
    for length in (2.0, 2.0, float("nan")):
        mean.update(torch.tensor(length))
    assert float(mean.mean) == pytest.approx(0.0398)
    assert set(mean.state_dict()) == {"mean"}


R3GAN = {key: GAN[key] for key in ("batch_size", "steps", "seed", "task")} | {
    "architecture": "r3gan",
    "generator": R3 | {"z_dim": 8},
    "discriminator": R3,
}


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(GAN | {"loss": LOSSES | {"gradients_every": 1}, "ada": ADA}, marks=pytest.mark.slow),
        R3GAN | {"loss": PAIRS, "ada": {"mode": "fixed", "p": 0.5}},
    ],
    ids=["stylegan2", "r3gan"],
)
def test_steps_leave_no_tensors_behind(folder, tree):
    run = Run(folder, tree)

    def live():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    for _ in range(4):
        run.step()
    before = live()
    for _ in range(8):
        run.step()
    assert live() <= before + 2
    buffers = [b for part in (run.task.generator, run.task.generator_step.path_length) for b in part.buffers()]
    assert not any(b.requires_grad or b.grad_fn is not None for b in buffers)
    assert run.task.context.ada.p.grad_fn is None


def test_a_growing_generator_is_shown_as_its_stage_has_it(folder, capsys, monkeypatch):
    run = Run(folder, GAN, progressive={"start": 8, "fade_kimg": 0.016, "stable_kimg": 0.016})
    run.step()
    assert capsys.readouterr().err == ""
    shown = run.task.average_generator()
    z = torch.ones(1, 8)
    image = shown(z, torch.zeros(1, dtype=torch.int64), noise="none")
    assert image.shape == (1, 1, 16, 16)
    assert torch.equal(image[:, :, ::2, ::2], image[:, :, 1::2, 1::2])  # pixels of 8 px, repeated
    assert run.task.sample_grid(1) is not None
    for _ in range(5):
        run.step()
    assert capsys.readouterr().err.splitlines() == [run.task.stages.row(run.task.stages.all[1])]
    assert run.task.average_generator() is run.task.ema.model
    assert run.task.provenance()["stage"] == [16, 1.0]
    monkeypatch.setattr(run.task.evaluation, "sample_grid", lambda generator: generator)
    drawn: Any = run.task.sample_grid(6)
    assert drawn is run.task.ema.model


def test_what_does_not_go_together_is_refused():
    for tree, message in (
        (R3GAN | {"loss": {"path_length_weight": 2.0}}, "r3gan has no styles"),
        (R3GAN | {"progressive": {"start": 8}}, "r3gan cannot grow"),
        (GAN | {"loss": {"objective": "relativistic", "mismatch_weight": 0.5}}, "mismatch_weight"),
        (GAN | {"loss": {"objective": "relativistic"}, "ada": {"mode": "adaptive"}}, "adaptive reads the sign"),
        (GAN | {"loss": WASSERSTEIN, "ada": {"mode": "adaptive"}}, "adaptive reads the sign"),
        (GAN | {"loss": {"auxiliary_fakes": True}}, "loss.auxiliary_fakes is of the head"),
        (GAN | {"loss": {"feature_matching_group": 1}}, "feature_matching_group"),
        (GAN | {"loss": {"path_length_interval": 0}}, "path_length_interval"),
    ):
        assert_raises(UserError, message, build_run_config, tree, [], "test")


@pytest.mark.parametrize(
    ("more", "loss"),
    [
        ({"precision": "bf16"}, {}),
        ({"precision": "fp16"}, {"auxiliary_weight": 0.7, "auxiliary_fakes": True}),
    ],
)
def test_one_pass_of_the_discriminator_gives_the_gradients_of_two(folder, more, loss, monkeypatch):
    results = []
    for two in (False, True):
        run = Run(folder, GAN, loss={"r1_interval": 2} | loss, **more)
        if two:
            monkeypatch.setattr(JointStep, "is_due", lambda *_: False)
        figures = [run.step() for _ in range(3)]
        results.append((figures, state(run.task.generator), state(run.task.discriminator)))
    shared, apart = results
    for one, other in zip(shared[0], apart[0], strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(shared[1:], apart[1:], rtol=1e-4, atol=1e-5)


def test_samples_are_judged_once_only_where_that_is_the_same(folder):
    def shares(tree, step=0, **more):
        task = Run(folder, tree, **more).task
        return task.joint_step.is_due(step)

    assert shares(GAN)
    assert shares(GAN, loss={"auxiliary_weight": 1.0})
    assert not shares(GAN, ada=ADA)
    assert not shares(GAN, loss={"r2_gamma": 1.0})
    assert shares(GAN, step=1, loss={"r2_gamma": 1.0})  # no penalty in this step
    assert not shares(GAN, loss={"feature_matching_weight": 1.0, "feature_matching_group": 2})
    assert not shares(GAN, loss=LOSSES)
    assert not shares(GAN, loss={"classifier": True, "classifier_weight": 1.0})
    assert not shares(R3GAN, loss=PAIRS)  # pairs of D's own
    assert Run(folder, R3GAN, loss=PAIRS).task.watch.objective is OBJECTIVES["relativistic"]
    assert shares(GAN, loss={"objective": "relativistic", "mismatch_weight": 0.0, "same_pairs": True})


def test_the_loss_scale_is_in_no_metric(folder):
    found = []
    for enabled in (False, True):
        run = Run(folder, GAN, loss=LOSSES | {"gradients_every": 1})
        run.task.precision.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        found.append([run.step() for _ in range(2)])
    for plain, scaled in zip(*found, strict=True):
        assert scaled == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("loss", [{}, LOSSES], ids=["joint", "every loss"])
def test_measuring_the_gradients_of_losses_leaves_the_step_alone(folder, loss):
    found = []
    for every in (0, 2):
        run = Run(folder, GAN, loss=loss | {"gradients_every": every})
        metrics = [run.step() for _ in range(3)]
        parts = (run.task.generator, run.task.discriminator, run.task.ema.model, run.task.generator_step.path_length)
        found.append((metrics, [state(part) for part in parts]))
    (plain, states), (measured, again) = found
    assert same(dict(enumerate(states)), dict(enumerate(again)))
    more = [set(metrics) - set(without) for metrics, without in zip(measured, plain, strict=True)]
    assert more[1] == set()
    names = {"adversarial"} | ({"classifier", "auxiliary", "feature_matching", "path_length"} if loss else set())
    assert {f"gradient_norm/generator/{name}" for name in names} == {n for n in more[0] if "norm" in n}
    assert len(more[0]) == len(names) * (len(names) + 1) / 2


def test_the_picture_of_a_step_is_the_order_of_its_calls(folder, monkeypatch):
    picture = Path("docs/architecture.md").read_text().partition("A step of the GAN")[2].split("```")[1]
    names = re.findall(r"^([A-Z]\w+)\.(\w+)", picture, re.MULTILINE)
    kinds = {kind.__name__: kind for kind in (Context, GeneratorStep, DiscriminatorStep, Precision)}
    calls = []

    def recorded(name, method):
        def call(*arguments, **options):
            calls.append(name)
            return method(*arguments, **options)

        return call

    for kind, name in names:
        monkeypatch.setattr(kinds[kind], name, recorded((kind, name), getattr(kinds[kind], name)))
    Run(folder, GAN, ada=ADA).step()
    assert list(dict.fromkeys(calls)) == names
    assert len(names) == 8


class Passes:
    """The passes, gradients and updates of a step, each with its phase.

    A pass with derivatives of penalties has the mark `2`, one in the precision of the run `half`, and one that may be
    compiled `compiled`.
    """

    def __init__(self, run: Run) -> None:
        task = run.task
        self.run = run
        self.found: list[str] = []
        self.is_compiled = False
        self.clock = PhaseClock(lambda: None, time.perf_counter)
        first = task.generator.blocks[0] if task.generator.has_styles else task.generator
        networks = {"G": first, "D": task.discriminator.from_rgb}
        if task.teacher is not None:
            networks["teacher"] = task.teacher.network
        for name, network in networks.items():
            network.register_forward_pre_hook(lambda *_, name=name: self.note(name))
        for name, network in {"G": task.generator, "D": task.discriminator}.items():
            next(iter(network.parameters())).register_hook(lambda _, name=name: self.note(f"gradient of {name}"))
        for name, owner, method in (
            ("update of G", task.generator_step.updater, "step"),
            ("update of D", task.discriminator_step.updater, "step"),
            ("average", task.ema, "update"),
            ("augmentation", task.context.ada, "apply"),
        ):
            setattr(owner, method, self.noted(name, getattr(owner, method)))
        for compiled in (task.context._compiled_synthesis, task.context._compiled_hidden):
            compiled.function = self.marked(compiled.function)

    def step(self) -> list[str]:
        self.found = []
        with listening(self.clock):
            self.run.step()
        return self.found

    def note(self, name: str) -> None:
        marks = " 2" * convolution.is_penalised() + " half" * torch.is_autocast_enabled("cpu")
        marks += " compiled" * self.is_compiled
        self.found.append(f"{name}: {self.clock.open[-1]}{marks}")

    def marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.is_compiled = True
            result = function(*arguments, **options)
            self.is_compiled = False
            return result

        return call

    def noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.note(name)
            return function(*arguments, **options)

        return call


def test_parts_of_a_task_have_their_sections_of_the_config(folder, monkeypatch):
    monkeypatch.setattr("duetgan.utils.distributed.collectives.main_first", lambda build: ("rank 0 first", build()))
    more = {"watch": {"memory": 0.3, "on": False}, "distributed": {"compress": "bf16"}}
    task: Any = Run(folder, GAN | more, generator_optimizer=GAN["generator_optimizer"] | {"lr": 0.02}).task
    assert task.watch.config == task.config.watch
    assert task.registry()["watch"] is task.watch
    assert (task.loss_metric, task.best_metric, task.best_is_lower) == ("loss/discriminator", "frechet/pixels", True)
    for name in ("generator", "discriminator"):
        updater: Any = task.registry()[f"{name}_optimizer"]
        assert updater.config == getattr(task.config, f"{name}_optimizer")
        assert updater.model is task.registry()[name]
        assert updater.exchange.compress == "bf16"
    assert task.generator_step.updater.config.lr == 0.02
    extractors: Any = task.evaluation.extractors  # which may download weights
    order, (extractor,) = extractors
    assert (order, extractor.name) == ("rank 0 first", "pixels")
    monkeypatch.setattr("duetgan.utils.distributed.collectives.world_size", lambda: 3)
    assert_raises(UserError, "the number of processes 3 does not divide 8 samples", Run, folder, GAN)


@pytest.mark.parametrize("scale", [1.0, 8.0])  # only a scale above 1 explains it
def test_what_is_not_finite_moves_neither_the_network_nor_its_average(folder, scale):
    run = Run(folder, GAN, ema={"ema_kimg": 0.1, "ema_rampup": None})
    run.task.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    run.step()
    networks = (run.task.generator, run.task.ema.model)
    before = [{name: p.clone() for name, p in network.named_parameters()} for network in networks]
    assert not same(*before)
    discriminator = state(run.task.discriminator)
    next(run.task.generator.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    metrics = run.step()
    for network, old in zip(networks, before, strict=True):
        assert same(dict(network.named_parameters()), old)
    assert not same(state(run.task.discriminator), discriminator)
    assert {name: value for name, value in metrics.items() if "_updates/" in name} == {
        **{"skipped_updates/generator": 1, "nonfinite_updates/generator": scale == 1},
        **{"skipped_updates/discriminator": 0, "nonfinite_updates/discriminator": 0},
    }


def test_steps_of_a_kind_launch_the_same_kernels(folder):
    """What is due, and what ends: gamma_final 0 removes the penalty at the last step of the schedule."""
    loss = {"r1_interval": 3, "gamma_final": 0.0, "path_length_weight": 1.0, "path_length_interval": 2}
    more = {"ada": {"mode": "adaptive", "interval": 5}, "log": {"layers": ["*"], "layers_every": 7}}
    task = Run(folder, GAN | more, loss=loss | {"gradients_every": 11}, steps=60).task
    kinds, expected = {}, {}
    for step in range(150):
        kinds[step] = task.kind(step)
        is_plain = step % 11 and step % 7 != 6
        due = (step % 3 == 0, step % 2 == 0, step % 5 == 4, step % 3 == 0 and step < 60)
        expected[step] = due if is_plain else None
    assert len(set(zip(kinds.values(), expected.values(), strict=True))) == len(set(kinds.values())) == 13
    assert [kind is None for kind in kinds.values()] == [kind is None for kind in expected.values()]


def test_graphs_are_dropped_where_sizes_or_optimizers_change(folder):
    growth = {"start": 8, "fade_kimg": 0.016, "stable_kimg": 0.016, "batch_sizes": {8: 16}}
    task = Run(folder, GAN, progressive=growth).task
    found = [task.structure(step) for step in range(5)]  # 8 px, then 16 px: alpha 0, 0.5, 1 and 1
    assert [one == other for one, other in pairwise(found)] == [False, True, False, True]
    task.precision.switch("fp16")
    for updater in (task.generator_step.updater, task.discriminator_step.updater):
        before = task.structure(4)
        assert before != found[4]
        updater.reset()
        assert task.structure(4) != before


WASSERSTEIN = {"objective": "wasserstein", "gradient_penalty_weight": 10.0, "r1_gamma": 0.0, "r1_interval": 2}
UPDATES = ["update of G: generator/optimizer", "average: ema"]
PLAIN = ["D: discriminator/forward half compiled", "gradient of D: discriminator/backward"]
PENALTY = ["D: discriminator/forward 2 half", "gradient of D: discriminator/penalty 2"]
LAST = ["update of D: discriminator/optimizer"]
AUGMENTED = ["augmentation: augment"]
SAMPLES = "G: generator/forward half compiled"
# one pass, whose graph is differentiated twice
SHARED = [SAMPLES, "D: discriminator/forward half", "gradient of G: generator/backward", PLAIN[1]]
JUDGED = [*AUGMENTED, "D: generator/forward half compiled", *AUGMENTED, "D: generator/forward half"]
APART = [SAMPLES, *JUDGED, "teacher: generator/forward half", "gradient of G: generator/backward"]
PATHS = ["G: generator/path_length 2 half", "gradient of G: generator/path_length 2"]
# the generator's losses once more, before the step
MEASURED = {"path_length_weight": 2.0, "path_length_interval": 2, "gradients_every": 2}
COMPARED = ["G: generator/forward half", "D: other/host half", "gradient of G: other/host"]
COMPARED += ["G: other/host 2 half", "gradient of G: other/host 2"]
OWN = [*(line for line in JUDGED if line not in AUGMENTED), "gradient of G: generator/backward", *UPDATES]
OWN = [SAMPLES, *OWN, "G: discriminator/samples half", *PENALTY, *LAST]


@pytest.mark.parametrize(
    ("tree", "first", "second"),
    [
        (GAN, [*SHARED, *PENALTY, *UPDATES, *LAST], [*SHARED, *PLAIN, *UPDATES, *LAST]),
        (
            GAN | {"loss": WASSERSTEIN},
            [*SHARED, *PLAIN, *UPDATES, *PENALTY, *LAST],
            [*SHARED, *PLAIN, *UPDATES, *LAST],
        ),
        (
            GAN | {"loss": LOSSES, "ada": {"mode": "fixed", "p": 0.5}},
            [*APART, *PATHS, *UPDATES, *AUGMENTED, *PLAIN, "augmentation: augment 2", *PENALTY, *LAST],
            [*APART, *UPDATES, *AUGMENTED, *PLAIN, *AUGMENTED, *PLAIN, *LAST],
        ),
        (R3GAN | {"loss": PAIRS}, OWN, OWN),
        (
            GAN | {"loss": GAN["loss"] | MEASURED},
            [*COMPARED, *SHARED, *PENALTY, *PATHS, *UPDATES, *LAST],
            [*SHARED, *PLAIN, *UPDATES, *LAST],
        ),
    ],
    ids=["shared", "wasserstein", "every loss", "pairs", "gradients of each loss"],
)
def test_each_pass_has_its_phase_derivatives_and_precision(folder, tree, first, second):
    passes = Passes(Run(folder, tree, precision="bf16"))
    assert passes.step() == first
    assert passes.step() == second


def test_a_step_that_is_profiled_or_cannot_be_captured_runs_eagerly(folder, monkeypatch, capsys):
    """Its phases are not seen inside a graph."""

    class Device:
        working = nullcontext

        def __init__(self, device: torch.device) -> None:
            self.device = device

        def capturing(self) -> Any:
            raise RuntimeError("captured")

    plain = Run(folder, GAN)
    expected = [plain.step() for _ in range(7)]
    monkeypatch.setitem(graphs.DEVICES, "cpu", Device)
    run = Run(folder, GAN)
    found = [run.step(), run.step()]  # one of each kind
    with listening(PhaseClock(lambda: None, time.perf_counter)) as clock:
        found += [run.step(), run.step()]
    assert "generator/backward" in clock.seconds
    assert capsys.readouterr().err == ""
    found += [run.step() for _ in range(3)]
    assert found == expected
    reason = "the capture of a step failed: captured"
    assert capsys.readouterr().err == f"graphs: steps run eagerly, because {reason}\n"
    assert run.task.describe()["graphs"] == f"eager, because {reason}"


@pytest.mark.parametrize(("micro", "graphs_of_lengths"), [(None, [True]), (2, [False, False, True, True])])
def test_path_lengths_have_a_graph_only_for_the_penalty(folder, monkeypatch, micro, graphs_of_lengths):
    """Those of all micro-batches are needed for the mean first, and their graphs would fill the memory."""
    found = []

    def lengths(*arguments: Any, **options: Any) -> torch.Tensor:
        result = path_lengths(*arguments, **options)
        found.append(result.requires_grad)
        return result

    monkeypatch.setattr("duetgan.training.gan.terms.path_lengths", lengths)
    Run(folder, GAN, loss={"path_length_weight": 2.0}, micro_batch=micro).step()
    assert found == graphs_of_lengths
