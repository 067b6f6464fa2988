"""torch.compile in training: graphs by step, the same numbers, penalties that still count, a line where it fails."""

import functools
import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.precision import full_float32
from duetgan.models import layers
from duetgan.training.base import compiled
from duetgan.training.base.compiled import Compiled
from duetgan.training.base.data import make_loader
from duetgan.training.engine.tasks import TASKS, build_run_config
from tests.distributed.worker import ADA, GAN, LOSSES, TREES
from tests.training.gan.test_steps import Run, folder  # noqa: F401  (a fixture)

# torch's remarks on its own code, which as errors would be reasons to run uncompiled
IGNORED = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning")
pytestmark = pytest.mark.filterwarnings(*IGNORED)
CPU = torch.device("cpu")
LOSS = {"r1_interval": 2, "path_length_weight": 2.0, "path_length_interval": 2, "mismatch_weight": 0.0}
GROWTH: dict[str, Any] = {"progressive": {"start": 8, "fade_kimg": 0.024, "stable_kimg": 0.016}}


@pytest.fixture
def lower():
    """What makes code of a graph: autograd's tracing, run by eager kernels."""
    return aot_eager


@pytest.fixture
def traced(monkeypatch, lower):
    """torch.compile without a C++ compiler: the initials of the networks for which graphs were made. Nothing is kept of
    the runs before.
    """
    graphs: list[str] = []
    original = torch.compile

    @functools.cache
    def backend_of(name):
        def backend(graph, inputs):
            graphs.append(name)
            return lower(graph, inputs)

        return backend

    def count(function, **options):
        network = type(getattr(function, "__self__", function)).__name__
        name = next((word[0] for word in ("Generator", "Discriminator", "Classifier") if word in network), "?")
        return original(function, backend=backend_of(name), **options)

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(layers, "_kernels", {})
    monkeypatch.setattr(compiled.torch, "compile", count)
    with torch._dynamo.config.patch(recompile_limit=8):
        yield graphs
    torch._dynamo.reset()


IMAGES = TREES["classifier"] | {"batch_size": 12, "evaluation": {"batch_size": 10}}  # of 32: no whole number of batches
UNFREEZE = {"finetune": {"unfreeze": {"head": 0, "layer4": 2, "layer3": 4}}}
# what trains -> the graphs that each of six steps makes, of (G)enerator, (D)iscriminator, (C)lassifier. D's graphs: of
# samples for G (its parameters fixed), without a graph for G, and in its own step of samples and of images, which in
# grey have other strides. Phases with a penalty, with one pass of D for both networks and with losses apart run eager.
GRAPHS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "penalties lazy, one pass": (GAN | {"batch_size": 12}, ["G", "D", "", "", "", ""]),
    "losses apart": (GAN | {"loss": LOSSES | {"gradients_every": 1}}, ["DDG", "D", "", "", "", ""]),
    "all losses": (GAN | {"loss": LOSSES}, ["DDG", "D", "", "", "", ""]),
    "relativistic": (TREES["gan-pairs"], ["DG", "", "", "", "", ""]),
    "ADA": (GAN | {"ada": ADA}, ["DDG", "", "", "", "", ""]),
    "growth": (GAN | GROWTH, ["G", "D", "G", "D", "", "DG"]),
    "R3GAN": (TREES["gan-r3gan"], ["DG", "", "", "", "", ""]),
    "DCGAN": (TREES["gan-dcgan"], ["G", "D", "", "", "", ""]),
    "mixup": (IMAGES | {"augment": {"mixup": 0.4, "cutmix": 1.0}}, ["C", "", "", "", "", ""]),
    "resizing": (IMAGES | {"resizing": {"initial_scale": 0.5}, "steps": 6}, ["C", "", "", "", "C", ""]),
    "unfreezing": (IMAGES | UNFREEZE, ["C", "", "C", "", "C", ""]),
}


FAST = ("R3GAN", "DCGAN", "mixup", "unfreezing")  # the others take a minute


def task_and_loader(folder, tree, **more):  # noqa: F811
    tree = tree | {"data": {"path": str(folder / "data.lmdb"), "val_path": str(folder / "data.lmdb")}} | more
    if tree.get("loss", {}).get("classifier"):
        tree = tree | {"loss": tree["loss"] | {"classifier": str(folder / "classifier")}}
    if tree["task"] == "gan":
        tree = tree | {"evaluation": {"extractor": f"classifier:{folder / 'classifier'}", "n": 10, "batch_size": 4}}
    config = build_run_config(tree, [], "test")
    reader = Dataset(config.data.path)
    return TASKS[tree["task"]].task(config, reader, reader, CPU), make_loader(config, reader, CPU)


