"""The GAN step's benchmark at a tiny size: every figure it promises is there."""

import json

import pytest

from benchmarks import gan_step
from duetgan.utils.config.yaml_files import read_yaml


@pytest.fixture
def tiny(tmp_path):
    """A recipe of a few channels, with every penalty in every second step."""
    tree = read_yaml("configs/bench_gan_step.yaml")
    tree["batch_size"] = 8
    tree["generator"] |= {"z_dim": 4, "w_dim": 4, "mapping_layers": 1, "channel_max": 4}
    tree["discriminator"] |= {"channel_max": 4}
    tree["loss"] |= {"r1_interval": 2, "path_length_interval": 2}
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_every_figure_is_there_and_the_last_line_is_flat(tiny, last_line, monkeypatch):
    monkeypatch.setattr(gan_step, "peak_memory", lambda *_: (3.0, 2.0))  # a process each: not here
    result = last_line(gan_step, ["--config", str(tiny), "--repeats", "1", "--steps", "2", "--size", "8", "--json"])
    for name in ("bf16", "fp32", "fp32_nchw"):
        own = {key.removeprefix(f"{name}_"): value for key, value in result.items() if key.startswith(f"{name}_")}
        assert 0 < own["conv_share"] < 1.5
        phases = {key: value for key, value in own.items() if key.startswith("phase_")}
        assert sum(phases.values()) == pytest.approx(own["step_ms"])
        assert own["images_per_second"] == pytest.approx(8000 / own["step_ms"])
        assert own["gflops"] / own["bare_gflops"] == pytest.approx(own["conv_share"], rel=0.01)
        assert phases["phase_generator_path_length_ms"] > 0
        assert phases["phase_discriminator_penalty_ms"] > 0
        assert own["peak_mib"] == 3
    ratio = result["fp32_nchw_step_ms"] / result["bf16_step_ms"]
    assert result["bf16_vs_fp32_nchw_ratio"] == pytest.approx(ratio)
