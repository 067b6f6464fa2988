"""torch.compile of a GAN: the same numbers, penalties that still reach the parameters, and a line where it fails."""

import functools

import pytest
import torch

from duetgan.training.base import compiled
from duetgan.training.base.compiled import Compiled
from tests.distributed.worker import GAN
from tests.training.gan.test_steps import Run, folder  # noqa: F401  (a fixture)

CPU = torch.device("cpu")
LOSS = {"r1_interval": 2, "path_length_weight": 2.0, "path_length_interval": 2, "mismatch_weight": 0.0}


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without a C++ compiler: dynamo and autograd's tracing, run by eager kernels; counts its calls."""
    calls = []
    original = torch.compile

    def count(function, **options):
        calls.append(function)
        return original(function, backend="aot_eager", **options)

    torch._dynamo.reset()
    monkeypatch.setattr(compiled.torch, "compile", count)
    yield calls
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_phases_give_the_same_step(folder, traced):  # noqa: F811
    results = {}
    for setting in ("off", "on"):
        run = Run(folder, GAN, loss=LOSS, compile=setting)
        figures = [run.step() for _ in range(3)]
        results[setting] = figures, dict(run.task.generator.named_parameters())
    assert len(traced) == 2
    for plain, fast in zip(results["off"][0], results["on"][0], strict=True):
        assert plain.keys() == fast.keys()
        for name, value in plain.items():
            assert fast[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert results["on"][0][0]["loss/r1"] > 0
    assert results["on"][0][0]["loss/path_length"] > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["r1", "path_length"])
def test_a_penaltys_gradient_reaches_the_parameters_beside_a_compiled_network(folder, traced, kind):  # noqa: F811
    """Compiled modules once lost the higher-order graph in silence (pytorch issue 181581)."""
    strong = {"r1": {"r1_gamma": 100.0}, "path_length": {"path_length_weight": 100.0}}
    network = "discriminator" if kind == "r1" else "generator"
    norms = []
    for more in ({"r1_gamma": 0.0} if kind == "r1" else {"path_length_weight": 0.0}, strong[kind]):
        run = Run(folder, GAN, loss=LOSS | more, compile="on")
        norms.append(run.step()[f"gradient_norm/{network}"])
    assert norms[1] > 1.05 * norms[0]


def test_without_a_compiler_it_says_so_and_goes_on(monkeypatch, capsys):
    def broken(function, **options):
        def fail(*arguments):
            raise torch._dynamo.exc.TorchDynamoException("no C++ compiler here\nand more")

        return functools.wraps(function)(fail)

    monkeypatch.setattr(compiled.torch, "compile", broken)
    run = Compiled(lambda x: x + 1, "the generator", setting="on", device=CPU)
    assert [run(1), run(2)] == [2, 3]
    assert capsys.readouterr().err.strip() == "compile: the generator runs uncompiled (no C++ compiler here)"


def test_auto_leaves_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(compiled.torch, "compile", lambda *a, **k: pytest.fail("compiled"))
    assert Compiled(lambda x: x * 2, "x", setting="auto", device=CPU)(2) == 4
    assert Compiled(lambda x: x * 2, "x", setting="off", device=torch.device("cuda"))(2) == 4


def test_a_fault_of_the_function_itself_is_raised():
    def fault(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Compiled(fault, "x", setting="off", device=CPU)(1)
