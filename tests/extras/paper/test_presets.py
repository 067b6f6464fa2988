"""The page of predictions holds what the benchmark prints, and the model meets what NVIDIA has published."""

import pytest

from benchmarks import predictions
from benchmarks.scaling import PRESETS, recipe
from duetgan.extras.paper import predictions as on_paper
from duetgan.extras.paper.predictions import GIB
from tests.benchmarks.test_scaling import rows_of
from tests.conftest import REPOSITORY

DOCS = (REPOSITORY / "docs" / "measurements" / "predictions.md").read_text().splitlines()


def check_docs(names: list[str]) -> None:
    printed = rows_of(predictions.tables(names)[0])
    assert len(printed) > 6
    assert [row for row in printed if row not in DOCS] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # beside other work it has taken more than six minutes
def test_docs_hold_every_preset_and_layer() -> None:
    check_docs(predictions.NAMES)
    assert [row for row in rows_of(predictions.layers(predictions.NAMES)) if row not in DOCS] == []


@pytest.mark.slow
def test_the_models_two_numbers_fit_published_trainings() -> None:
    *rows, best = predictions.fit()
    assert all(abs(float(row[3]) - 1) <= 0.3 for row in rows)
    assert best[2:4] == [
        f"efficiency {on_paper.EFFICIENCY + 0.01:.2f}",
        f"overhead {1e6 * on_paper.OVERHEAD + 1:.0f} µs",
    ]


@pytest.mark.slow
def test_stylegan2_256_needs_the_memory_that_its_authors_measured() -> None:
    row = predictions.PUBLISHED[4]  # without the images' augmentation, which theirs has
    assert predictions.of_published(row).peak / GIB == pytest.approx(row.memory, rel=0.15)


def test_what_layers_save_is_what_a_step_holds() -> None:
    """Of a ResNet-18 nearly all of the peak above what stays is saved by the layers' forward pass."""
    config, images = recipe("cifar10_classifier_gpu"), PRESETS["cifar10_classifier_gpu"]
    found = predictions.counted(config.changed(precision="fp32"), images, 256)
    with on_paper.fakes():
        saved = predictions.saved_by_layer(found, "classifier")
    before = found.held / GIB - predictions.split_of_memory(found)["gradients"]  # which the forward pass has not
    assert sum(saved.values()) * 256 / 1024 == pytest.approx(found.peak / GIB - before, rel=0.1)
    assert max(saved, key=lambda layer: saved[layer]).startswith("network.layer1")
