"""The scaling benchmark counts what training does, and its page of docs/measurements holds what it prints."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import scaling
from benchmarks.gan.convolutions import Recorder, flops
from benchmarks.gan_step import random_images
from benchmarks.scaling import OUTSIDE, PRESETS, Images, Link, Work
from duetgan.training.base.data import make_loader
from duetgan.training.engine.tasks import TASKS
from duetgan.utils.config.recipes import recipes
from duetgan.utils.distributed import gradients
from duetgan.utils.errors import UserError
from duetgan.utils.script import run_cli
from tests.conftest import REPOSITORY

DOCS = (REPOSITORY / "docs" / "measurements" / "scaling.md").read_text()
SPEED = scaling.PEAK * 1e12 * scaling.EFFICIENCY
STEP = Work(batch=64, smallest=4, parameters=10**7, gradient_bytes=4 * 10**7, messages=10, waits=0, flop=1e12)


def test_every_recipe_is_counted() -> None:
    assert set(PRESETS) == {recipe.name for recipe in recipes()}


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def check_docs(names: list[str]) -> None:
    table = {name: scaling.figures(scaling.work(name), SPEED) for name in names}
    printed = rows_of(scaling.markdown(table))
    assert len(printed) == 2 * (len(names) + 1)
    assert [row for row in printed if row not in rows_of(DOCS)] == []


def test_docs_hold_what_is_printed() -> None:
    check_docs(["quickstart_gan", "r3gan_small", "finetune_resnet50_head"])


@pytest.mark.slow
def test_docs_hold_every_recipe() -> None:
    check_docs(list(PRESETS))


@pytest.mark.parametrize("name", ["quickstart_gan", "r3gan_small"])
def test_arithmetic_is_that_of_real_steps(name: str) -> None:
    """Of the dense convolutions, which are nearly all of it: as `benchmarks/gan_step.py` records them."""
    config, batch = scaling.recipe(name), 4
    with random_images(32, 1, 10) as reader:
        config.batch_size, config.compile = batch, "off"  # type: ignore[attr-defined]
        task = TASKS["gan"].task(config, reader, None, torch.device("cpu"))
        loader, counted = make_loader(config, reader, torch.device("cpu")), 0.0
        for step, share in scaling.kinds_of_steps(config).items():
            with Recorder(channels_last=True) as recorder:
                task.step(loader, step)
            counted += share * flops(recorder.calls)
    assert scaling.work(name).flop / scaling.work(name).batch == pytest.approx(counted / batch, rel=0.1)


def test_lazy_penalties_and_batchnorm_count_by_their_share_of_the_steps() -> None:
    kinds = scaling.kinds_of_steps(scaling.recipe("stylegan2_256"))  # R1 every 16 steps, path lengths every 4
    assert sorted(kinds.values()) == [1 / 16, 3 / 16, 12 / 16]
    assert list(scaling.kinds_of_steps(scaling.recipe("classifier")).values()) == [1.0]
    assert scaling.work("finetune_resnet50_head").waits == 0  # BatchNorm does not train
    assert scaling.work("quickstart_classifier").waits == 2 * 20  # ResNet-18 has 20


def test_buckets_are_those_that_are_sent(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 1000)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (300, 800, 2000, 10, 20)]
    gradients.GradientExchange(parameters).finish()
    assert sent == [2030, 1100]
    updater: Any = SimpleNamespace(parameters=parameters)
    assert scaling.buckets(updater) == 2


def test_the_model_of_time() -> None:
    link = Link("a link", 1e9, 0.0)
    control = scaling.NETWORK_MESSAGE
    assert scaling.seconds(STEP, 1, link) == 0
    assert scaling.seconds(STEP, 2, link) == pytest.approx(4e7 / 1e9 + 2 * control)
    assert scaling.seconds(STEP, 8, link) == pytest.approx(2 * 7 / 8 * 4e7 / 1e9 + 6 * control)
    slow = link._replace(latency=1e-3)
    assert scaling.seconds(STEP, 8, slow) - scaling.seconds(STEP, 8, link) == pytest.approx(6 * 10 * 1e-3)
    assert scaling.arithmetic_seconds(STEP, 8, 1e12) == pytest.approx(1 / 8)
    assert scaling.arithmetic_seconds(STEP, 512, 1e12) == pytest.approx(4 / 64)  # no less than the smallest share


def test_where_messages_pass_arithmetic() -> None:
    link = OUTSIDE[0]
    gpus = scaling.crossing(STEP, link, 1e12)
    assert gpus is not None
    for count, passed in ((gpus // 2, False), (gpus, True)):
        assert (scaling.seconds(STEP, count, link) > 1 / count) == passed


def test_command_line(capsys: pytest.CaptureFixture[str], last_line: Any) -> None:
    found = last_line(scaling, ["--only", "quickstart_gan", "--json", "--efficiency", "0.2"])
    assert found["quickstart_gan_gradient_mb"] == pytest.approx(4e-6 * found["quickstart_gan_parameters"])
    twice = found["quickstart_gan_arithmetic_1_ms"] * scaling.PEAK * 0.2 / 1e3
    assert twice == pytest.approx(found["quickstart_gan_tflop"])
    for wrong in (["--only", "nothing"], ["--efficiency", "2"]):
        assert run_cli(scaling.main, wrong) == 2
        assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(UserError, match="no recipe"):
        scaling.recipe("stylegan3_256")
    assert all(isinstance(images, Images) and images.resolution >= 32 for images in PRESETS.values())


def test_docs_name_the_assumptions() -> None:
    assert f"{scaling.PEAK:g} TFLOP/s" in DOCS
    assert f"{100 * scaling.EFFICIENCY:g} %" in DOCS
    for link in (*scaling.INSIDE, *OUTSIDE):
        assert re.search(rf"{link.name}\b.*{link.bandwidth / 1e9:g} GB/s.*{1e6 * link.latency:g} µs", DOCS), link
    assert Path("benchmarks/scaling.py").as_posix() in DOCS
