"""The model of predictions meets what was measured and what NVIDIA has published."""

import pytest

from benchmarks import predictions
from benchmarks.gpu import expected, switches
from benchmarks.scaling import PRESETS, Reader, recipe
from duetgan.extras.paper import predictions as on_paper
from duetgan.extras.paper.predictions import GIB


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_model_meets_measured_steps():
    """Within a factor of 1.5 of an H200's."""
    ratios = {row[0]: float(row[3]) for row in predictions.fit() if not row[0].endswith("samples, published")}
    assert len(ratios) == len(predictions.MEASURED)
    assert 1 / 1.5 <= min(ratios.values()) <= max(ratios.values()) <= 1.5


def test_what_is_expected_of_a_gpu_is_written_down():
    """The variants are those that `make gpu` times; one recipe is counted again."""
    recipes = {**switches.SMALL_PICTURES, **switches.PRESETS}
    for name in recipes:
        variants = ("eager", "graphs") if name in switches.SMALL_PICTURES else ("kernels", "kernels and graphs")
        for variant in variants:
            said = expected.of(name, variant, "NVIDIA H200")
            assert 0 < said["roofline_ms"] < said["predicted_ms"]
    assert expected.of("stylegan2_256", "kernels", "an unknown card") == {}
    name, samples = "cifar10_classifier_gpu", 256
    found = predictions.count(recipe(name).changed(micro_batch=None), Reader(PRESETS[name]), samples)  # type: ignore[arg-type]
    again = 1e3 * found.seconds(on_paper.GPUS[2], graphs=True)
    assert expected.of(name, "graphs", "NVIDIA H200")["predicted_ms"] == pytest.approx(again, rel=0.1)


@pytest.mark.slow
def test_stylegan2_256_needs_the_memory_that_its_authors_measured():
    row = predictions.PUBLISHED[4]  # without the images' augmentation, which theirs has
    assert predictions.of_published(row).peak / GIB == pytest.approx(row.memory, rel=0.15)


def test_what_layers_save_is_what_a_step_holds():
    """Of a ResNet-18 nearly all of the peak above what stays is saved by the layers' forward pass."""
    config, images = recipe("cifar10_classifier_gpu"), PRESETS["cifar10_classifier_gpu"]
    found = predictions.counted(config.changed(precision="fp32"), images, 256)
    with on_paper.fakes():
        saved = predictions.saved_by_layer(found, "classifier")
    before = found.held / GIB - predictions.split_of_memory(found)["gradients"]  # which the forward pass has not
    assert sum(saved.values()) * 256 / 1024 == pytest.approx(found.peak / GIB - before, rel=0.1)
    assert max(saved, key=lambda layer: saved[layer]).startswith("network.layer1")
