"""Fixtures that several folders of tests use."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import isolation

# before any other module of tests reads the environment; None in pytest-xdist's processes
BEFORE = isolation.isolate()

# PyTorch and what needs it are imported in the functions: xdist's first process starts the others sooner without

# as many threads as a rank of a two-process run gets; tiny models are slower with more
os.environ.setdefault("OMP_NUM_THREADS", "1")
# what `precision: auto` means: two runs that are compared must train in the same, and nothing is measured
os.environ.setdefault("DUET_PRECISION", "fp32")

# no test waits for a network: weights that are not in torch's cache count as not to be had
os.environ.setdefault("DUET_OFFLINE", "1")

# signals that whoever started the tests has ignored (`nohup make test &`) would be ignored by their children, too; a
# handler is not passed on
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

REPOSITORY = Path(__file__).parents[1]
# Tests outside tests/extras that use extras -> which; they are left out where one of these has been deleted.
DOCUMENTED = ("audit", "editing", "explorer", "influence", "official", "paper", "pseudo_labels", "studies", "trackers")
USES_EXTRAS = {
    "benchmarks": ("editing", "paper", "robustness", "studies"),
    "end_to_end/test_documented_commands.py": DOCUMENTED,
    "test_docs.py": DOCUMENTED,
}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests of extras that are not there."""
    tests = REPOSITORY / "tests"
    name = collection_path.relative_to(tests).as_posix() if collection_path.is_relative_to(tests) else ""
    folder = REPOSITORY / "duetgan" / "extras"
    return True if any(not (folder / extra).is_dir() for extra in USES_EXTRAS.get(name, ())) else None


def pytest_collection_finish() -> None:
    """What was imported stays: no search for garbage needs to look at it again, which takes a quarter of a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest makes its cache in the checkout
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session where a test wrote into the checkout or the user's caches."""
    gc.unfreeze()
    lines = isolation.changes(BEFORE) if BEFORE is not None else []
    if lines:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.section("outside of the tests' folders (tests/isolation.py)")
        reporter.write_line("\n".join(lines))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Where indices of shards are kept, of child processes too."""
    import torch

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("cache")
    os.environ["DUET_CACHE"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def reports_without_curves(request, monkeypatch):
    """Drawing the curves of a report takes a second, which only the tests of reporting/ pay."""
    from tests.slim import no_curves

    if "reporting" not in request.path.parts:
        monkeypatch.setattr("duetgan.reporting.pictures._svg", no_curves)


@pytest.fixture(autouse=True)
def no_bar_talks_on():
    """A bar that nobody closed writes its lines into the tests that follow."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name == "progress"]
    if left:  # or is about to be closed with an error's frames
        gc.collect()
        time.sleep(0.1)
        left = [thread.name for thread in threading.enumerate() if thread.name == "progress"]
    assert not left


@pytest.fixture
def slim(monkeypatch):
    """Classifiers of this process are slim: for what does not depend on their size."""
    from tests.slim import make as slim_make

    monkeypatch.setattr("duetgan.models.backbones.base.make", slim_make)


@pytest.fixture(scope="module")
def slim_module():
    """The same from here to the end of a module, for its fixtures too."""
    from tests.slim import make as slim_make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duetgan.models.backbones.base.make", slim_make)
        yield


@pytest.fixture(scope="module")
def slim_resnet18():
    """ResNet-18 is slim, other networks are whole."""
    from duetgan.models.backbones import base
    from tests.slim import SlimResNet

    make = base.make
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "make", lambda name, **more: SlimResNet() if name == "resnet18" else make(name, **more))
        yield


def sample_images(split: str, per_class: int) -> tuple[Any, Any, list[str]]:
    """The first `per_class` images of each class of the sample at 16 px: uint8 [n, 1, 16, 16], labels, names."""
    import numpy as np
    import torch

    from duetgan.data.packing.sources import open_source
    from duetgan.data.packing.sources.base import ArraySource

    source = open_source("sample", split=split, root=None)
    assert isinstance(source, ArraySource)
    labels = source.labels()
    rows = np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in range(10)]))
    large = torch.from_numpy(source.images[rows].transpose(0, 3, 1, 2).copy()).float()
    small = torch.nn.functional.adaptive_avg_pool2d(large, 16).round().to(torch.uint8)
    return small.numpy(), labels[rows], list(source.classes)


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """A folder with train.lmdb (200 images, 16 px) and test.lmdb (100), cut from the embedded sample."""
    from duetgan.data.packing.records import pack_arrays

    folder = tmp_path_factory.mktemp("packed")
    for split, per_class in (("train", 20), ("test", 10)):
        images, labels, classes = sample_images(split, per_class)
        pack_arrays(folder / f"{split}.lmdb", images, labels=labels, classes=classes)
    return folder


@pytest.fixture
def sent(monkeypatch):
    """Sizes of the gradients that are sent, in order, as by one of two ranks; the other one's are the same."""
    from duetgan.utils.distributed import collectives

    sizes: list[int] = []

    def all_reduce(flat: Any, *, async_op: bool) -> Any:
        assert async_op
        sizes.append(flat.numel())
        flat.mul_(2)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    return sizes


@pytest.fixture
def last_line(capsys):
    """The figures that a benchmark prints as its last line, which are flat."""

    def read(script: Any, options: list[str]) -> dict[str, Any]:
        script.main(options)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert all(isinstance(value, (int, float, str)) for value in found.values())
        return found

    return read


def assert_raises(error: type[Exception], told: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """That a call raises an error with these words."""
    with pytest.raises(error, match=told):
        call(*arguments, **options)


@pytest.fixture
def refused(capsys):
    """The one error line of a refused command; `alone`: nothing else is on stderr."""
    from duetgan.utils.distributed.process import run_cli

    def run(main: Any, *arguments: str | Path, alone: bool = False) -> str:
        capsys.readouterr()
        assert run_cli(main, [str(a) for a in arguments]) == 2
        lines = capsys.readouterr().err.splitlines()
        errors = [line for line in lines if line.startswith("error")]
        assert len(errors) == 1, errors
        assert errors == lines or not alone, lines
        assert "Traceback" not in errors[0]
        return errors[0]

    return run