@pytest.mark.parametrize("lower", [lambda graph, _: graph], ids=["dynamo"])  # aot_eager takes thrice as long
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in GRAPHS]
)
def test_graphs_of_each_step(folder, traced, capsys, request, name):  # noqa: F811
    """None breaks or is made again: not at an epoch's end, in a fade, after an evaluation with a short last batch."""
    tree, expected = GRAPHS[name]
    if tree["task"] == "classifier":
        request.getfixturevalue("slim")
    task, loader = task_and_loader(folder, tree, compile="on")
    found = []
    for step in range(len(expected)):
        task.step(loader, step)
        found.append("".join(sorted(traced)))
        traced.clear()
        if step == 2:
            task.evaluate()
            assert traced == []
    assert found == expected
    assert counters["stats"]["unique_graphs"] == sum(map(len, found))
    assert dict(counters["graph_break"]) == {}
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    assert "uncompiled" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["penalties lazy, one pass", "growth", "resizing"])
def test_inductors_code_gives_the_same_step(folder, capsys, name):  # noqa: F811
    tree, expected = GRAPHS[name]
    torch._dynamo.reset()
    counters.clear()
    figures = {}
    for setting in ("off", "on"):
        task, loader = task_and_loader(folder, tree, compile=setting)
        figures[setting] = [task.step(loader, step) for step in range(len(expected))]
    torch._dynamo.reset()
    assert counters["stats"]["unique_graphs"] == sum(map(len, expected))
    assert "uncompiled" not in capsys.readouterr().err
    for plain, fast in zip(figures["off"], figures["on"], strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", [pytest.param("r1", marks=pytest.mark.slow), "path_length"])
def test_a_penaltys_gradient_reaches_the_parameters_beside_a_compiled_network(folder, traced, kind):  # noqa: F811
    """Compiled modules once lost the higher-order graph in silence (pytorch issue 181581)."""
    strong = {"r1": {"r1_gamma": 100.0}, "path_length": {"path_length_weight": 100.0}}
    network = "discriminator" if kind == "r1" else "generator"
    norms = []
    for more in ({"r1_gamma": 0.0} if kind == "r1" else {"path_length_weight": 0.0}, strong[kind]):
        run = Run(folder, GAN, loss=LOSS | more, compile="on")
        norms.append(run.step()[f"gradient_norm/{network}"])
    assert norms[1] > 1.05 * norms[0]


def test_an_evaluation_puts_back_what_compiled_code_was_made_for():
    """Another precision of matrix products once made every network be compiled anew after the first evaluation."""
    backends: Any = torch.backends
    matmuls = (backends.cuda.matmul, backends.mkldnn.matmul)
    for matmul in matmuls:
        matmul.fp32_precision = "none"  # torch's default
    with full_float32("cpu"):
        assert [matmul.fp32_precision for matmul in matmuls] == ["ieee", "ieee"]
    assert [matmul.fp32_precision for matmul in matmuls] == ["none", "none"]


@pytest.mark.parametrize("kind", ["blur", "down"])
def test_a_graph_has_no_constants(monkeypatch, kind):
    """Two kernels, as StyleGAN2's generator has them under autocast, are no constants of one name: torch 2.11 refuses
    these, and the generator ran uncompiled.
    """
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def filtered(x):
        wide, narrow = (layers._resample(y, kind, 1.0, 1) for y in (x, x.bfloat16()))
        return wide + narrow

    original = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **how: original(function, backend=backend, **how))
    run = Compiled(filtered, "filters", setting="on", device=CPU)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    slopes = [torch.autograd.grad(function(x).square().sum(), x)[0] for function in (filtered, run)]
    torch.testing.assert_close(*slopes)
    assert run.on
    (graph,) = graphs
    attributes = [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]
    assert not [attribute for attribute in attributes if isinstance(attribute, torch.Tensor)]


def test_more_graphs_than_torchs_own_limit_are_made(traced):
    run = Compiled(lambda x: x + 1, "x", setting="on", device=CPU)
    for size in range(2, 14):
        run(torch.zeros(size))
    assert traced == ["?"] * 12


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no C++ compiler here\nand more", "no C++ compiler here"),
        ("backend='x' raised:\nCppCompileError: no g++\n\nmore", "backend='x' raised: CppCompileError: no g++"),
    ],
)
def test_what_cannot_be_compiled_runs_uncompiled_from_there_on(monkeypatch, capsys, message, told):
    def small_only(function, **options):
        def run(x, **options):
            if x > 1:
                raise torch._dynamo.exc.TorchDynamoException(message)
            return function(x, **options)

        return run

    monkeypatch.setattr(compiled.torch, "compile", small_only)
    run = Compiled(lambda x, added=1: x + added, "the generator", setting="on", device=CPU)
    assert [run(1), run(1, added=5), run(2, added=5), run(3), run(3, added=5)] == [2, 6, 7, 4, 8]
    assert capsys.readouterr().err.strip() == f"compile: the generator runs uncompiled ({told})"


def test_the_network_that_cannot_be_compiled_is_named(folder, monkeypatch, capsys):  # noqa: F811
    def refused(function, **options):
        def run(*arguments, **more):
            raise torch._dynamo.exc.TorchDynamoException(type(getattr(function, "__self__", function)).__name__)

        return run

    monkeypatch.setattr(compiled.torch, "compile", refused)
    run = Run(folder, TREES["gan-dcgan"], compile="on")
    for _ in range(2):  # the discriminator's first pass has a penalty
        run.step()
    assert capsys.readouterr().err.splitlines() == [
        "compile: the generator runs uncompiled (DcganGenerator)",
        "compile: the discriminator runs uncompiled (DcganDiscriminator)",
    ]


def test_auto_leaves_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(compiled.torch, "compile", lambda *a, **k: pytest.fail("compiled"))
    assert Compiled(lambda x: x * 2, "x", setting="auto", device=CPU)(2) == 4
    assert Compiled(lambda x: x * 2, "x", setting="off", device=torch.device("cuda"))(2) == 4
